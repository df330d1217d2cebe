"""Small values between ranks, through torch's key-value store and no collective.

    exchange = StoreExchange(context, "checkpoints")
    everyone = exchange.gather("room", {"disk": 10**12})   # of every rank, in rank order
    newest = exchange.agree(step, max)                     # what rank 0 makes of all values
    exchange.tell("trace", spans)                          # leave a value for rank 0,
    spans = exchange.collect("trace")                      # which takes all of them

A rank that is lost holds up the others for a limited time only, and is then named (`NoAnswer`).
"""

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from watchdog.flight_recorder import FlightRecorder

# Seconds between two looks for a value that is not there yet.
PAUSE = 0.005
# A rank that has told nothing by then is taken for lost; a save on a slow disk takes minutes.
SECONDS_TO_ANSWER = 3600.0


class NoAnswer(TimeoutError):
    """Ranks that told nothing in time; `ranks` has their numbers."""

    def __init__(self, ranks: list[int], seconds: float):
        self.ranks = ranks
        name = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
        super().__init__(f"{name} told nothing in {seconds / 60:g} minutes")


class _LocalStore(dict):
    """The store of a world of one."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return self[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> None:
        del self[key]


class StoreExchange:
    """JSON values that ranks leave for one another under keys of one name.

    Every rank makes its exchanges in the same order: two of one name do not read one another's
    values. recorder: where the waits of the calling thread are recorded; None: nowhere.
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
        """`store`: torch's, None in a world of one. `seconds`: until a rank is taken for lost."""
        self.store = _LocalStore() if store is None else store
        self.rank, self.size, self.seconds = rank, size, seconds
        self.recorder = recorder or FlightRecorder()
        self._name = f"{name}/{self.store.add(f'{name}s/{rank}', 1)}"
        self._agreed = 0

    def gather(self, key: str, value: Any) -> list[Any]:
        """Every rank's value in rank order, on every rank; every rank must call.

        Raises NoAnswer, on every rank, that names the silent ones.
        """
        return self.agree(value, lambda values: values, key)

    def agree(self, value: Any, combine: Callable[[list], Any], key: str = "agree") -> Any:
        """`combine` of every rank's value, made on rank 0; every rank must call."""
        self._agreed += 1
        key = f"{key}/{self._agreed}"
        answer = f"{self._name}/{key}/answer"
        self.tell(key, value)
        if self.rank == 0:
            try:
                told = {"value": combine(self.collect(key))}
            except NoAnswer as missing:
                told = {"missing": missing.ranks}
            self.store.set(answer, json.dumps(told))
        with self.recorder.waiting_for("store", (0,)):
            self._wait_for_rank_0(answer)
        told = json.loads(self.store.get(answer))
        if "missing" in told:
            raise NoAnswer(told["missing"], self.seconds)
        return told["value"]

    def _wait_for_rank_0(self, key: str) -> None:
        """Return when the key is there; NoAnswer if rank 0, which may itself wait, takes too long.

        torch's store wakes its clients by itself: hundreds of ranks do not ask it over and over.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        try:
            self.store.wait([key], timedelta(seconds=2 * self.seconds))
        except dist.DistError as error:
            raise NoAnswer([0], 2 * self.seconds) from error

    def tell(self, key: str, value: Any) -> None:
        """Leave this rank's value for rank 0."""
        self.store.set(f"{self._name}/{key}/{self.rank}", json.dumps(value))

    def collect(
        self, key: str, record: Callable[[str, Sequence[int]], None] | None = None
    ) -> list[Any]:
        """Every rank's value in rank order; on rank 0, from any thread.

        `record`: where a thread other than the main one notes for whom it waits. Raises NoAnswer.
        """
        limit = time.monotonic() + self.seconds
        keys = [f"{self._name}/{key}/{rank}" for rank in range(self.size)]
        missing = []
        for rank, own in enumerate(keys):
            if record:
                record("store", (rank,))
                told = self._appears(own, limit)
            else:
                with self.recorder.waiting_for("store", (rank,)):
                    told = self._appears(own, limit)
            missing += [] if told else [rank]
        if missing:
            raise NoAnswer(missing, self.seconds)
        values = [json.loads(self.store.get(own)) for own in keys]
        for own in keys:
            self.store.delete_key(own)
        return values

    def _appears(self, key: str, limit: float) -> bool:
        while not self.store.check([key]):
            if time.monotonic() > limit:
                return False
            time.sleep(PAUSE)
        return True
