"""The schedule does not change the result: each against the single-rank run, on four ranks.

Every pair of values of schedule, mesh, ZeRO stage, overlapped gather of weights, recomputation,
sequence parallelism, tied head, partition, micro-batch size and precision occurs, in one start of
ranks. Checkpoints know no schedule: what one saves, the next continues.
"""

import itertools
import json
import random

import pytest
from compare import assert_within
from golden_worker import options
from test_checkpoint import check_chain
from test_golden import FEW_STEPS, TOLERANCE, covering, distance, reference, run_cases

from config import validation
from config.messages import UserError

LAYERS = 6
VALUES = {
    "mesh": ({"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2}),
    "schedule": ("interleaved 2", "interleaved 3", "zb-h1", "zb-v", "auto"),
    "zero": (0, 1, 2),
    "overlap_param_gather": (False, True),  # where there are replicas
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": (False, True),
    "tied": (False, True),
    "partition": ("balanced", "uneven", "empty ends"),
    "micro_batch_size": (1, 2),  # with 2, a pipeline of 4 ranks has 2 micro-batches
    "precision": ("fp32", "fp64"),
}


def blocks(kind: str, stages: int) -> str:
    """A partition of LAYERS: balanced, some list, or one whose first and last stage have none."""
    if kind == "balanced":
        return kind
    generator = random.Random(stages)
    free = range(stages) if kind == "uneven" else range(1, stages - 1) or range(1)
    found = [0] * stages
    for _ in range(LAYERS):
        found[generator.choice(free)] += 1
    return ",".join(map(str, found))


def every_case() -> list[dict]:
    """All combinations that config allows, as VALUES names them."""
    found = []
    for values in itertools.product(*VALUES.values()):
        case = dict(zip(VALUES, values, strict=True))
        alone = case["mesh"] != {"pp": 2}
        if case["overlap_param_gather"] and (alone or not case["zero"]):
            continue
        if case["sequence_parallel"] <= ("tp" in case["mesh"]) and allowed(case):
            found.append(case | {"mesh": json.dumps(case["mesh"])})
    return found


def allowed(case: dict) -> bool:
    try:
        validation.check(options(asked(case)), 4)
    except UserError:
        return False
    return True


def asked(case: dict) -> dict:
    """A combination as options of the command line."""
    mesh = case["mesh"] if isinstance(case["mesh"], dict) else json.loads(case["mesh"])
    name, _, virtual = case["schedule"].partition(" ")
    stages = mesh["pp"] * (int(virtual) if virtual else 1 + (name == "zb-v"))
    found = case | mesh | {"layers": LAYERS, "global_batch_size": 4, "schedule": name}
    found |= {"steps": FEW_STEPS}
    found |= {"virtual_stages": int(virtual)} if virtual else {}
    del found["mesh"]
    return found | {"partition": blocks(case["partition"], stages)}


@pytest.fixture(scope="module")
def cases() -> list[dict]:
    """Few combinations in which every pair of values occurs."""
    return [asked(case) for case in covering(every_case(), seed=15)]


@pytest.mark.slow
def test_every_schedule_equals_the_single_rank_run(cases, tmp_path):
    worst = {"fp32": 0.0, "fp64": 0.0}
    for case, result in zip(cases, run_cases(4, cases, tmp_path), strict=True):
        off = distance(result, reference(case))
        assert_within(off, TOLERANCE[case["precision"]], case)
        worst[case["precision"]] = max(worst[case["precision"]], off)
    print(f"{len(cases)} cases, largest relative difference {worst}")


def test_the_cases_are_what_they_are_meant_to_be(cases):
    """Every schedule with every ZeRO stage, a tied head, empty stages, fewer micro-batches."""
    names = {case["schedule"] for case in cases}
    assert names == {"interleaved", "zb-h1", "zb-v", "auto"}
    assert {(c["pp"], c["micro_batch_size"]) for c in cases} >= {(4, 1), (4, 2), (2, 1), (2, 2)}
    for name in names:
        own = [case for case in cases if case["schedule"] == name]
        assert {case["zero"] for case in own} == {0, 1, 2}
        assert {case["tied"] for case in own} == {False, True}
        assert any("0" in case["partition"].split(",") for case in own)
        assert any(case["sequence_parallel"] for case in own)


def test_a_checkpoint_knows_no_schedule(tmp_path):
    """Saved under 1F1B, continued under interleaved and from there under ZB-V, and back."""
    common = {"layers": 4, "save_every": 2, "precision": "fp64"}
    layouts = [
        {"pp": 2},
        {"pp": 2, "schedule": "interleaved"},
        {"pp": 2, "schedule": "zb-v"},
        {"pp": 2, "schedule": "zb-h1", "zero": 2},
        {"pp": 2, "schedule": "auto"},
        {"pp": 2, "partition": "1,3"},
    ]
    check_chain(2, common, layouts, tmp_path)
