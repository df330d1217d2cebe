"""Defects planted into the traces of a world: one rank does something else than its neighbours."""

import random
from collections import Counter
from itertools import pairwise

from tools.emulator.matching import NOT_COLLECTIVE, RunTraces
from tools.emulator.recording import MESSAGES, Event

KINDS = (
    "left out",
    "doubled",
    "another order",
    "another type",
    "another size",
    "another group",
    "another operation",
    "message left out",
    "message of another size",
    "messages crossed",
)


class Cannot(Exception):
    """The rank's trace has nothing of the kind."""


def plant(world: RunTraces, kind: str, seed: int) -> tuple[RunTraces, int, str, str]:
    """The world with one defect; the rank that has it, the role, and in words what was planted."""
    chance = random.Random(seed)
    rank = chance.randrange(len(world.traces))
    events = _link(world.traces[rank])
    sends = "message" in kind
    places = [
        i
        for i, (entry, _) in enumerate(events)
        if (entry[0].kind in MESSAGES if sends else entry[0].kind not in NOT_COLLECTIVE)
    ]
    if not places:
        raise Cannot(kind)
    at = chance.choice(places)
    event = events[at][0][0]
    _change(events, at, kind, places, chance)
    traces = list(world.traces)
    traces[rank] = _number(events)
    about = f"rank {rank}: {kind} of {event.kind} {event.number} of {event.role}"
    return RunTraces(world.rows, traces), rank, event.role, about


def _change(events: list, at: int, kind: str, places: list[int], chance: random.Random) -> None:
    entry = events[at][0]
    event = entry[0]
    if kind.endswith("left out"):
        _drop(events, at)
    elif kind == "doubled":
        events.insert(at, ([event], None))
    elif kind == "another order":
        others = [events[i][0] for i in places if events[i][0][0].role == event.role]
        others = [other for other in others if _facts(other[0]) != _facts(event)]
        if not others:
            raise Cannot(kind)
        other = chance.choice(others)
        entry[0], other[0] = other[0], entry[0]
    elif kind == "another type":
        entry[0] = event._replace(dtype="float16")
    elif kind.endswith("another size"):
        entry[0] = event._replace(bytes=event.bytes + 512)
    elif kind == "another group":
        roles = {e[0].role for e, _ in events if e[0].role} - {event.role}
        if not roles:
            raise Cannot(kind)
        entry[0] = event._replace(role=chance.choice(sorted(roles)))
    elif kind == "another operation":
        entry[0] = event._replace(kind="all_to_all")
    elif kind == "messages crossed":
        waits = [w for w, (_, of) in enumerate(events) if of and _same(of[0]) == _same(event)]
        operations = [of for _, of in events]
        # Take two neighbours of which the second is posted before the wait for the first.
        pairs = [(a, b) for a, b in pairwise(waits) if events.index((operations[b], None)) < a]
        if event.kind != "receive" or not pairs:
            raise Cannot(kind)
        one, two = chance.choice(pairs)
        events[one] = (events[one][0], operations[two])
        events[two] = (events[two][0], operations[one])


def _same(event: Event) -> tuple:
    return event.kind, event.role, event.peer


def _facts(event: Event) -> tuple:
    return event.kind, event.bytes, event.dtype, event.op, event.line, event.place


# While a trace is changed its entries are lists of one event, and waits know the entry of their
# operation: a list of (entry, that entry or None).


def _link(trace: list[Event]) -> list:
    entries = [[event] for event in trace]
    return [(e, entries[e[0].number] if e[0].kind == "wait" else None) for e in entries]


def _drop(events: list, at: int) -> None:
    dropped = events.pop(at)[0]
    events[:] = [(entry, of) for entry, of in events if of is not dropped]


def _number(events: list) -> list[Event]:
    """The events with the numbers that a recording would give."""
    counts, found, places = Counter(), [], {}
    for position, (entry, of) in enumerate(events):
        event, places[id(entry)] = entry[0], position
        if of is not None:
            event = event._replace(number=places[id(of)])
        elif event.number:
            key = (event.role, event.kind, event.peer) if event.kind in MESSAGES else event.role
            counts[key] += 1
            event = event._replace(number=counts[key])
        found.append(event)
    return found
