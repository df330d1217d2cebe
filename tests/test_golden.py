"""The layout does not change the result: any layout against the single-rank run.

Four steps under every (tp, pp, dp) in {1, 2, 4}^3 with up to 8 ranks, and ten steps once on each of
these meshes, with a ramp-up of the batch. The options of a layout (ZeRO stage, overlapped gather of
weights, sequence parallelism, schedule, micro-batch, tied head, positions, precision) are tried in
full on 2 ranks; on 4 and 8 ranks every pair of values occurs, and with --full-golden the full
product, in ten steps. Loss and gradient norm of every step agree to 1e-5 relative in fp32 and to
1e-10 in fp64, where no rounding hides an error; replicas are equal to the bit at the end.

Cases of one feature are lines of tests/data/golden/FEATURE.txt, which the test of the feature runs.
"""

import itertools
import json
import math
import random
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
WORLDS = (1, 2, 4, 8)
AT_A_TIME = 2  # starts of ranks
# The first step has the initial weights, the second those of an update, which were gathered, the
# third an update with moments, the fourth all of it again: later ones do nothing that is new.
FEW_STEPS = 4
MESHES = [m for m in itertools.product((1, 2, 4), repeat=3) if m[0] * m[1] * m[2] <= 8]


def factors(tp: int, pp: int, dp: int) -> dict[str, tuple]:
    """The options worth varying on a mesh, with their values."""
    return {
        "zero": (0, 1) if dp > 1 else (1,),
        "overlap_param_gather": (False, True) if dp > 1 else (False,),
        "sequence_parallel": (False, True) if tp > 1 else (False,),
        "schedule": ("gpipe", "1f1b") if pp > 1 else ("1f1b",),
        "micro_batch_size": (1, 2),
        "tied": (False, True),
        "positions": tuple(POSITIONS),
        "precision": ("fp32", "fp64"),
    }


def pairwise(values: dict[str, tuple], seed: int) -> list[dict]:
    """Few combinations in which every pair of values of two options occurs, chosen greedily."""
    return covering([dict(zip(values, v)) for v in itertools.product(*values.values())], seed)


def covering(everything: list[dict], seed: int) -> list[dict]:
    """Few of these combinations in which every pair of values that any has occurs."""
    random.Random(seed).shuffle(everything)
    pairs = [set(itertools.combinations(sorted(case.items()), 2)) for case in everything]
    wanted = set().union(*pairs)
    chosen = []
    while wanted:
        best = max(range(len(everything)), key=lambda i: len(pairs[i] & wanted))
        chosen.append(everything[best])
        wanted -= pairs[best]
    return chosen


def cases(ranks: int, full: bool) -> list[dict]:
    """Every case for a world of that many ranks."""
    result = []
    for tp, pp, dp in MESHES:
        if tp * pp * dp != ranks:
            continue
        values = factors(tp, pp, dp)
        combinations = [dict(zip(values, v)) for v in itertools.product(*values.values())]
        combinations = [c for c in combinations if c["zero"] >= c["overlap_param_gather"]]
        if not full and ranks > 2:
            combinations = covering(combinations, seed=100 * tp + 10 * pp + dp)
        for options in combinations:
            # Fewer micro-batches than stages are among these: 4 stages, 1 micro-batch.
            batch = max(4, dp * options["micro_batch_size"])
            extra = POSITIONS[options["positions"]]
            mesh = {"tp": tp, "pp": pp, "layers": 2, "global_batch_size": batch}
            steps = {} if full else {"steps": FEW_STEPS}
            result.append(options | extra | mesh | steps)
        result.append(ramp_up(result[-1], dp))
    return result


def ramp_up(case: dict, dp: int) -> dict:
    """A case with three batch sizes in its ten steps: 3, 2 and 5 of them."""
    share = dp * case["micro_batch_size"]
    return case | {
        "rampup_batch_size": [share, share, 6 * share],
        "global_batch_size": 3 * share,
        "lr_warmup_samples": 10 * share,
        "steps": golden_worker.STEPS,
    }


@cache
def single_rank(key: str) -> dict:
    """The run on one rank that a case must equal; micro-batch 1, everything else plain."""
    return golden_worker.run(validation.check(golden_worker.options(json.loads(key)), 1))


def without_layout(case: dict) -> dict:
    """The options of a case that its run on one rank has too."""
    layout = {*schema.Layout.__dataclass_fields__, *TOLERANCES}
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
    """Largest relative difference of losses, gradient norms and weights of two runs."""
    names = sorted(expected["weights"])
    assert sorted(result["weights"]) == names
    return max(
        relative_difference(result["losses"], expected["losses"]),
        relative_difference(result["norms"], expected["norms"]),
        weight_difference(result["weights"], expected["weights"]),
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
    `assert_equal_runs`.
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
    for numbers in ("losses", "norms"):
        assert_close(result[numbers], expected[numbers], tolerance, case)
    if expected["evaluated"]:
        assert_close(result["evaluated"], expected["evaluated"], tolerance, case)
    off = weight_difference(result["weights"], expected["weights"])
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


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory) -> Iterator[dict[int, tuple[list[dict], Future]]]:
    """For each number of ranks its cases and their results."""
    full = request.config.getoption("--full-golden")
    worlds = {ranks: cases(ranks, full) for ranks in WORLDS}
    with run_worlds(worlds, tmp_path_factory.mktemp("golden")) as starts:
        yield {ranks: (worlds[ranks], starts[ranks]) for ranks in WORLDS}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", WORLDS)
def test_every_layout_equals_the_single_rank_run(ranks, runs):
    every, start = runs[ranks]
    expected = [reference(case) for case in every]  # while the ranks are at work
    worst = {"fp32": 0.0, "fp64": 0.0}
    for case, result, wanted in zip(every, start.result(), expected, strict=True):
        off = distance(result, wanted)
        assert len(result["losses"]) == case.get("steps", golden_worker.STEPS)
        assert_within(off, TOLERANCE[case["precision"]], (case, result, wanted))
        worst[case["precision"]] = max(worst[case["precision"]], off)
    print(f"{ranks} ranks, {len(every)} cases, largest relative difference {worst}")


@pytest.mark.parametrize("positions", POSITIONS)
def test_rounding_is_well_within_the_tolerance(positions):
    """The tolerance of fp32 is one for every processor: rounding takes at most a third of it."""
    fp32 = [case for case in cases(4, full=False) if case["precision"] == "fp32"]
    case = next(case for case in fp32 if case["positions"] == positions)
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
