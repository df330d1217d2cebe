"""Options that cannot be or do not go together: unchecked, a run would begin and fail late,
or do something else than was asked. Each is one sentence with both sides and their numbers.
"""

from collections.abc import Iterator

import pytest
from ranks import ROOT

from base.errors import UserError
from config import validation
from config.command_line import parse


def lines() -> Iterator[tuple[str, int, str]]:
    """Yield words, number of ranks and a part of the sentence of tests/data/refused_options.txt.

    A line is `WORDS | SENTENCE` or `N ranks: WORDS | SENTENCE`; a line `@ WORDS` is put before the
    words of the lines after it.
    """
    before = ""
    for line in (ROOT / "tests" / "data" / "refused_options.txt").read_text().splitlines():
        if line.startswith("@ "):
            before = line.removeprefix("@ ")
            continue
        words, _, sentence = line.partition(" | ")
        ranks, _, words = words.rpartition(" ranks: ")
        yield f"{before} {words}", int(ranks or 1), sentence


@pytest.mark.parametrize(("words", "ranks", "sentence"), list(lines()))
def test_options_that_cannot_be_are_one_sentence(words, ranks, sentence):
    with pytest.raises(UserError) as caught:
        validation.check(parse(words.split()), ranks)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
