"""Whether the operations of all ranks of a world meet: in every group the same ones in one order.

world = World(rows, traces)
sentences = mismatches(world)      # empty: every operation of every group is the same everywhere

Runs all ranks' traces by the rules of NCCL and CUDA, without time: do all come to an end?

    operation   goes to the stream of its group's communicator, which runs one after the other; it
                begins after what the compute stream had to wait for before, and ends on all members
                together
    wait        the compute stream waits for the operation, the host goes on
    host read   the host waits for the compute stream
    load        of a kernel, at its first launch: the host waits for all streams of the device (CUDA
                C++ Programming Guide, Lazy Loading; meta-pytorch/torchcomms pull request 2334)
    connection  the first message from one rank to another in a group blocks both hosts until both
                are there: NCCL connects pairs lazily (NVIDIA/nccl issue 783)
    --blocking  without stages the host waits for every operation where it starts; that it waits
                where the stream does changes nothing: what follows is behind that on the stream

Ranks that do the same among the same neighbours are simulated once.
"""

import itertools
from collections import deque
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
    ranks that do the same share one. ran: the ranks whose trace is their own; None: all.
    """

    rows: dict[str, list[tuple[int, ...]]]
    traces: list[list[Event]]
    ran: frozenset[int] | None = None
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
            alike: tuple = (role, *(id(world.traces[rank]) for rank in row))
            alike += tuple(rank for rank in row if world.ran and rank in world.ran)
            if len(row) == 1 or alike in compared:
                continue
            compared.add(alike)
            found += _collectives(world, role, row)
            found += _messages(world, role, row)
            found += _unequal_blocks(world, role, row)
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
                    f"operation {number + 1} of {_group(role, row)}",
                    first,
                    one,
                    other,
                    two,
                )
                break


def _common(event: Event) -> Event:
    """Return the event with only those values that must be equal on all members of its group.

    In a broadcast or reduce the root's code may run at another line and place than the others'.
    The rows of unequal blocks are compared by _unequal_blocks.
    """
    event = event._replace(rows=())
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


def _unequal_blocks(world: World, role: str, row: tuple[int, ...]) -> Iterator[str]:
    """Sentences about all-to-alls: what each member sends to another against what that expects.

    The rows depend on a member's place in the group, so only ranks that were run are compared.
    """
    unequal: dict[int, list[Event]] = {}  # by place in the group
    for place, rank in enumerate(row):
        if world.ran is None or rank in world.ran:
            events = world.operations(rank).collectives.get(role, [])
            unequal[place] = [event for event in events if event.rows]
    unequal = {place: events for place, events in unequal.items() if events}
    for i, j in itertools.permutations(unequal, 2):
        for one, two in zip(unequal[i], unequal[j]):
            sent = one.rows[1][j]
            expected = two.rows[0][i]
            if sent != expected:
                sides = f"{row[i]} sends {sent} rows, {row[j]} expects {expected}"
                yield f"operation {one.number} of {_group(role, row)}: {sides}, at {one.line}"
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


# ---- Deadlocks by the rules of NCCL and CUDA -----------------------------------------------------


@dataclass
class _Rank:
    """One rank of each kind. at: the host's next event; waits: operations (by their index) that the
    compute stream waits for, passed: so many of them have ended; queues: by role, operations that
    have started, with how many waits are before them.
    """

    rank: int
    events: list[Event]
    at: int = 0
    waits: list[int] = field(default_factory=list)
    passed: int = 0
    queues: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    started: bool = False  # the operation at `at`, on which the host is blocked

    def holds_host(self, event: Event) -> bool:
        """Whether the host waits for the device at an event that is no operation."""
        computes = self.passed < len(self.waits)
        if event.kind == LOAD:
            return computes or any(self.queues.values())
        return event.kind == READ and computes

    def drain(self) -> None:
        """Let the compute stream pass the operations that have ended."""
        while self.passed < len(self.waits) and self.waits[self.passed] in self.ended:
            self.passed += 1


def deadlock(world: World, blocking: bool = False) -> str | None:
    """Which ranks wait for one another, where, if the world does not come to an end; else None.

    blocking: launches block the host. The world's operations must match.
    """
    return _Simulation(world, blocking).run()


class _Simulation:
    def __init__(self, world: World, blocking: bool):
        self.world = world
        self.blocking = blocking
        self.kind_of = kinds(world)
        self.first = {kind: rank for rank, kind in reversed(list(enumerate(self.kind_of)))}
        self.ranks = {k: _Rank(r, world.traces[r]) for k, r in self.first.items()}
        self.arrived: dict[tuple, set] = {}  # hosts, by connection
        self.ready: dict[tuple, set] = {}  # kinds whose operation may run, by meeting
        self.changed: deque[int] = deque()
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}

    def run(self) -> str | None:
        """Let every rank go as far as it can; what stands still then, or None."""
        self.changed.extend(self.ranks)
        while self.changed:
            kind = self.changed.popleft()
            rank = self.ranks[kind]
            rank.drain()
            while self._host(kind, rank):
                pass
            self._streams(kind, rank)
        stuck = [k for k, r in self.ranks.items() if r.at < len(r.events) or any(r.queues.values())]
        return self._describe(stuck) if stuck else None

    def _host(self, kind: int, rank: _Rank) -> bool:
        """Do the host's next event; False if it is blocked there, or at its end."""
        if rank.at == len(rank.events):
            return False
        event = rank.events[rank.at]
        if event.kind == "wait":
            rank.waits.append(event.number)
            rank.drain()
        elif rank.holds_host(event):
            return False
        elif event.kind not in (READ, COPY, LOAD):
            if not rank.started:
                if event.kind in MESSAGES and not self._connected(kind, event):
                    return False
                queue = rank.queues.setdefault(event.role, deque())
                queue.append((rank.at, len(rank.waits)))
                rank.started = True
            if self.blocking and rank.at not in rank.ended:
                return False
        rank.at += 1
        rank.started = False
        return True

    def _connected(self, kind: int, event: Event) -> bool:
        """Whether both hosts of a message have come to the first one between them."""
        key = self._meeting(kind, event)[:-1]
        there = self.arrived.setdefault(key, set())
        if event.kind not in there:
            there.add(event.kind)
            if len(there) == 2:
                self.changed.extend(key[2:])
        return len(there) == 2

    def _streams(self, kind: int, rank: _Rank) -> None:
        """Run what may run at the head of each of the rank's communicators."""
        for role, queue in rank.queues.items():
            while queue:
                index, needs = queue[0]
                if rank.passed < needs:
                    break
                event = rank.events[index]
                key = self._meeting(kind, event)
                members = key[2:4] if event.kind in MESSAGES else key[2]
                there = self.ready.setdefault(key, set())
                there.add(kind)
                if len(there) < len(members):
                    break
                for member in members:
                    other = self.ranks[member]
                    other.ended.add(other.queues[role].popleft()[0])
                    self.changed.append(member)

    def _meeting(self, kind: int, event: Event) -> tuple:
        """Return a key of the operation, which is the same for all its members."""
        row = self.world.row_of[event.role, self.first[kind]]
        if event.kind not in MESSAGES:
            if (event.role, kind) not in self._members:
                members = tuple(sorted({self.kind_of[rank] for rank in row}))
                self._members[event.role, kind] = members
            return ("collective", event.role, self._members[event.role, kind], event.number)
        peer = self.kind_of[row[event.peer]]
        ends = (kind, peer) if event.kind == "send" else (peer, kind)
        return ("message", event.role, *ends, event.number)

    # -- what stands still ------------------------------------------------------------------

    def _describe(self, stuck: list[int]) -> str:
        """The ranks of a circle of waits, or all that are stuck if there is none."""
        path = [stuck[0]]
        while (after := self._blocked_by(path[-1])) is not None and after not in path:
            path.append(after)
        circle = path[path.index(after) :] if after in path else stuck
        lines = [f"rank {self.ranks[k].rank} {self._where(k)}" for k in circle[:8]]
        return "deadlock: " + "; ".join(lines)

    def _head(self, kind: int) -> Event:
        """The operation that has to end before the rank, which is stuck, can go on."""
        rank = self.ranks[kind]
        event = rank.events[rank.at] if rank.at < len(rank.events) else None
        if event is not None and event.kind in MESSAGES and not rank.started:
            return event
        if event is not None and event.kind not in (READ, COPY, LOAD, "wait"):
            role = event.role
        elif rank.passed < len(rank.waits):
            role = rank.events[rank.waits[rank.passed]].role
        else:
            role = next(role for role, queue in rank.queues.items() if queue)
        return rank.events[rank.queues[role][0][0]]

    def _blocked_by(self, kind: int) -> int | None:
        """A kind of rank that has not come to the operation that this one needs."""
        event = self._head(kind)
        key = self._meeting(kind, event)
        if event.kind in MESSAGES:
            return key[3] if event.kind == "send" else key[2]
        there = self.ready.get(key, set())
        return next((member for member in key[2] if member not in there), None)

    def _where(self, kind: int) -> str:
        rank = self.ranks[kind]
        event = self._head(kind)
        if event is None:
            return "has ended"
        row = self.world.row_of[event.role, rank.rank]
        peer = f" with rank {row[event.peer]}" if event.kind in MESSAGES else ""
        name = f"waits for {event.kind} {event.number} of {event.role}{peer}: {describe(event)}"
        if rank.at < len(rank.events) and rank.events[rank.at] != event:
            host = rank.events[rank.at]
            name += f", its host at {host.line} ({host.place})"
        return name


def kinds(world: World) -> list[int]:
    """A number for every rank; equal for those that do the same among ranks that do the same.

    Refined until each group of one kind of rank has the same kinds of ranks in it.
    """
    numbers: dict[tuple, int] = {}
    kind_of = [numbers.setdefault((id(trace),), len(numbers)) for trace in world.traces]
    with_messages = {role for r in range(len(kind_of)) for role, *_ in world.operations(r).messages}
    while True:
        of_row = {}
        for role, rows in world.rows.items():
            for row in rows:
                members = [kind_of[rank] for rank in row]
                of_row[role, row] = tuple(
                    members if role in with_messages else sorted(set(members))
                )
        numbers = {}
        refined = []
        for rank, kind in enumerate(kind_of):
            about: list = [kind]
            for role in world.rows:
                row = world.row_of.get((role, rank), (rank,))
                about.append(of_row.get((role, row)))
                about.append(row.index(rank) if role in with_messages else 0)
            refined.append(numbers.setdefault(tuple(about), len(numbers)))
        if len(set(refined)) == len(set(kind_of)):
            return refined
        kind_of = refined
