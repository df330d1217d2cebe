"""Values through torch's store: if this failed, a silent rank would make all others wait."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import ROOT

from base.errors import NodeError, UserError
from distributed import store as job_store
from distributed.store import NoAnswer, StoreExchange

ENOUGH, SHORT = 60.0, 2.0  # seconds until a rank is considered lost


class World:
    """A store and functions to run on some of its ranks at the same time."""

    def __init__(self, size: int):
        self.size = size
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stores = [
            dist.TCPStore("127.0.0.1", self.server.port, is_master=False) for _ in range(size)
        ]

    def exchange(self, rank: int, name: str = "test", seconds: float = ENOUGH) -> StoreExchange:
        return StoreExchange(self.stores[rank], rank, self.size, name, seconds=seconds)

    def run(self, function, ranks=None) -> list:
        """The result of `function(rank)` on each of the ranks, an exception as itself."""
        ranks = range(self.size) if ranks is None else ranks
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(lambda rank: _outcome(function, rank), ranks))


def _outcome(function, rank: int):
    try:
        return function(rank)
    except Exception as error:  # compared by the test
        return error


@pytest.fixture
def world() -> World:
    return World(3)


def test_gather_and_agree_give_every_rank_the_same(world):
    def together(rank: int) -> tuple:
        exchange = world.exchange(rank)
        places = exchange.gather("place", {"rank": rank})
        return places, exchange.agree(10 - rank, max), exchange.agree(rank, lambda v: v[::-1])

    expected = ([{"rank": 0}, {"rank": 1}, {"rank": 2}], 10, [2, 1, 0])
    assert world.run(together) == [expected] * 3


@pytest.mark.parametrize("error", [UserError("no room"), NodeError("broken", ["n1"], "audit", [2])])
def test_an_error_of_the_combination_is_raised_on_every_rank(world, error):
    """Rank 0 alone computes it: without this the others would wait until they take it for lost."""

    def refuse(values: list) -> None:
        raise error

    exchanges = [world.exchange(rank, seconds=SHORT) for rank in range(3)]
    for found in world.run(lambda rank: exchanges[rank].agree(rank, refuse)):
        assert type(found) is type(error)
        assert (str(found), vars(found)) == (str(error), vars(error))
    assert world.run(lambda rank: exchanges[rank].agree(rank, max)) == [2, 2, 2]


def test_rank_0_collects_what_each_rank_left(world):
    """More than once under one key, and from a thread that reports for whom it waits."""
    exchanges, waits = [world.exchange(rank) for rank in range(3)], []
    for times in (1, 2):
        for exchange in exchanges:
            exchange.tell("trace", [exchange.rank] * times)
        values = exchanges[0].collect("trace", lambda what, ranks: waits.append((what, *ranks)))
        assert values == [[0] * times, [1] * times, [2] * times]
    assert waits == [("store", 0), ("store", 1), ("store", 2)] * 2


def test_a_silent_rank_is_named_on_every_rank(world):
    exchanges = [world.exchange(rank, seconds=SHORT) for rank in range(3)]
    outcomes = world.run(lambda rank: exchanges[rank].gather("start", rank), ranks=[0, 2])
    for error in outcomes:
        assert isinstance(error, NoAnswer)
        assert error.ranks == [1]
        assert str(error) == "rank 1 did not answer within 2 s"
    # It comes too late: it learns so at once, and the next question has everyone's answer.
    (late,) = world.run(lambda rank: exchanges[rank].gather("start", rank), ranks=[1])
    assert isinstance(late, NoAnswer)
    assert late.ranks == [1]
    assert world.run(lambda rank: exchanges[rank].gather("next", rank)) == [[0, 1, 2]] * 3


def test_several_silent_ranks_and_rank_0(world):
    exchanges = [world.exchange(rank, seconds=SHORT) for rank in range(3)]
    (error,) = world.run(lambda rank: exchanges[rank].gather("start", rank), ranks=[0])
    assert error.ranks == [1, 2]
    assert str(NoAnswer([1, 2], 3600.0)) == "ranks 1, 2 did not answer within 60 minutes"
    other = [world.exchange(rank, "other", SHORT) for rank in range(3)]
    for error in world.run(lambda rank: other[rank].gather("start", rank), ranks=[1, 2]):
        assert isinstance(error, NoAnswer)
        assert error.ranks == [0]


def test_a_store_that_is_gone_means_rank_0(world):
    """It ends the wait at once: the limit here is two minutes."""
    exchanges = [world.exchange(rank) for rank in range(3)]
    waiting = threading.Thread(target=lambda: world.run(ask, ranks=[1, 2]))
    outcomes = []

    def ask(rank: int) -> None:
        outcomes.append(_outcome(lambda r: exchanges[r].gather("start", r), rank))

    waiting.start()
    while not all(world.server.check([f"test/1/start/1/{rank}"]) for rank in (1, 2)):
        time.sleep(0.01)
    del world.server
    waiting.join(30.0)
    assert [error.ranks for error in outcomes] == [[0], [0]]


def test_two_exchanges_of_one_name_do_not_mix(world):
    """The second asks before all have answered the first."""
    first = [world.exchange(rank) for rank in range(3)]
    second = [world.exchange(rank) for rank in range(3)]
    for rank in range(3):
        first[rank].tell("value", ["first", rank])
        second[rank].tell("value", ["second", rank])
    assert second[0].collect("value") == [["second", rank] for rank in range(3)]
    assert first[0].collect("value") == [["first", rank] for rank in range(3)]


def test_a_world_of_one_needs_no_store():
    exchange = StoreExchange(None, 0, 1, "test")
    assert exchange.gather("place", {"rank": 0}) == [{"rank": 0}]
    assert exchange.agree((1, 2), lambda values: values) == [[1, 2]]  # JSON has lists, no tuples
    exchange.tell("trace", 5)
    assert exchange.collect("trace") == [5]


# Rank 0 of a hundred, in a process that may open 64 files; its store's address, then it waits.
RANK_0 = """
import resource, sys
from distributed import store as job_store
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
job_store.allow_open_files(100)
server = job_store.Server("127.0.0.1", 100)
print(server.address.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_store_takes_all_ranks_where_few_open_files_are_the_default():
    """Every rank has two connections to it, and login shells often begin with 1,024."""
    job = subprocess.Popen(
        [sys.executable, "-c", RANK_0],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with job:
        port = int(job.stdout.readline())
        wait = {"wait_for_workers": False, "timeout": timedelta(seconds=60)}
        stores = [dist.TCPStore("127.0.0.1", port, **wait) for _ in range(200)]
        assert [store.add("met", 1) for store in stores] == list(range(1, 201))
        job.stdin.close()


def test_too_few_open_files_for_the_store_are_one_sentence(monkeypatch):
    monkeypatch.setattr(job_store.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(job_store.resource, "setrlimit", lambda kind, limits: None)
    sentence = "the store of 4,000 ranks needs 8,256 open files on .*, and the limit there is 4,096"
    with pytest.raises(UserError, match=sentence):
        job_store.allow_open_files(4000)
    job_store.allow_open_files(1900)
