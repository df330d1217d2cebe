"""Whether the operations of all ranks of a world meet: in every group the same ones in one order.

world = World(rows, traces)
sentences = mismatches(world)      # empty: every operation of every group is the same everywhere
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from emulator.recording import COPY, LOAD, MESSAGES, READ, Event

MOST_SENTENCES = 20
ONE_SIDED = ("broadcast", "reduce")
NOT_COLLECTIVE = ("wait", READ, COPY, LOAD, *MESSAGES)


class Operations:
    """The operations of one trace by group."""

    def __init__(self, events: Sequence[Event]):
        self.collectives: dict[str, list[Event]] = {}
        # By role, kind and peer; with where the receiver waits for it, or None.
        self.messages: dict[tuple[str, str, int], list[tuple[Event, str | None]]] = {}
        waited = {e.number: e.place for e in events if e.kind == "wait"}
        for index, event in enumerate(events):
            if event.kind in MESSAGES:
                key = event.role, event.kind, event.peer
                taken = event.place if event.kind == "send" else waited.get(index)
                self.messages.setdefault(key, []).append((event, taken))
            elif event.kind not in NOT_COLLECTIVE:
                self.collectives.setdefault(event.role, []).append(event)


@dataclass
class World:
    """All ranks. rows: the ranks of every group by role; traces: the events of every rank, of which
    ranks that do the same share one.
    """

    rows: dict[str, list[tuple[int, ...]]]
    traces: list[list[Event]]
    _of: dict[int, Operations] = field(default_factory=dict)

    def operations(self, rank: int) -> Operations:
        """The operations of a rank by group."""
        key = id(self.traces[rank])
        if key not in self._of:
            self._of[key] = Operations(self.traces[rank])
        return self._of[key]

    @cached_property
    def row_of(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """The ranks of a rank's group of a role."""
        return {(role, r): row for role, rows in self.rows.items() for row in rows for r in row}


def mismatches(world: World) -> list[str]:
    """A sentence for each group whose members do not do the same, or not in one order: both ranks,
    the operation, both versions and source lines. At most MOST_SENTENCES.
    """
    found: list[str] = []
    compared = set()
    for role, rows in world.rows.items():
        for row in rows:
            alike = (role, *(id(world.traces[rank]) for rank in row))
            if len(row) == 1 or alike in compared:
                continue
            compared.add(alike)
            found += _collectives(world, role, row)
            found += _messages(world, role, row)
            if len(found) >= MOST_SENTENCES:
                return found[:MOST_SENTENCES]
    return found


def _collectives(world: World, role: str, row: tuple[int, ...]) -> Iterator[str]:
    """Sentences about a group's collectives: each other member against the first."""
    first = row[0]
    compared = {id(world.traces[row[0]])}
    for other in row[1:]:
        if id(world.traces[other]) in compared:
            continue
        compared.add(id(world.traces[other]))
        pair = [world.operations(rank).collectives.get(role, []) for rank in (first, other)]
        for number in range(max(map(len, pair))):
            one, two = (events[number] if number < len(events) else None for events in pair)
            if one is None or two is None or _common(one) != _common(two):
                yield _differ(
                    f"operation {number + 1} of {_group(role, row)}", first, one, other, two
                )
                break


def _common(event: Event) -> Event:
    """Return the event with only those values that must be equal on all members of its group.

    In a broadcast or reduce the root's code may run at another line and place than the others'.
    """
    return event._replace(line="", place="") if event.kind in ONE_SIDED else event


def _messages(world: World, role: str, row: tuple[int, ...]) -> Iterator[str]:
    """Sentences about messages: what each member sends to another against what that receives."""
    for source, sender in enumerate(row):
        for to, receiver in enumerate(row):
            sent = world.operations(sender).messages.get((role, "send", to), [])
            received = world.operations(receiver).messages.get((role, "receive", source), [])
            for number in range(max(len(sent), len(received))):
                one, action = sent[number] if number < len(sent) else (None, None)
                two, taken = received[number] if number < len(received) else (None, None)
                name = f"message {number + 1} of {role} from rank {sender} to rank {receiver}"
                if one is None or two is None or (one.bytes, one.dtype) != (two.bytes, two.dtype):
                    yield _differ(name, sender, one, receiver, two)
                    break
                if taken is not None and taken != action:
                    lines = f"{one.line} and {two.line}"
                    yield f"{name}: sent by {action}, received for {taken}, at {lines}"
                    break


def _group(role: str, row: tuple[int, ...]) -> str:
    ranks = ", ".join(map(str, row[:8])) + (", ..." if len(row) > 8 else "")
    return f"{role} (ranks {ranks})"


def _differ(name: str, one: int, its: Event | None, other: int, others: Event | None) -> str:
    return f"{name}: rank {one} {_version(its)}; rank {other} {_version(others)}"


def _version(event: Event | None) -> str:
    if event is None:
        return "has none"
    return f"does {describe(event)}"


def describe(event: Event) -> str:
    """An operation in words: `all_reduce SUM of 512 bytes float32 at model.py:246 (step 1, F 0)`"""
    kind = f"{event.kind} {event.op}".strip()
    size = f"{event.bytes:,} bytes {event.dtype}"
    return f"{kind} of {size} at {event.line} ({event.place})"
