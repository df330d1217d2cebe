"""Compares the recorded operations of all ranks of a world, and finds deadlocks among them.

    world = RunTraces(rows, traces)
    sentences = mismatches(world)    # empty if all members of each group do the same, in one order
    sentence = deadlock(world)       # None if every rank reaches the end of its trace

A trace has the events of a rank's host in order (recording.py): collectives, messages, waits for
them, and stops of the host. A group is given by its role, such as "dp", and by its row, the tuple
of its ranks. `deadlock` simulates the traces by the rules of NCCL and CUDA, without durations:

    operation   queues on the stream of its group's communicator; it begins after all waits that the
                compute stream was given before it, and ends on all members together
    wait        the compute stream waits for the operation, the host goes on
    host read   the host waits for the compute stream
    load        of a kernel, at its first launch: the host waits for all streams of the device (CUDA
                C++ Programming Guide, Lazy Loading; meta-pytorch/torchcomms pull request 2334)
    connection  the first message from one rank to another in a group blocks both hosts until both
                are there: NCCL connects pairs lazily (NVIDIA/nccl issue 783)
    blocking  without stages the host waits for every operation where it starts

Ranks have the same class (a number) if they do the same with the same classes of neighbours. One
rank of each class is simulated, for all its ranks.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tools.emulator.recording import COPY, LOAD, MESSAGES, READ, Event

MOST_SENTENCES = 20
MOST_NAMED = 8  # a sentence names at most this many ranks
ONE_SIDED = ("broadcast", "reduce")
NOT_COLLECTIVE = ("wait", READ, COPY, LOAD, *MESSAGES)


class Operations:
    """The operations of one rank's trace, by the role of their group.

    collectives: by role, in the rank's order. messages: by (role, "send" or "receive", position of
    the peer in the group): each message with the place (step, action and micro-batch) that sends
    it, or that waits for the received tensor; None: the receiver does not wait.
    """

    def __init__(self, events: Sequence[Event]):
        """Sort a trace's operations by group; a receive has the place of the wait for it."""
        self.collectives: dict[str, list[Event]] = {}
        self.messages: dict[tuple[str, str, int], list[tuple[Event, str | None]]] = {}
        # The number of a wait is the index of the operation that it waits for.
        place_of_wait = {event.number: event.place for event in events if event.kind == "wait"}
        for index, event in enumerate(events):
            if event.kind in MESSAGES:
                key = event.role, event.kind, event.peer
                place = event.place if event.kind == "send" else place_of_wait.get(index)
                self.messages.setdefault(key, []).append((event, place))
            elif event.kind not in NOT_COLLECTIVE:
                self.collectives.setdefault(event.role, []).append(event)


