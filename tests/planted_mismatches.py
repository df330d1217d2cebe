"""Defects planted into the traces of a world: one rank does something else than its neighbours."""

import random
from collections import Counter

from emulator.matching import NOT_COLLECTIVE, World
from emulator.recording import MESSAGES, Event

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


def plant(world: World, kind: str, seed: int) -> tuple[World, int, str, str]:
    """The world with one defect; the rank that has it, the role, and in words what was planted."""
    chance = random.Random(seed)
    rank = chance.randrange(len(world.traces))
    events = _link(world.traces[rank])
    wanted = MESSAGES if "message" in kind else None
    places = [
        i
        for i, (event, _) in enumerate(events)
        if (event.kind in MESSAGES if wanted else event.kind not in NOT_COLLECTIVE)
    ]
    if not places:
        raise Cannot(kind)
    at = chance.choice(places)
    event = events[at][0]
    _change(events, at, kind, places, chance)
    traces = list(world.traces)
    traces[rank] = _number(events)
    about = f"rank {rank}: {kind} of {event.kind} {event.number} of {event.role}"
    return World(world.rows, traces), rank, event.role, about


def _change(events: list, at: int, kind: str, places: list[int], chance: random.Random) -> None:
    event = events[at][0]
    if kind.endswith("left out"):
        _drop(events, at)
    elif kind == "doubled":
        events.insert(at, (event, None))
    elif kind == "another order":
        others = [i for i in places if events[i][0].role == event.role]
        others = [i for i in others if _facts(events[i][0]) != _facts(event)]
        if not others:
            raise Cannot(kind)
        other = min(others, key=lambda i: abs(i - at))
        one, two = events[at][0], events[other][0]
        _replace(events, at, two)
        _replace(events, other, one)
    elif kind == "another type":
        _replace(events, at, event._replace(dtype="float16"))
    elif kind.endswith("another size"):
        _replace(events, at, event._replace(bytes=event.bytes + 512))
    elif kind == "another group":
        roles = {e.role for e, _ in events if e.role} - {event.role}
        if not roles:
            raise Cannot(kind)
        _replace(events, at, event._replace(role=chance.choice(sorted(roles))))
    elif kind == "another operation":
        _replace(events, at, event._replace(kind="all_to_all"))
    elif kind == "messages crossed":
        same = (event.kind, event.role, event.peer)
        waits = [w for w, (e, of) in enumerate(events) if of and _same(of[0]) == same]
        waits = [w for w in waits if events[w][0].place != events[at][0].place]
        if event.kind != "receive" or len(waits) < 2:
            raise Cannot(kind)
        one, two = chance.sample(waits, 2)
        events[one], events[two] = (
            (events[one][0], events[two][1]),
            (events[two][0], events[one][1]),
        )


def _same(event: Event) -> tuple:
    return event.kind, event.role, event.peer


def _facts(event: Event) -> tuple:
    return event.kind, event.bytes, event.dtype, event.op, event.line, event.place


# A trace as a list of [event, the entry of the operation that a wait is for].


def _link(trace: list[Event]) -> list:
    holders = [[event] for event in trace]
    linked = []
    for event, holder in zip(trace, holders):
        linked.append((event, holders[event.number] if event.kind == "wait" else None))
    for entry, holder in zip(linked, holders):
        holder.append(entry)
    return linked


def _replace(events: list, at: int, event: Event) -> None:
    old = events[at]
    events[at] = (event, None)
    for _, of in events:
        if of is not None and of[1] is old:
            of[1] = events[at]


def _drop(events: list, at: int) -> None:
    dropped = events.pop(at)
    events[:] = [entry for entry in events if entry[1] is None or entry[1][1] is not dropped]


def _number(events: list) -> list[Event]:
    """The events with the numbers that a recording would give."""
    counts, found, index = Counter(), [], {}
    for position, entry in enumerate(events):
        event, of = entry
        index[id(entry)] = position
        if of is not None:
            event = event._replace(number=index[id(of[1])])
        elif event.number:
            key = (event.role, event.kind, event.peer) if event.kind in MESSAGES else event.role
            counts[key] += 1
            event = event._replace(number=counts[key])
        found.append(event)
    return found
