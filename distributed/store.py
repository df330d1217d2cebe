"""Exchange of small values between ranks, through torch's key-value store, without collectives.

    exchange = StoreExchange(context.store, context.rank, context.size, "checkpoints")
    everyone = exchange.gather("room", {"disk": 10**12})   # every rank's value, in rank order
    newest = exchange.agree(step, max)                     # rank 0 combines all values
    exchange.tell("trace", spans)                          # leave a value for rank 0;
    spans = exchange.collect("trace")                      # on rank 0: every rank's value

Every wait has a time limit. A wait beyond the limit raises NoAnswer with the silent ranks. The
recorder (watchdog/flight_recorder.py) keeps a rank's waits for the report of a hang; only the
training thread may use it.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

from config.messages import NodeError, UserError
from watchdog.flight_recorder import FlightRecorder

PAUSE = 0.005  # seconds between two looks of rank 0 for a value that is not there yet
# A rank that leaves no value for this time is considered lost. The time is long, because a rank may
# first have to write its part of a checkpoint, which takes minutes on a slow disk.
SECONDS_TO_ANSWER = 3600.0
SECONDS_TO_LEAVE = 10.0  # the longest wait of rank 0 for the other ranks in `leave`


class NoAnswer(TimeoutError):
    """`ranks` sent no value within the time limit."""

    def __init__(self, ranks: list[int], seconds: float):
        """ranks: the silent ranks. seconds: the time limit, for the message."""
        self.ranks = ranks
        noun = "ranks" if len(ranks) > 1 else "rank"
        names = f"{noun} {', '.join(map(str, ranks))}"
        limit = f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"
        super().__init__(f"{names} did not answer within {limit}")


def first_given(values: list) -> tuple[int, Any] | None:
    """Return (rank, value) of the first rank with a value, or None; for `StoreExchange.agree`.

    values: by rank, a value, or None or an empty text.
    """
    return next(((rank, value) for rank, value in enumerate(values) if value), None)


class StoreExchange:
    """JSON values that ranks leave for one another in the store, under keys that share a name.

    store: torch's store, or None for a single process. recorder: records the waits of the calling
    thread; None: they are not recorded. seconds: after this time a silent rank is considered lost.
    Every rank makes its exchanges in the same order, so that two exchanges with the same name do
    not read one another's values. A waiting thread keeps the store's connection busy: a thread that
    must not wait for another one uses the second connection (`context.second_store`).
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        name: str,
        recorder: FlightRecorder | None = None,
        seconds: float = SECONDS_TO_ANSWER,
    ):
        """Choose the beginning of this exchange's keys; does not wait for other ranks.

        name: the purpose of the exchange, such as "places". A later exchange with the same name
        gets other keys.
        """
        import torch.distributed as dist

        # A single process has no store of the job, and uses a store in its own memory.
        self.store = dist.HashStore() if store is None else store
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.recorder = recorder or FlightRecorder()
        # The beginning of all keys: the name, and the number of exchanges that this rank has made
        # with that name, counted in the store. The number is the same on every rank.
        self._name = f"{name}/{self.store.add(f'{name}s/{rank}', 1)}"
        self._agreed = 0  # the number of calls of `agree`, so that each call has keys of its own

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return every rank's value in rank order, on every rank; every rank must call this.

        Rank 0 sends N values to each of N ranks. Where each rank needs only what follows from them,
        `agree` sends that. value: this rank's value, which can be written as JSON. key: names the
        values in the store. Raise NoAnswer, on every rank, with the ranks that were silent.
        """
        return self.agree(value, lambda values: values, key)

    def agree(self, value: Any, combine: Callable[[list], Any], key: str = "agree") -> Any:
        """Return combine(values of all ranks), computed on rank 0, on every rank.

        Every rank must call this; it needs no collective, and so works before process groups are
        started or when a GPU hangs. value: this rank's value, which can be written as JSON.
        combine: takes the list of values in rank order, and returns what can be written as JSON. A
        UserError or NodeError of it is raised on every rank. Raise NoAnswer, on every rank, with
        the ranks that were silent.
        """
        import torch.distributed as dist

        self._agreed += 1
        key = f"{key}/{self._agreed}"
        self.tell(key, value)
        result_key = f"{self._name}/{key}/result"
        # Rank 0 puts the result, the silent ranks or the error into the store, for every rank.
        if self.rank == 0:
            try:
                result = {"value": combine(self.collect(key))}
            except NoAnswer as error:
                result = {"silent": error.ranks}
            except NodeError as error:
                result = {"failed": [str(error), error.nodes, error.kind, error.ranks]}
            except UserError as error:
                result = {"refused": str(error)}
            self.store.set(result_key, json.dumps(result))
        began = time.monotonic()
        with self.recorder.waiting_for("store", (0,)):
            # The store wakes waiting ranks, so that hundreds of ranks need not poll it. Twice the
            # limit leaves rank 0 time to find other ranks silent first.
            try:
                self.store.wait([result_key], timedelta(seconds=2 * self.seconds))
            except dist.DistError as error:  # rank 0, where the store is, has ended or is silent
                raise NoAnswer([0], round(time.monotonic() - began, 1)) from error
        result = json.loads(self.store.get(result_key))
        if "silent" in result:
            raise NoAnswer(result["silent"], self.seconds)
        if "failed" in result:
            raise NodeError(*result["failed"])
        if "refused" in result:
            raise UserError(result["refused"])
        return result["value"]

    def leave(self) -> None:
        """Make rank 0 wait until every rank has read the last result of this exchange.

        Called by every rank before it exits for an error that all ranks have agreed on. The store
        ends with rank 0; if rank 0 exited first, slower ranks would fail with an error of the store
        in place of the error that they have agreed on.
        """
        self.tell("left", None)
        if self.rank == 0:
            self.seconds = SECONDS_TO_LEAVE
            with suppress(NoAnswer):  # a rank that has died already says nothing
                self.collect("left")

    def tell(self, key: str, value: Any) -> None:
        """Leave this rank's value for rank 0, which must collect it before the key's next use."""
        self.store.set(f"{self._name}/{key}/{self.rank}", json.dumps(value))

    def collect(
        self,
        key: str,
        record: Callable[[str, Sequence[int]], None] | None = None,
    ) -> list[Any]:
        """Return the values that all ranks left with `tell`, in rank order; on rank 0, any thread.

        The values are deleted from the store, so that the key can be used again. record: a function
        that is called with ("store", ranks) before each wait. A background thread passes such a
        function, because only the training thread may use the recorder. Raise NoAnswer with the
        ranks that left no value in time.
        """
        limit = time.monotonic() + self.seconds
        keys = [f"{self._name}/{key}/{rank}" for rank in range(self.size)]
        silent = []
        for rank, key_of_rank in enumerate(keys):
            if record:
                record("store", (rank,))
            with nullcontext() if record else self.recorder.waiting_for("store", (rank,)):
                if not self._arrives(key_of_rank, limit):
                    silent.append(rank)
        if silent:
            raise NoAnswer(silent, self.seconds)
        values = [json.loads(self.store.get(key_of_rank)) for key_of_rank in keys]
        for key_of_rank in keys:
            self.store.delete_key(key_of_rank)
        return values

    def _arrives(self, key: str, limit: float) -> bool:
        """Wait until the key is in the store; return False if it is not there at the time `limit`.

        limit: a time of time.monotonic().
        """
        while not self.store.check([key]):
            if time.monotonic() > limit:
                return False
            time.sleep(PAUSE)
        return True
