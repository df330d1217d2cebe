"""Counts the text that a run has read: all tokens, and the samples and tokens of each corpus.

    usage = Usage().after(samples.count_by_corpus(0, 512), 512, length=2048, trained=True)
    usage.corpora["data/books"]          (samples, tokens)
    Usage.from_text(usage.text())        the text is what a checkpoint holds

A step whose update was skipped has read its samples, but not trained on them. The counts are
updated after every step, so they stay exact if data or batch size change.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Usage:
    """The text that a run has read so far.

    tokens: the number of tokens in all samples that have been read. corpora: by prefix of a corpus,
    the number of its samples and of its tokens in steps that updated the weights.
    """

    tokens: int = 0
    corpora: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def after(self, counts: Mapping[str, int], samples: int, length: int, trained: bool) -> "Usage":
        """Return the usage after one more step.

        counts: the step's number of samples by corpus prefix. samples: the step's number of samples
        from all corpora. length: the tokens of a sample. trained: whether the step updated the
        weights.
        """
        corpora = dict(self.corpora)
        if trained:
            for prefix, count in counts.items():
                samples_before, tokens_before = corpora.get(prefix, (0, 0))
                corpora[prefix] = (samples_before + count, tokens_before + count * length)
        return Usage(self.tokens + samples * length, corpora)

    def text(self) -> str:
        """Return the usage as JSON, in ASCII characters, for a checkpoint; see `from_text`."""
        return json.dumps({"tokens": self.tokens, "corpora": self.corpora})

    @classmethod
    def from_text(cls, text: str) -> "Usage":
        """Return the usage that a checkpoint's `text` describes; raise ValueError if it is damaged.

        All numbers in it must be integers from 0 to 2^63 - 1.
        """
        try:
            values = json.loads(text)
            corpora = {str(prefix): (a, b) for prefix, (a, b) in values["corpora"].items()}
            numbers = [values["tokens"]]
            for samples, tokens in corpora.values():
                numbers += [samples, tokens]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            numbers = [-1]  # the next lines refuse this number, and so a text of another form
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError(f"{text:.80} is no count of tokens")
        return cls(values["tokens"], corpora)