@dataclass
class RunTraces:
    """The traces of all ranks of a run; ranks that do the same share one list of events.

    rows: the ranks of every group, by role. ran: the ranks that were run; None: all ranks.
    """

    rows: dict[str, list[tuple[int, ...]]]
    traces: list[list[Event]]
    ran: frozenset[int] | None = None
    _operations: dict[int, Operations] = field(default_factory=dict)  # by id() of the trace

    def operations(self, rank: int) -> Operations:
        """Return the operations of a rank by group; ranks with the same trace share them."""
        key = id(self.traces[rank])
        if key not in self._operations:
            self._operations[key] = Operations(self.traces[rank])
        return self._operations[key]

    @cached_property
    def row_of(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """The ranks of the group that a rank is in, by (role of the group, rank)."""
        row_of = {}
        for role, rows in self.rows.items():
            for row in rows:
                for rank in row:
                    row_of[role, rank] = row
        return row_of


def mismatches(world: RunTraces) -> list[str]:
    """Return a sentence for each group whose members do not do the same operations in one order.

    A sentence names two ranks, the operation, what each rank does, and the source lines. At most
    MOST_SENTENCES are returned.
    """
    sentences: list[str] = []
    compared = set()
    for role, rows in world.rows.items():
        for row in rows:
            # One of all groups with the same traces is compared, since they have the same
            # mismatches; those of `_unequal_blocks` depend also on which ranks were run.
            key: tuple = (role, *(id(world.traces[rank]) for rank in row))
            key += tuple(rank for rank in row if world.ran and rank in world.ran)
            if len(row) == 1 or key in compared:
                continue
            compared.add(key)
            sentences += _collectives(world, role, row)
            sentences += _messages(world, role, row)
            sentences += _unequal_blocks(world, role, row)
            if len(sentences) >= MOST_SENTENCES:
                return sentences[:MOST_SENTENCES]
    return sentences


def _collectives(world: RunTraces, role: str, row: tuple[int, ...]) -> Iterator[str]:
    """Compare the collectives of a group's first member with each other member's collectives.

    Yield a sentence for the first difference of each pair.
    """
    first, *others = row
    compared = {id(world.traces[first])}
    firsts_events = world.operations(first).collectives.get(role, [])
    for other in others:
        if id(world.traces[other]) in compared:
            continue  # this rank shares its trace with a rank that was compared
        compared.add(id(world.traces[other]))
        others_events = world.operations(other).collectives.get(role, [])
        pairs = itertools.zip_longest(firsts_events, others_events)
        for number, (event, others_event) in enumerate(pairs, start=1):
            if event is None or others_event is None or _common(event) != _common(others_event):
                name = f"operation {number} of {_group(role, row)}"
                yield _differ(name, first, event, other, others_event)
                break


def _common(event: Event) -> Event:
    """Return the event with only the values that must be equal on all members of its group.

    `rows`, the rows that an all-to-all sends and receives, differs between members, and
    `_unequal_blocks` compares it. The root of a broadcast or reduce may call it at another line.
    """
    event = event._replace(rows=())
    if event.kind in ONE_SIDED:
        return event._replace(line="", place="")
    return event


def _messages(world: RunTraces, role: str, row: tuple[int, ...]) -> Iterator[str]:
    """Compare the messages that a member of a group sends with those that the receiver expects.

    Yield a sentence for the first difference of each pair of sender and receiver: one side lacks a
    message, size or type differ, or the receiver waits for it in another action or micro-batch.
    """
    missing = (None, None)
    for source, sender in enumerate(row):
        for to, receiver in enumerate(row):
            # `source` and `to` are the positions of sender and receiver in the group.
            sent = world.operations(sender).messages.get((role, "send", to), [])
            received = world.operations(receiver).messages.get((role, "receive", source), [])
            pairs = itertools.zip_longest(sent, received, fillvalue=missing)
            for number, ((send, sent_at), (receive, waited_at)) in enumerate(pairs, start=1):
                name = f"message {number} of {role} from rank {sender} to rank {receiver}"
                if send is None or receive is None:
                    yield _differ(name, sender, send, receiver, receive)
                    break
                if (send.bytes, send.dtype) != (receive.bytes, receive.dtype):
                    yield _differ(name, sender, send, receiver, receive)
                    break
                if waited_at is not None and waited_at != sent_at:
                    lines = f"{send.line} and {receive.line}"
                    yield f"{name}: sent by {sent_at}, received for {waited_at}, at {lines}"
                    break


def _unequal_blocks(world: RunTraces, role: str, row: tuple[int, ...]) -> Iterator[str]:
    """Compare the rows that a member sends in an all-to-all with the rows that the other expects.

    Yield a sentence for the first difference of each pair. The numbers of rows depend on a member's
    position in the group, so only ranks that were run are compared.
    """
    unequal: dict[int, list[Event]] = {}  # by a member's position: all-to-alls with `rows`
    for position, rank in enumerate(row):
        if world.ran is None or rank in world.ran:
            events = world.operations(rank).collectives.get(role, [])
            with_rows = [event for event in events if event.rows]
            if with_rows:
                unequal[position] = with_rows
    for sender, receiver in itertools.permutations(unequal, 2):
        for event, receivers_event in zip(unequal[sender], unequal[receiver]):
            _, rows_sent = event.rows  # numbers of rows: (from each member, to each member)
            rows_expected, _ = receivers_event.rows
            sent = rows_sent[receiver]
            expected = rows_expected[sender]
            if sent != expected:
                sides = f"{row[sender]} sends {sent} rows, {row[receiver]} expects {expected}"
                yield f"operation {event.number} of {_group(role, row)}: {sides}, at {event.line}"
                break


def _group(role: str, row: tuple[int, ...]) -> str:
    """Return the words for a group in a sentence: its role and its first ranks."""
    ranks = ", ".join(map(str, row[:MOST_NAMED]))
    if len(row) > MOST_NAMED:
        ranks += ", ..."
    return f"{role} (ranks {ranks})"


def _differ(
    name: str, rank: int, event: Event | None, other: int, others_event: Event | None
) -> str:
    """Return a sentence that says what each of two ranks does at the same place of their group.

    name: the place, as in "operation 3 of dp (ranks 0, 4)". event, others_event: the operation that
    each rank does there, or None if its trace has ended before.
    """
    return f"{name}: rank {rank} {_version(event)}; rank {other} {_version(others_event)}"


def _version(event: Event | None) -> str:
    """Return "has none", or for example "does all_reduce SUM of 512 bytes ...", for `_differ`."""
    if event is None:
        return "has none"
    return f"does {describe(event)}"


def describe(event: Event) -> str:
    """Return e.g. "all_reduce SUM of 512 bytes float32 at model.py:246 (step 1, F 0)"."""
    name = f"{event.kind} {event.op}".strip()
    size = f"{event.bytes:,} bytes {event.dtype}"
    return f"{name} of {size} at {event.line} ({event.place})"


@dataclass
class _Rank:
    """The state of a simulated rank; operations are given by their index in `events`.

    queues: by role, the operations that the host has started: (index, number of waits before it).
    """

    rank: int
    events: list[Event]
    at: int = 0  # the index of the host's next event
    waits: list[int] = field(default_factory=list)  # operations that the compute stream waits for
    passed: int = 0  # how many of the `waits` the compute stream has passed
    queues: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # operations that have ended
    started: bool = False  # whether the operation at index `at`, which blocks the host, is queued

    def holds_host(self, event: Event) -> bool:
        """Return whether the host's next event is a read or a load, and cannot be done yet.

        A read waits until the compute stream has passed all its waits, a load also until all queues
        are empty.
        """
        computes = self.passed < len(self.waits)  # the compute stream has not passed all waits
        if event.kind == LOAD:
            return computes or any(self.queues.values())
        return event.kind == READ and computes

    def drain(self) -> None:
        """Let the compute stream pass its next waits, up to an operation that has not ended."""
        while self.passed < len(self.waits) and self.waits[self.passed] in self.ended:
            self.passed += 1


def deadlock(world: RunTraces, blocking: bool = False) -> str | None:
    """Return a sentence on the ranks that wait for one another, and where; None: no deadlock.

    blocking: as with blocking. The world must have no mismatches.
    """
    return _Simulation(world, blocking).run()


class _Simulation:
    """Runs one rank of each class until all are at their end, or none can continue."""

    def __init__(self, world: RunTraces, blocking: bool):
        """Prepare the lowest rank of each class, at the beginning of its trace."""
        self.world = world
        self.blocking = blocking
        self.class_of = rank_classes(world)
        # The lowest rank of each class: the dictionary keeps the last of descending ranks.
        descending = reversed(list(enumerate(self.class_of)))
        self.first = {rank_class: rank for rank, rank_class in descending}
        self.ranks = {k: _Rank(r, world.traces[r]) for k, r in self.first.items()}
        self.arrived: dict[tuple, set] = {}  # by (role, (sender, receiver)): which host has come
        self.ready: dict[tuple, set] = {}  # by an operation's key: the classes that have come to it
        self.changed: deque[int] = deque()  # classes that may be able to continue
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}  # by (role, class)

    def run(self) -> str | None:
        """Simulate until no rank can continue; return a sentence on a deadlock, or None."""
        self.changed.extend(self.ranks)
        while self.changed:
            rank_class = self.changed.popleft()
            rank = self.ranks[rank_class]
            rank.drain()  # the compute stream passes waits for operations that have ended
            while self._host(rank_class, rank):  # until the host is blocked
                pass
            self._streams(rank_class, rank)  # operations end that all their members have reached
        stuck = [k for k, r in self.ranks.items() if r.at < len(r.events) or any(r.queues.values())]
        return self._describe(stuck) if stuck else None

    def _host(self, rank_class: int, rank: _Rank) -> bool:
        """Do the host's next event; return False if the host is blocked, or at its trace's end."""
        if rank.at == len(rank.events):
            return False
        event = rank.events[rank.at]
        if event.kind == "wait":
            rank.waits.append(event.number)  # the compute stream will wait; the host goes on
            rank.drain()
        elif rank.holds_host(event):
            return False
        elif event.kind not in (READ, COPY, LOAD):  # so it is a collective or a message
            if not rank.started:  # otherwise an earlier call has put it into the queue
                if event.kind in MESSAGES and not self._connected(rank_class, event):
                    return False  # the host waits for the other end of the message
                queue = rank.queues.setdefault(event.role, deque())
                queue.append((rank.at, len(rank.waits)))  # the operation begins after these waits
                rank.started = True
            if self.blocking and rank.at not in rank.ended:
                return False  # blocking: the host waits for the end of the operation
        rank.at += 1
        rank.started = False
        return True

    def _connected(self, rank_class: int, event: Event) -> bool:
        """Note that a host has come to a message; return whether the other host has come too."""
        ends, _ = self._meeting(rank_class, event)  # the classes (of the sender, of the receiver)
        arrived = self.arrived.setdefault((event.role, ends), set())
        if event.kind not in arrived:
            arrived.add(event.kind)
            if len(arrived) == 2:
                self.changed.extend(ends)  # the hosts of sender and receiver can go on
        return len(arrived) == 2

    def _streams(self, rank_class: int, rank: _Rank) -> None:
        """Run the first operations of each of the rank's communicators, as far as they can run."""
        for role, queue in rank.queues.items():
            while queue:
                index, waits_before = queue[0]  # the oldest operation that has not ended
                if rank.passed < waits_before:
                    break  # the compute stream has not come to the operation yet
                members, key = self._meeting(rank_class, rank.events[index])
                ready = self.ready.setdefault(key, set())
                ready.add(rank_class)
                if len(ready) < len(members):
                    break  # another member has not come to the operation yet
                for member in members:
                    other = self.ranks[member]
                    ended_index, _ = other.queues[role].popleft()
                    other.ended.add(ended_index)  # it ends on all members together
                    self.changed.append(member)

    def _meeting(self, rank_class: int, event: Event) -> tuple[tuple[int, ...], tuple]:
        """Return the classes of the ranks that do an operation, and the operation's key in `ready`.

        The classes ascend; for a message they are (sender, receiver).
        """
        row = self.world.row_of[event.role, self.first[rank_class]]
        if event.kind in MESSAGES:
            peer = self.class_of[row[event.peer]]
            ends = (rank_class, peer) if event.kind == "send" else (peer, rank_class)
            return ends, ("message", event.role, ends, event.number)
        if (event.role, rank_class) not in self._members:
            members = tuple(sorted({self.class_of[rank] for rank in row}))
            self._members[event.role, rank_class] = members
        members = self._members[event.role, rank_class]
        return members, ("collective", event.role, members, event.number)

    def _describe(self, stuck: list[int]) -> str:
        """Return a sentence on ranks that wait in a circle; if none do, on all stuck classes."""
        path = [stuck[0]]  # each is blocked by the next; one that comes again ends a circle
        while (blocking := self._blocked_by(path[-1])) is not None and blocking not in path:
            path.append(blocking)
        circle = path[path.index(blocking) :] if blocking in path else stuck
        lines = [f"rank {self.ranks[k].rank} {self._where(k)}" for k in circle[:MOST_NAMED]]
        return "deadlock: " + "; ".join(lines)

    def _head(self, rank_class: int) -> Event:
        """Return the operation that has to end before the stuck rank of a class can continue."""
        rank = self.ranks[rank_class]
        event = rank.events[rank.at] if rank.at < len(rank.events) else None
        if event is not None and event.kind in MESSAGES and not rank.started:
            return event  # the message's two hosts are not connected
        if event is not None and event.kind not in (READ, COPY, LOAD, "wait"):
            role = event.role  # with blocking the host waits for its operation
        elif rank.passed < len(rank.waits):
            awaited = rank.waits[rank.passed]  # the compute stream waits, and the host for it
            role = rank.events[awaited].role
        else:  # the host waits to load a kernel, or has ended its trace with operations in queues
            role = next(role for role, queue in rank.queues.items() if queue)
        index, _ = rank.queues[role][0]  # the first operation in the queue holds up the others
        return rank.events[index]

    def _blocked_by(self, rank_class: int) -> int | None:
        """Return the class of a rank that has not reached the operation for which a class waits."""
        event = self._head(rank_class)
        members, key = self._meeting(rank_class, event)
        if event.kind in MESSAGES:
            sender, receiver = members
            return receiver if event.kind == "send" else sender  # the message's other end
        ready = self.ready.get(key, set())
        return next((member for member in members if member not in ready), None)

    def _where(self, rank_class: int) -> str:
        """Return what a rank waits for, and where: the words after "rank 3" in the sentence."""
        rank = self.ranks[rank_class]
        event = self._head(rank_class)
        row = self.world.row_of[event.role, rank.rank]
        peer = f" with rank {row[event.peer]}" if event.kind in MESSAGES else ""
        name = f"waits for {event.kind} {event.number} of {event.role}{peer}: {describe(event)}"
        if rank.at < len(rank.events) and rank.events[rank.at] != event:
            host = rank.events[rank.at]  # the event at which the host is blocked
            name += f", its host at {host.line} ({host.place})"
        return name


