"""The lines that check.py prints: one for each layout, and the verdict.

line(outcome)                              equal    tp 2 cp 2
for text in verdict(reference, outcomes, seconds): ...
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from base.errors import number_ranges, printable
from tools.checker.causes import explanations, operations, own_traits, shared, title, traits_of
from tools.checker.compare import JUDGED, Reference
from tools.checker.engine import Outcome
from tools.checker.layouts import AnyLayout, name_of, ranks_of

WIDTH = 8
MOST = 6  # ranks or parameters that a verdict names
RESULTS = ("losses", "gradients", "weights")


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
    reference: Reference,
    outcomes: Sequence[Outcome],
    left: int = 0,
    seconds: float = 0.0,
    reference_of: Callable[[Outcome], Reference] | None = None,
) -> Iterator[str]:
    """Yield the lines of the verdict on all layouts; left: layouts for which there was no time.

    reference: the run of one rank. reference_of: that with which an outcome was compared, if there
    are several.
    """
    wrong = [outcome for outcome in outcomes if not outcome.is_equal]
    ending = f", {left} not run" if left else ""
    ending += f" ({seconds:.0f} s){_moved(reference)}"
    if not wrong:
        number = f"{len(outcomes)} layouts compute" if len(outcomes) > 1 else "1 layout computes"
        yield f"equal: {number} what one rank does, losses and weights too{ending}"
        yield from _rounding(reference)
        return
    yield f"DIFFERENT: {len(wrong)} of {len(outcomes)} layouts{ending}"
    yield f"  result  {_results(wrong)}"
    for place, finding in enumerate(findings(reference, outcomes, reference_of)):
        if place:
            yield f"another difference, in {_count(len(finding.group), 'layout')}:"
        if finding.where:
            yield f"  where   {finding.where}"
        if finding.first.failure is not None:
            yield from _failure_lines(finding.first)
        else:
            yield from _difference_lines(finding)
    yield from _rounding(reference)


@dataclass(frozen=True)
class Finding:
    """Layouts that differ by what has one cause. group: they; where: what they alone have.

    first: the simplest of them. reference: that with which it was compared.
    """

    group: list[Outcome]
    where: str
    first: Outcome
    reference: Reference

    @property
    def between(self) -> str:
        """The operations between the last equal tensor and the first one that differs."""
        outcome, difference = self.first, self.first.difference
        assert difference is not None  # the caller has looked
        text = operations(self.reference, difference.key, outcome.layout)
        if outcome.resumed_from and outcome.resumed_step in (
            difference.key[0],
            difference.key[0] - 1,
        ):
            return f"the save and the load of the checkpoint (resume); else {text}"
        return text

    @property
    def likely(self) -> list[str]:
        """What fits the values of the first tensor that differs."""
        assert self.first.difference is not None  # the caller has looked
        return explanations(self.reference, self.first.difference, self.first.layout)

    @property
    def data(self) -> dict[str, Any]:
        """The finding as check.py --json has it (docs/check.md)."""
        outcome, difference = self.first, self.first.difference
        found: dict[str, Any] = {"where": self.where, "layouts": len(self.group)}
        found |= {"layout": name_of(outcome.layout), "likely": []} | _beside(outcome)
        if outcome.failure is not None:
            failure = outcome.failure
            found["failure"] = {"kind": failure.kind, "ranks": failure.ranks, "text": failure.text}
            return found
        assert difference is not None  # an outcome that differs has one of the two
        found |= first_tensor(outcome) | {"likely": self.likely, "between": self.between}
        equal = difference.last_equal
        found["equal_until"] = None if equal is None else {"step": equal[0], "tensor": title(equal)}
        found["results"] = [name for name in RESULTS if name in difference.results]
        found["tensors_that_differ"] = len(difference.differing)
        found["tensors_compared"] = difference.compared
        found["also"] = difference.more
        return found


def findings(
    reference: Reference,
    outcomes: Sequence[Outcome],
    reference_of: Callable[[Outcome], Reference] | None = None,
) -> Iterator[Finding]:
    """Yield the findings on layouts that differ or fail, one for each cause; see `verdict`."""
    wrong = [outcome for outcome in outcomes if not outcome.is_equal]
    equal = [x.layout for x in outcomes if x.is_equal and _is_plain(x)]
    for group in separate(wrong, equal):
        differing = [outcome.layout for outcome in group if _is_plain(outcome)]
        names = dict.fromkeys(x.variant.name for x in group if x.variant is not None)
        where = f"only with {' or '.join(names)}" if names else ""
        if differing:
            where = shared(differing, equal) or "they have nothing in common"
        first = simplest(group)
        yield Finding(group, where, first, reference_of(first) if reference_of else reference)


def first_tensor(outcome: Outcome) -> dict[str, Any]:
    """Return the first tensor of an outcome that differs, as --json has it."""
    difference = outcome.difference
    if difference is None:
        return {}
    step, kind, name = difference.key
    found: dict[str, Any] = {"step": step, "kind": kind, "tensor": name}
    found["text"] = title(difference.key) if difference.parts else difference.more[0]
    found["ranks"] = sorted({part.rank for part in difference.wrong})
    off = difference.off
    found["off_fraction"] = off if math.isfinite(off) else None  # JSON has no infinity
    return found


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """Return what came of a layout, as --json has it."""
    word, text = what(outcome)
    found: dict[str, Any] = {"layout": name_of(outcome.layout), "ranks": ranks_of(outcome.layout)}
    found |= {"outcome": word.lower(), "seconds": round(outcome.seconds, 1)} | _beside(outcome)
    found["first"] = first_tensor(outcome) or None
    found["text"] = text
    return found


def _beside(outcome: Outcome) -> dict[str, Any]:
    """Return what distinguishes an outcome beside its layout."""
    saved_by = outcome.resumed_from
    return {
        "resumed_from": None if saved_by is None else name_of(saved_by),
        "variant": None if outcome.variant is None else outcome.variant.name,
    }


def _is_plain(outcome: Outcome) -> bool:
    """Return whether a layout ran from its beginning, in the sizes and types of the small run."""
    return outcome.resumed_from is None and outcome.variant is None


def separate(wrong: Sequence[Outcome], equal: Sequence[AnyLayout]) -> Iterator[list[Outcome]]:
    """Yield the layouts that differ by what has one cause, as far as the runs show it.

    They have the same first tensor, of whatever block, as the simplest of them, or what they and
    no equal layout have. equal: the layouts that are one rank's.
    """
    left = list(wrong)
    while left:
        of_first = _cause_lines(simplest(left), left, equal)
        yield [outcome for outcome, is_of_first in zip(left, of_first, strict=True) if is_of_first]
        left = [
            outcome for outcome, is_of_first in zip(left, of_first, strict=True) if not is_of_first
        ]


def _cause_lines(
    first: Outcome, wrong: Sequence[Outcome], equal: Sequence[AnyLayout]
) -> list[bool]:
    """Return for each wrong outcome whether it may have the same cause as the first one."""
    alike = [_signature(outcome) == _signature(first) for outcome in wrong]
    own = own_traits(
        [x.layout for x, is_alike in zip(wrong, alike, strict=True) if is_alike], equal
    )
    return [
        is_alike or any(name in traits_of(outcome.layout) for name in own)
        for outcome, is_alike in zip(wrong, alike, strict=True)
    ]


def _signature(outcome: Outcome) -> tuple[bool, str]:
    """Return what layouts with the same fault show: the first tensor, of whatever block."""
    resumed = outcome.resumed_from is not None
    if outcome.failure is not None:
        return resumed, re.sub(r"\d+", "", outcome.failure.text)
    assert outcome.difference is not None  # the caller has looked
    return resumed, re.sub(r"\d+", "", title(outcome.difference.key))


def _results(wrong: Sequence[Outcome]) -> str:
    """Return which of losses, gradients and weights are equal, and in how many layouts not."""
    found = [outcome.difference.results for outcome in wrong if outcome.difference is not None]
    if not found:
        return "none: no layout that is not equal came to its end"
    if not any(found):
        return "no loss, gradient or weight differs"
    counts = {name: sum(name in each for each in found) for name in RESULTS}
    equal = [name for name, count in counts.items() if not count]
    differ = [f"{name} differ in {_count(n, 'layout')}" for name, n in counts.items() if n]
    return ", ".join([*differ, *(f"{name} are equal" for name in equal)])


def _count(number: int, word: str) -> str:
    """Return a number of things with their noun."""
    return f"{number} {word}{'s' * (number != 1)}"


# ---- What rounding moves -------------------------------------------------------------------------


def _moved(reference: Reference) -> str:
    """Return how many tensors rounding moves farther than a layout may be off, and the first."""
    keys = reference.moved()
    if not keys:
        return ""
    number = len({key[1:] for key in keys})
    are = f"{number} tensors are" if number > 1 else "1 tensor is"
    return f"; {are} rounding ({title(keys[0])} moves as much if the last bits are flipped)"


def _rounding(reference: Reference) -> Iterator[str]:
    """Yield lines on the tensors that cannot be judged because rounding moves them."""
    keys = reference.moved()
    held = [key for key in keys if (key[0], key[2]) in reference.rounding.held]
    hidden = [key for key in keys if key not in held and reference.allowed(key) > JUDGED]
    if held:
        names = list(dict.fromkeys(name for _, _, name in held))
        some = ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" * (len(names) > MOST))
        most = max(map(reference.allowed, held))
        size = f" of less than {most:.0e} of its largest element" if most < 1 else ""
        yield f"  rounding decides the update of {some}"
        yield f"           a fault in one alone{size} is not seen; the next step has one rank's"
    if hidden:
        most = max(reference.rounding.growth[key] for key in hidden)
        yield (
            f"  not judged: {_count(len(hidden), 'tensor')} from step {hidden[0][0]}, "
            f"{title(hidden[0])} on, which rounding moves by up to {most:.0e}"
        )


def simplest(wrong: Sequence[Outcome]) -> Outcome:
    """Return the outcome that says most: of the fewest ranks and options, with a tensor."""

    def size(outcome: Outcome) -> tuple[bool, bool, bool, bool, int, int]:
        """Return the key to sort by: the smallest outcome says most."""
        resumed = outcome.resumed_from is not None
        has_no_tensor = outcome.difference is None or not outcome.difference.parts
        is_varied = outcome.variant is not None
        ranks, words = ranks_of(outcome.layout), len(name_of(outcome.layout))
        is_number = outcome.difference is not None and outcome.difference.key[1] == "number"
        return has_no_tensor, resumed, is_number, is_varied, ranks, words

    return min(wrong, key=size)


def _failure_lines(outcome: Outcome) -> Iterator[str]:
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


def _difference_lines(finding: Finding) -> Iterator[str]:
    """Yield the first tensor that differs, the operation before it, and what it may be."""
    outcome = finding.first
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
        yield f"  between {finding.between}"
        return
    loaded = "after the resume, " if outcome.resumed_from else ""
    yield f"  first   {loaded}step {step}: {title(difference.key)}"
    ranks = sorted({part.rank for part in difference.wrong})
    off = f"off by {difference.off:.1e} of its largest element"
    yield f"          {off}, on ranks {number_ranges(ranks)}"
    if difference.last_equal is not None:
        before = title(difference.last_equal)
        yield f"  equal   until {before} (step {difference.last_equal[0]})"
    yield f"  between {finding.between}"
    for text in finding.likely:
        yield f"  likely  {text}"
    which = ", ".join(name for name in RESULTS if name in difference.results)
    which = f": {which}" if which else "; no loss, gradient or weight"
    yield f"  {len(difference.differing)} of {difference.compared} tensors differ{which}"
    for text in difference.more[:2]:
        yield f"  also    {text}"
