"""The lines that check.py prints: one for each layout, and the verdict.

line(outcome)                              equal    tp 2 cp 2
for text in verdict(reference, outcomes, seconds): ...
"""

from collections.abc import Iterator, Sequence

from base.errors import number_ranges, printable
from tools.checker.causes import explanations, operations, shared, title
from tools.checker.compare import Reference
from tools.checker.engine import Outcome
from tools.checker.layouts import name_of, ranks_of

WIDTH = 8
MOST = 6  # layouts that a verdict names


def line(outcome: Outcome) -> str:
    """Return the line of a layout."""
    name = name_of(outcome.layout)
    if outcome.variant is not None:
        name = f"{name} ({outcome.variant.name})"
    if outcome.resumed_from is not None:
        name = f"resumed in {name}"
    word, more = what(outcome)
    return printable(f"{word:{WIDTH}s} {name}{': ' * bool(more)}{more}")


def what(outcome: Outcome) -> tuple[str, str]:
    """Return what came of a layout in one word, and in a few more."""
    if outcome.failure is not None:
        failure = outcome.failure
        words = {"refused": "REFUSED", "error": "FAILS", "ended": "FAILS", "hangs": "HANGS"}
        return words[failure.kind], f"{failure.text:.150}"
    if outcome.difference is None:
        return "equal", ""
    key = outcome.difference.key
    where = f"step {key[0]}, " if key[0] > 0 else ""
    return "DIFFERS", f"{where}{title(key)}"


def verdict(
    reference: Reference, outcomes: Sequence[Outcome], left: int = 0, seconds: float = 0.0
) -> Iterator[str]:
    """Yield the lines of the verdict on all layouts; left: layouts for which there was no time."""
    wrong = [outcome for outcome in outcomes if not outcome.is_equal]
    ending = f", {left} not run" if left else ""
    if not wrong:
        number = f"{len(outcomes)} layouts compute" if len(outcomes) > 1 else "1 layout computes"
        yield f"equal: {number} what one rank does{ending} ({seconds:.0f} s)"
        return
    yield f"DIFFERENT: {len(wrong)} of {len(outcomes)} layouts{ending} ({seconds:.0f} s)"
    plain = [outcome for outcome in outcomes if outcome.variant is None]
    trained = [outcome for outcome in plain if outcome.resumed_from is None]
    differing = [outcome.layout for outcome in trained if not outcome.is_equal]
    equal = [outcome.layout for outcome in trained if outcome.is_equal]
    if differing:
        yield f"  where   {shared(differing, equal) or 'they have nothing in common'}"
    first = simplest(wrong)
    if first.failure is not None:
        yield from _of_failure(first)
        return
    yield from _of_difference(reference, first)


def simplest(wrong: Sequence[Outcome]) -> Outcome:
    """Return the outcome that says most: of the fewest ranks and options, with a tensor."""

    def size(outcome: Outcome) -> tuple[bool, bool, bool, bool, int, int]:
        resumed = outcome.resumed_from is not None
        has_no_tensor = outcome.difference is None or not outcome.difference.parts
        is_varied = outcome.variant is not None
        ranks, words = ranks_of(outcome.layout), len(name_of(outcome.layout))
        is_number = outcome.difference is not None and outcome.difference.key[1] == "number"
        return has_no_tensor, resumed, is_number, is_varied, ranks, words

    return min(wrong, key=size)


def _of_failure(outcome: Outcome) -> Iterator[str]:
    """Yield what is known of a layout that fails or hangs."""
    failure = outcome.failure
    assert failure is not None  # the caller has looked
    yield f"  layout  {name_of(outcome.layout)}"
    if outcome.variant is not None:
        yield f"  with    {outcome.variant.name}"
    yield f"  {failure.kind:7s} {printable(failure.text)}"
    for rank, where in list(failure.stacks.items())[:MOST]:
        last = [x for x in where.splitlines() if x.strip()][-6:]
        yield f"  rank {rank}  {printable(last[0].strip())}"
        yield from (f"          {printable(text.strip())}" for text in last[1:])


def _of_difference(reference: Reference, outcome: Outcome) -> Iterator[str]:
    """Yield the first tensor that differs, the operation before it, and what it may be."""
    difference, layout = outcome.difference, outcome.layout
    assert difference is not None  # the caller has looked
    step = difference.key[0]
    yield f"  layout  {name_of(layout)}" + (
        f", resumed from {name_of(outcome.resumed_from)}" if outcome.resumed_from else ""
    )
    if outcome.variant is not None:
        yield f"  with    {outcome.variant.name}"
    if not difference.parts:
        yield f"  first   {difference.more[0]}"
        yield f"  between {operations(reference, difference.key, layout)}"
        return
    loaded = "after the resume, " if outcome.resumed_from else ""
    yield f"  first   {loaded}step {step}: {title(difference.key)}"
    ranks = sorted({part.rank for part in difference.wrong})
    off = f"off by {difference.off:.1e} of its largest element"
    yield f"          {off}, on ranks {number_ranges(ranks)}"
    if difference.last_equal is not None:
        before = title(difference.last_equal)
        yield f"  equal   until {before} (step {difference.last_equal[0]})"
    between = operations(reference, difference.key, layout)
    if outcome.resumed_from and outcome.resumed_step in (step, step - 1):
        between = f"the save and the load of the checkpoint (resume); else {between}"
    yield f"  between {between}"
    for text in explanations(reference, difference, layout):
        yield f"  likely  {text}"
    yield f"  {difference.differ} of {difference.compared} tensors differ"
    for text in difference.more[:2]:
        yield f"  also    {text}"