def rank_classes(world: RunTraces) -> list[int]:
    """Return the class of every rank, a number.

    At first, ranks with the same trace have the same class. Classes are split until all ranks of a
    class have groups with the same classes of members, and with messages the same position in them.
    """
    numbers: dict[tuple, int] = {}  # each new key gets the next number, which is a class
    class_of = [numbers.setdefault((id(trace),), len(numbers)) for trace in world.traces]
    roles_with_messages = set[str]()
    for rank in range(len(class_of)):
        roles_with_messages |= {role for role, _, _ in world.operations(rank).messages}
    while True:
        classes_of_group = {}  # by group, the classes of its members
        for role, rows in world.rows.items():
            for row in rows:
                members = [class_of[rank] for rank in row]
                if role not in roles_with_messages:
                    members = sorted(set(members))  # collectives do not depend on positions
                classes_of_group[role, row] = tuple(members)
        numbers = {}
        refined = []  # the new classes, by rank
        for rank, rank_class in enumerate(class_of):
            # The rank's class, and by role the classes of its group and its position in it.
            neighbours: list = [rank_class]
            for role in world.rows:
                row = world.row_of.get((role, rank), (rank,))
                position = row.index(rank) if role in roles_with_messages else 0
                neighbours += [classes_of_group.get((role, row)), position]
            refined.append(numbers.setdefault(tuple(neighbours), len(numbers)))
        if len(set(refined)) == len(set(class_of)):
            return refined  # the classes are final, since this round of the loop has split none
        class_of = refined
