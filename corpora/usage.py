"""Counts the text that a run has read: tokens of all samples, and each corpus trained on.

    usage = Usage().after(samples.count_by_corpus(0, 512), length=2048, trained=True)
    usage.corpora["data/books"]          (samples, tokens)
    Usage.from_text(usage.text())        by the text that a checkpoint holds

It is counted step by step, so that it stays exact if data or batch size change.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Usage:
    """The text that a run has read so far.

    tokens: the number in all consumed samples. corpora: by prefix, (samples, tokens) that steps
    which changed the weights took from that corpus.
    """

    tokens: int = 0
    corpora: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def after(self, counts: Mapping[str, int], samples: int, length: int, trained: bool) -> "Usage":
        """Return the usage after one more step, on `samples` samples of `length` tokens each.

        counts: the step's samples by corpus prefix. trained: whether the step changed the weights.
        """
        corpora = dict(self.corpora)
        for prefix, count in counts.items() if trained else ():
            before = corpora.get(prefix, (0, 0))
            corpora[prefix] = (before[0] + count, before[1] + count * length)
        return Usage(self.tokens + samples * length, corpora)

    def text(self) -> str:
        """Return the usage as JSON, in ASCII characters."""
        return json.dumps({"tokens": self.tokens, "corpora": self.corpora})

    @classmethod
    def from_text(cls, text: str) -> "Usage":
        """Return the usage that `text` describes; raise ValueError if it describes none."""
        try:
            values = json.loads(text)
            corpora = {str(prefix): (a, b) for prefix, (a, b) in values["corpora"].items()}
            numbers = [values["tokens"], *(n for pair in corpora.values() for n in pair)]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            numbers = [-1]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError(f"{text:.80} is no count of tokens")
        return cls(values["tokens"], corpora)
