"""benchmarks/peers.py: if this failed, speeds of programs that compute different things would be
compared.
"""

import json
import re
import sys

import pytest
from peer_sides import LOSS_ERROR, NORM_ERROR, Side, SideError, check_equal
from ranks import start

BENCHMARK = [sys.executable, "benchmarks/peers.py"]
# A rank that gives the answer it was started with, whatever it is asked.
ECHO = "import sys\nprint('{}', flush=True)\nfor line in sys.stdin: print(sys.argv[1], flush=True)"


def answer(losses: list, norms: list, seconds: float = 1.0) -> str:
    """Return the line that a rank writes about a block of steps."""
    found = {"seconds": seconds, "results": list(zip(losses, norms)), "peak": 2}
    return json.dumps(found)


@pytest.fixture
def side(tmp_path):
    """Makes sides whose ranks give the same answer, and ends them."""
    sides = []

    def make(words: list[str], ranks: int = 1) -> Side:
        sides.append(Side(f"side {len(sides)}", words, ranks, tmp_path / str(len(sides))))
        return sides[-1]

    yield make
    for each in sides:
        each.end()
    assert [p.pid for each in sides for p in each.ranks if p.poll() is None] == []


def echo(side, losses: list, norms: list) -> Side:
    made = side(["-c", ECHO, answer(losses, norms)])
    made.wait_until_ready()
    return made


@pytest.mark.slow
def test_every_kind_of_side_computes_the_same():
    """DTensor, by hand, pipelining with DTensor inside, DDP with sharded state; on a tiny shape."""
    rows = ("tp2", "tp2-pp2", "dp2-zero1")
    words = ["--rows", *rows, "--rounds", "2", "--shape", "tiny"]
    done = start([*BENCHMARK, *words], timeout=900, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    table = [line.split("|")[1:-1] for line in done.out.splitlines() if line.startswith("| ")][2:]
    assert [(row[0].strip(), row[2].strip()) for row in table] == [
        ("tp2", "DTensor"),
        ("tp2", "by hand: f, g, vocabulary-parallel loss"),
        ("tp2-pp2", "DTensor in pipelining, 1F1B, blocks 2 + 2"),
        ("tp2-pp2", "DTensor in pipelining, 1F1B, blocks 3 + 1"),
        ("dp2-zero1", "DistributedDataParallel, ZeroRedundancyOptimizer"),
    ]
    for row in table:
        ours, theirs = (float(cell.replace(",", "")) for cell in row[3:5])
        ratio, low, high = map(float, re.findall(r"[\d.]+", row[5]))
        assert min(ours, theirs) > 0
        assert 0 < low <= ratio <= high
        for cell in row[6:8]:  # MiB of every rank
            peaks = [int(number) for number in cell.split("+")]
            assert len(peaks) == (4 if "pp2" in row[0] else 2)
            assert min(peaks) > 20


@pytest.mark.slow
def test_transformers_with_experts_compute_the_same():
    pytest.importorskip("transformers")
    words = ["--rows", "experts", "--rounds", "1", "--shape", "tiny experts"]
    done = start([*BENCHMARK, *words], timeout=600, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    assert done.out.count("transformers' Qwen3-MoE") == 2


@pytest.mark.slow
def test_experts_by_hand_and_on_one_rank_compute_the_same():
    words = ["--rows", "experts-ep2", "--rounds", "1", "--shape", "tiny experts"]
    done = start([*BENCHMARK, *words], timeout=600, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    assert done.out.count("| experts by hand: all-to-all") == 1
    assert done.out.count("| Trine one rank |") == 1


@pytest.mark.parametrize("what", ["losses", "norms"])
def test_sides_that_differ_are_an_error(side, what):
    values = {"losses": [9.0, 8.9, 8.8], "norms": [3.0, 2.0, 1.0]}
    error = {"losses": LOSS_ERROR, "norms": NORM_ERROR}[what]
    other = values | {what: [*values[what][:2], values[what][2] * (1 + 2 * error)]}
    sides = [echo(side, **values), echo(side, **other)]
    with pytest.raises(SideError, match=f"{what} of side 0 and of side 1 differ by"):
        check_equal(sides)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_an_error(side, bad):
    for losses, norms in (([9.0, bad], [1.0, 1.0]), ([9.0, 9.0], [bad, 1.0])):
        with pytest.raises(SideError, match=r"side \d: losses \[9"):
            echo(side, losses, norms).run(2)


def test_ranks_that_disagree_on_the_norm_are_an_error(side):
    program = ECHO.replace("sys.argv[1]", "sys.argv[1 + int(__import__('os').environ['RANK'])]")
    made = side(["-c", program, answer([1.0], [1.0]), answer([1.0], [1.1])], ranks=2)
    made.wait_until_ready()
    with pytest.raises(SideError, match="ranks have unequal gradient norms"):
        made.run(1)


def test_a_rank_that_ends_is_named_with_what_it_printed(side):
    program = "import os, sys\nprint('{}', flush=True)\nsys.stdin.readline()\n"
    program += "if os.environ['RANK'] == '1': sys.exit('nothing to read')\nsys.stdin.readline()"
    made = side(["-c", program], ranks=2)
    made.wait_until_ready()
    with pytest.raises(SideError, match=r"side 0: rank 1 ended:\nnothing to read"):
        made.run(1)


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
