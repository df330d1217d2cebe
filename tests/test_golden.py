"""The layout does not change the result: if this failed, a layout would train another model.

Any layout against the single-rank run. Loss and gradient norm of every step agree to 1e-5 relative
in fp32 and to 1e-10 in fp64, where no rounding hides an error; replicas are equal to the bit at the
end. Cases of one feature are lines of tests/data/golden/FEATURE.txt, which the test of the feature
runs; `layouts` are the lines of this file.
"""

import json
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import golden_worker
import pytest
import torch
from compare import assert_close, assert_within, relative_difference
from ranks import ROOT, results_of

from config import schema, validation

POSITIONS = {
    "learned": {"positions": "learned"},
    "alibi": {"positions": "alibi", "embedding_norm": True},
    # Grouped queries: 4 key/value heads; gated MLP, no biases.
    "rotary": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "kv_heads": 4,
    },
}
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
TOLERANCES = ("tolerance", "weight_tolerance")  # what a line of a feature may say beside options
NODES = "nodes"  # likewise: the node of each rank, such as aabb
SUMS = {"weights", "averages"}  # what a result has of each tensor
AT_A_TIME = 2  # starts of ranks


@cache
def single_rank(key: str) -> dict:
    """The run on one rank that a case must equal; micro-batch 1, everything else plain."""
    return golden_worker.run(validation.check(golden_worker.options(json.loads(key)), 1))


def without_layout(case: dict) -> dict:
    """The options of a case that its run on one rank has too; that run compiles nothing."""
    layout = {*schema.Layout.__dataclass_fields__, *TOLERANCES, NODES, "compile"}
    return {k: v for k, v in case.items() if k not in layout or k == "pad_vocab_multiple"}


def reference(case: dict) -> dict:
    return single_rank(json.dumps(without_layout(case)))


def effect_of_rounding(case: dict) -> float:
    """How far the run on one rank moves if each initial weight moves by one unit in its last place.

    The larger of two runs with random directions. A layout rounds otherwise, as another processor
    does, and so cannot be expected to be nearer to the run on one rank than this.
    """
    return max(moved_by_rounding(without_layout(case), seed) for seed in range(2))


def moved_by_rounding(case: dict, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)

    def move_weights(state, samples):
        for shard in state.optimizer.owned():
            weights = shard.read("weights", shard.start, shard.stop)
            up = torch.randint(0, 2, weights.shape, generator=generator).bool()
            towards = torch.where(up, math.inf, -math.inf).to(weights.dtype)
            moved = torch.nextafter(weights, towards)
            weights.copy_(torch.where(weights == 0, weights, moved))
        state.optimizer.after_load()

    config = validation.check(golden_worker.options(case), 1)
    result = golden_worker.run(config, prepare=move_weights)
    return distance(result, single_rank(json.dumps(case)))


def distance(result: dict, expected: dict) -> float:
    """Largest relative difference of losses, gradient norms, weights and averages of two runs."""
    names = sorted(expected["weights"])
    assert sorted(result["weights"]) == names
    return max(
        relative_difference(result["losses"], expected["losses"]),
        relative_difference(result["norms"], expected["norms"]),
        *(weight_difference(result[kind], expected[kind]) for kind in SUMS & expected.keys()),
    )


def weight_difference(weights: dict[str, float], others: dict[str, float]) -> float:
    """Largest difference of a tensor's sum, over the largest sum: signs cancel within each."""
    names = sorted(others)
    scale = max(map(abs, others.values()))
    return relative_difference([weights[n] for n in names], [others[n] for n in names], scale)


def run_cases(ranks: int, every: list[dict], folder: Path) -> list[dict]:
    """The result of each case, from one start of that many ranks."""
    timeout = AT_A_TIME * (90 + 30 * len(every))
    jobs = [{k: v for k, v in case.items() if k not in TOLERANCES} for case in every]
    results = results_of("tests/golden_worker.py", ranks, jobs, folder, timeout)
    assert len(results) == len(every) > 0
    return results


