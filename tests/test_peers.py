"""peers.py of benchmarks: if this failed, speeds of programs that compute different things would be
compared.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterator

import pytest
from ranks import start

from benchmarks.peers.peer_sides import LOSS_ERROR, NORM_ERROR, Side, SideError, check_equal

BENCHMARK = [sys.executable, "benchmarks/peers/peers.py"]
END = "nothing to read"
# A rank that gives the answer it was started with, whatever it is asked, or ends.
ECHO = f"""
import os, sys
word = sys.argv[1 + int(os.environ["RANK"])]
print("{{}}", flush=True)
for line in sys.stdin:
    sys.exit(word) if word == "{END}" else print(word, flush=True)
"""


def answer(losses: list, norms: list, seconds: float = 1.0) -> str:
    """Return the line that a rank writes about a block of steps."""
    found = {"seconds": seconds, "results": list(zip(losses, norms)), "peak": 2}
    found |= {"busy": seconds, "kernels": {}}
    return json.dumps(found)


@contextlib.contextmanager
def sides_that_answer(tmp_path, *answers: list[str]) -> Iterator[list[Side]]:
    """Sides of as many ranks as each has answers, which they give whatever they are asked."""
    made = []
    try:
        for number, words in enumerate(answers):
            command = ["-c", ECHO, *words]
            made.append(Side(f"side {number}", command, len(words), tmp_path / str(number)))
            made[-1].wait_until_ready()
        yield made
    finally:
        for side in made:
            side.end()
        assert [p.pid for side in made for p in side.ranks if p.poll() is None] == []


@pytest.mark.slow
def test_sides_of_two_ranks_compute_the_same():
    """DTensor, by hand, DDP with sharded state; on a tiny shape."""
    words = ["--rows", "tp2", "dp2-zero1", "--rounds", "1", "--shape", "tiny"]
    done = start([*BENCHMARK, *words], timeout=900, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    table = [line.split("|")[1:-1] for line in done.out.splitlines() if line.startswith("| ")][2:]
    assert [(row[0].strip(), row[2].strip()) for row in table] == [
        ("tp2", "DTensor"),
        ("tp2", "by hand: f, g, vocabulary-parallel loss"),
        ("dp2-zero1", "DistributedDataParallel, ZeroRedundancyOptimizer"),
    ]
    for row in table:
        ours, theirs = (float(cell.replace(",", "")) for cell in row[3:5])
        ratio, low, high = map(float, re.findall(r"[\d.]+", row[5]))
        assert min(ours, theirs) > 0
        assert 0 < low <= ratio <= high
        for cell in row[6:8]:  # MiB of every rank
            peaks = [int(number) for number in cell.split("+")]
            assert len(peaks) == 2
            assert min(peaks) > 20


@pytest.mark.slow
def test_experts_by_hand_and_on_one_rank_compute_the_same():
    words = ["--rows", "experts-ep2", "--rounds", "1", "--shape", "tiny experts"]
    done = start([*BENCHMARK, *words], timeout=600, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    assert done.out.count("| experts by hand: all-to-all") == 1
    assert done.out.count("| Trine one rank |") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("row", "peers"), [("experts", 2), ("hybrid", 1)])
def test_models_of_transformers_compute_the_same(row: str, peers: int):
    words = ["--rows", row, "--rounds", "1", "--shape", f"tiny {row}"]
    done = start([*BENCHMARK, *words], timeout=600, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    assert done.out.count("| transformers") == peers


@pytest.mark.parametrize("what", ["losses", "norms"])
def test_sides_that_differ_are_an_error(tmp_path, what):
    values = {"losses": [9.0, 8.9, 8.8], "norms": [3.0, 2.0, 1.0]}
    error = {"losses": LOSS_ERROR, "norms": NORM_ERROR}[what]
    other = values | {what: [*values[what][:2], values[what][2] * (1 + 2 * error)]}
    with (
        sides_that_answer(tmp_path, [answer(**values)], [answer(**other)]) as sides,
        pytest.raises(SideError, match=f"{what} of side 0 and of side 1 differ by"),
    ):
        check_equal(sides)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ([answer([9.0, NAN], [1.0, 1.0])], r"side 0: losses \[9"),
        ([answer([9.0, 9.0], [INFINITE, 1.0])], r"side 0: losses \[9"),
        ([answer([1.0], [1.0]), answer([1.0], [1.1])], "ranks have unequal gradient norms"),
        (["{}", END], f"side 0: rank 1 ended:\n{END}"),
    ],
)
def test_what_is_not_finite_or_not_equal_or_ends_is_an_error(tmp_path, answers, sentence):
    with (
        sides_that_answer(tmp_path, answers) as (side,),
        pytest.raises(SideError, match=sentence),
    ):
        side.run(1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rows", "tp3"], "--rows: invalid choice: 'tp3' (choose from "),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
    ],
)
def test_mistakes(words, sentence):
    done = start([*BENCHMARK, *words])
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert "Traceback" not in done.err