@contextmanager
def run_worlds(worlds: dict[int, list[dict]], folder: Path) -> Iterator[dict[int, Future]]:
    """The results of each world's cases, as they come: AT_A_TIME starts, the largest first.

    Ranks mostly wait for messages, so that two starts take little more time than one.
    """
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        starts = {n: pool.submit(run_cases, n, worlds[n], folder) for n in sorted(worlds)[::-1]}
        yield starts
        for start in starts.values():
            start.cancel()


def lines_of(feature: str, folder: Path = Path()) -> dict[int, list[dict]]:
    """Return the cases of tests/data/golden/FEATURE.txt, by number of ranks.

    A line is a number of ranks and options; the line `all` has options of every case. `shape` is a
    name in POSITIONS, {folder} a path; `tolerance` and `weight_tolerance` are limits of
    `assert_equal_runs`; `nodes` has a letter for the node of each rank (golden_worker.run_case).
    """
    text = (ROOT / "tests" / "data" / "golden" / f"{feature}.txt").read_text()
    shared: dict = {}
    worlds: dict[int, list[dict]] = {}
    for line in text.replace("{folder}", str(folder)).splitlines():
        ranks, *words = line.split()
        if ranks == "#":
            continue
        options = dict(map(option_of, words))
        if ranks == "all":
            shared = options
            continue
        shape = POSITIONS[options.pop("shape")] if "shape" in options else {}
        worlds.setdefault(int(ranks), []).append(shared | shape | options)
    return worlds


def option_of(word: str) -> tuple[str, object]:
    """Return the name and the value of NAME=VALUE; the value is JSON or a text."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def assert_equal_runs(case: dict, result: dict, expected: dict) -> None:
    """Fail unless a case's run is that of one rank; a skipped step has the norm NaN and fails."""
    tolerance = case.get("tolerance", TOLERANCE.get(case.get("precision", "fp32")))
    assert len(result["losses"]) == case.get("steps", golden_worker.STEPS)
    for numbers in {"losses", "norms", "z_losses", "mtp_losses"} & expected.keys():
        assert_close(result[numbers], expected[numbers], tolerance, case)
    if expected["evaluated"]:
        assert_close(result["evaluated"], expected["evaluated"], tolerance, case)
    for kind in SUMS & expected.keys():
        off = weight_difference(result[kind], expected[kind])
        assert_within(off, case.get("weight_tolerance", tolerance), case)


def check_lines(feature: str, folder: Path, inputs: Path = Path()) -> list[dict]:
    """Check all cases of a feature; the results of the cases, in the order of the numbers of ranks.

    inputs: what {folder} stands for.
    """
    worlds = lines_of(feature, inputs)
    found = []
    with run_worlds(worlds, folder) as starts:
        for ranks, every in worlds.items():
            expected = [reference(case) for case in every]  # while the ranks are at work
            results = starts[ranks].result()
            for case, result, wanted in zip(every, results, expected, strict=True):
                assert_equal_runs(case, result, wanted)
            found += results
    return found


# The first step has the initial weights, the second those of an update, which were gathered, the
# third an update with moments, the fourth all of it again: later ones do nothing that is new.
@pytest.mark.slow
def test_every_layout_equals_the_single_rank_run(tmp_path):
    check_lines("layouts", tmp_path)


@pytest.mark.parametrize("shape", POSITIONS)
def test_rounding_is_well_within_the_tolerance(shape):
    """The tolerance of fp32 is one for every processor: rounding takes at most a third of it."""
    every = [case for case in lines_of("layouts")[4] if "precision" not in case]
    case = next(case for case in every if POSITIONS[shape].items() <= case.items())
    off = effect_of_rounding(case)
    assert off > 1e-9, "the weights were moved"
    assert_within(off, TOLERANCE["fp32"] / 3, case)


def test_the_runs_differ_where_they_should():
    """The instrument is not blind: other weights, other data, another model give other numbers."""
    base = {"layers": 2, "precision": "fp64", "global_batch_size": 4}
    expected = single_rank(json.dumps(base))
    for change in ({"seed": 5}, {"tied": False}, {"lr": 1.001e-3}, {"global_batch_size": 8}):
        other = single_rank(json.dumps(base | change))
        assert relative_difference(other["losses"], expected["losses"]) > 1e-9, change
        common = {name: value for name, value in expected["weights"].items() if "head." not in name}
        assert weight_difference(other["weights"], common) > 1e-9, change
