"""--audit-every: if this failed, a wrong product would stay unseen, or a healthy node be blamed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Job, fork_ranks, results_of
from supervised_runs import ONE_THREAD, SHAPE, decisions, in_slurm, wait_for_idle

from base.errors import UserError
from checkpointing import folders
from config.command_line import build
from config.validation import check
from telemetry.audit import last_clean, named, vote

ROTARY = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
EXPERTS = {"experts": 4, "experts_per_token": 2, "bias": False}
# Layouts of six ranks, with three replicas or six.
LAYOUTS = [
    {"dp": 3, "tp": 2, "zero": 0},
    {"dp": 3, "tp": 2, "sequence_parallel": True, "recompute": "full", "zero": 2},
    {"dp": 3, "pp": 2, "schedule": "zb-v", "layers": 4},
    {"dp": 3, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "layers": 4, "zero": 2},
    {"dp": 3, "cp": 2, "precision": "bf16", "overlap_param_gather": True, **ROTARY},
    {"dp": 3, "tp": 2, "ep": 2, "balance": "bias", **EXPERTS},
]
STEPS = 4
# The layers whose products an audit of two dense blocks computes, in order.
FORWARD = [("attention", 3), ("mlp", 2)]
BACKWARD = [("mlp", 4), ("attention", 5)]


def layers_of_products() -> list[str]:
    """The layer of each product: forward through both blocks and the head, and back."""
    forward = [
        f"blocks.{n}.{part}" for n in (0, 1) for part, count in FORWARD for _ in range(count)
    ]
    backward = [f"blocks.{n}.{p}" for n in (1, 0) for p, count in BACKWARD for _ in range(count)]
    return [*forward, *["head"] * 3, *backward]


# ---- Who is wrong --------------------------------------------------------------------------------


@given(st.data())
def test_the_majority_names_every_wrong_member_with_its_first_wrong_row(data):
    members = data.draw(st.integers(3, 9))
    rows = data.draw(st.integers(1, 12))
    most = (members - 1) // 2
    starts = st.dictionaries(st.integers(0, members - 1), st.integers(0, rows - 1), max_size=most)
    wrong = data.draw(starts)
    # Every wrong member has hashes of its own from its first wrong row on.
    table = [
        [1 + m if m in wrong and row >= wrong[m] else 0 for m in range(members)]
        for row in range(rows)
    ]
    expected = {member: (row, False) for member, row in wrong.items()}
    assert vote(table) == expected


def test_without_a_majority_all_that_differ_are_named():
    assert vote([[7, 7], [7, 8], [9, 9]]) == {0: (1, True), 1: (1, True)}
    assert vote([[1, 1, 2], [3, 4, 5]]) == {0: (1, True), 1: (1, True), 2: (0, False)}
    assert vote([[1, 1], [2, 2]]) == {}
    assert vote([]) == {}


def test_the_rank_with_the_earliest_wrong_result_is_named():
    """Ranks 2 and 3 are one replica: the product of rank 3 reaches rank 2 by a collective."""
    axes = {"pp": 1, "dp": 3, "cp": 1, "tp": 2}
    reports = [None, None, (9, False, "late"), (7, False, "early"), None, None]
    assert named(reports, axes) == [(3, False, "early")]
    assert named([(5, True, "a"), (5, False, "b"), *reports[2:]], axes) == [
        (0, True, "a"),
        (1, False, "b"),
        (3, False, "early"),
    ]


# ---- Real ranks ----------------------------------------------------------------------------------


def job(folder: Path, name: str, case: dict, steps: int, faults: dict, audited: bool) -> dict:
    case = {"global_batch_size": 12, "out": str(folder / name), **case}
    return {"case": case, "steps": steps, "faults": faults, "audited": audited}


@pytest.mark.slow
def test_each_product_of_a_model_is_examined_and_its_layer_named(tmp_path):
    layers = layers_of_products()
    faults = {
        str(step): {"rank": step % 3, "product": step - 2, "element": 37 * step, "bit": step % 31}
        for step in range(2, len(layers) + 2)
    }
    steps = len(layers) + 3
    (found,) = results_of(
        "tests/audits_worker.py", 3, [job(tmp_path, "run", {}, steps, faults, True)], tmp_path
    )
    assert found["products"] == [len(layers)] * 3
    assert found["false_alarms"] == 0
    for step, (fault, ranks, finding, flips) in found["found"].items():
        assert flips == 1
        assert ranks == [fault["rank"]], (fault, finding)
        assert f"({layers[fault['product']]}: " in finding or (
            f"(gradient of {layers[fault['product']]}." in finding
        ), (step, finding)


@pytest.mark.slow
def test_the_wrong_rank_is_named_in_every_layout_and_weights_stay_as_they_are(tmp_path):
    jobs = []
    for number, case in enumerate(LAYOUTS):
        drawn = {str(step): [1000 * number + step, 1.0] for step in range(2, STEPS + 1, 2)}
        jobs.append(job(tmp_path, f"{number}", case, STEPS, drawn, True))
        jobs.append(job(tmp_path, f"{number}", case, STEPS, {}, False))
    results = results_of("tests/audits_worker.py", 6, jobs, tmp_path)
    for case, audited, plain in zip(LAYOUTS, results[::2], results[1::2], strict=True):
        assert audited["weights"] == plain["weights"], case
        assert audited["false_alarms"] == 0, case
        for fault, ranks, finding, flips in audited["found"].values():
            assert flips == 1
            assert ranks == [fault["rank"]], (case, fault, finding)


def test_two_replicas_are_both_named(tmp_path):
    fault = {"rank": 1, "product": 4, "element": 5, "bit": 6}
    (found,) = results_of(
        "tests/audits_worker.py", 2, [job(tmp_path, "run", {}, 3, {"2": fault}, True)], tmp_path
    )
    ((_, ranks, finding, _),) = found["found"].values()
    assert ranks == [0, 1]
    assert "there is no majority, so nobody can say which is wrong" in finding
    assert found["false_alarms"] == 0


# ---- What a finding does -------------------------------------------------------------------------

WORDS = f"{SHAPE} --device cpu --lr-schedule constant --global-batch-size 12 --steps 9".split()
AUDITED = [*WORDS, "--audit-every", "3", "--save-every", "1", "--keep-last", "1"]
AUDITED += ["--resume", "auto"]


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of all tensors of a checkpoint."""
    found = {}
    for path in sorted(checkpoint.glob("rank_*.h5")):
        with h5py.File(path) as file:
            found |= {f"{path.name} {name}": array[()].tobytes() for name, array in file.items()}
    assert found
    return found


def rows(out: Path) -> list[tuple[int, bool]]:
    """The step of each audit, and whether it found nothing."""
    read = map(json.loads, (out / "audits.jsonl").read_text().splitlines())
    return [(row["iteration"], not row["finding"]) for row in read if "finding" in row]


@pytest.mark.slow
def test_the_run_that_goes_back_ends_with_the_weights_of_the_run_without_faults(tmp_path):
    """Although --keep-last 1 would delete the covered checkpoint when later ones are saved."""
    fault = json.dumps({"rank": 2, "product": 3, "element": 7, "bit": 20, "from": 5})
    out = tmp_path / "run"
    program = ["tests/audit_worker.py", fault, *AUDITED, "--out", str(out)]
    first = fork_ranks(3, *program)
    assert first.status == 2, first.err
    assert "the audit after step 6 found wrong bits on rank 2 on " in first.err
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000003"]
    case = json.loads((out / "hang" / "case.json").read_text())
    assert (case["kind"], case["culprits"], len(case["nodes"])) == ("audit", [2], 1)
    second = fork_ranks(3, *program)
    assert second.status == 0, second.err
    assert rows(out) == [(3, True), (6, False), (6, True), (9, True)]
    straight = ["train.py", *WORDS, "--save-every", "9", "--out", str(tmp_path / "straight")]
    done = fork_ranks(3, *straight)
    assert done.status == 0, done.err
    last = "checkpoints/step_00000009"
    assert tensors(out / last) == tensors(tmp_path / "straight" / last)


@pytest.mark.slow
def test_the_supervisor_leaves_the_named_node_out(tmp_path, slurm):
    """Rank 2 is wrong on n2 for good: the spare node takes its place, from the covered step."""
    fault = json.dumps({"rank": 2, "node": "n2", "product": 3, "element": 7, "bit": 20, "from": 5})
    command = in_slurm(tmp_path, ["--spare-nodes", "1"], *AUDITED)
    at = command.index("tests/paced_worker.py")
    command[at : at + 2] = ["tests/audit_worker.py", fault]
    command = [word.replace("--ntasks-per-node=1", "--ntasks-per-node=2") for word in command]
    run = tmp_path / "run"
    with Job(command, run, **ONE_THREAD) as supervised:
        assert supervised.status(600) == 0, supervised.text
    wait_for_idle(3)
    drained, finished = decisions(tmp_path)
    assert (drained["action"], drained["out"]) == ("restart", ["n2"])
    assert (drained["evidence"]["kind"], drained["evidence"]["ranks"]) == ("audit", [2])
    assert drained["evidence"]["newest"] == 3
    assert finished["action"] == "pass the status on"
    assert rows(run) == [(3, True), (6, False), (6, True), (9, True)]
    straight = ["train.py", *WORDS, "--save-every", "9", "--out", str(tmp_path / "straight")]
    done = fork_ranks(4, *straight)
    assert done.status == 0, done.err
    last = "checkpoints/step_00000009"
    assert tensors(run / last) == tensors(tmp_path / "straight" / last)


def test_the_last_clean_audit_before_a_step_is_found(tmp_path):
    path = tmp_path / "audits.jsonl"
    assert last_clean(path, 9) == -1
    lines = [{"iteration": 3, "finding": ""}, {"iteration": 6, "finding": "the audit ..."}]
    lines += [{"iteration": 12, "finding": ""}, {"iteration": "x", "finding": ""}, {}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 9')
    assert [last_clean(path, begin) for begin in (2, 3, 11, 12)] == [-1, 3, 3, 12]


def test_audits_of_another_course_cover_nothing(tmp_path):
    """The run went back to step 4, and then on to step 11 without an audit."""
    path = tmp_path / "audits.jsonl"
    lines = [{"iteration": 0}, {"iteration": 3, "finding": ""}, {"iteration": 9, "finding": ""}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"iteration": 4}]))
    assert last_clean(path, 11) == 3


@pytest.mark.parametrize(("covered", "left"), [(-1, [5]), (2, [2, 5]), (4, [4, 5]), (9, [5])])
def test_the_covered_checkpoint_is_kept(tmp_path, covered, left):
    for step in range(1, 6):
        (tmp_path / folders.folder_name(step)).mkdir()
    folders.delete_surplus(str(tmp_path), 1, 0, 5, covered)
    assert sorted(map(folders.step_of, folders.list_checkpoints(str(tmp_path)))) == left
    shutil.rmtree(tmp_path)


# ---- What cannot be audited ----------------------------------------------------------------------

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "vocab_size": 64, "steps": 3}


@pytest.mark.parametrize(
    ("options", "ranks", "sentence"),
    [
        ({}, 1, "compares data-parallel replicas, two or more: dp is 1"),
        ({"zero": 3}, 2, "needs whole replicas of the weights: --zero 0, 1 or 2, not 3"),
        ({"compile": True}, 2, "takes no --compile"),
        ({"record_routing": "file", **EXPERTS}, 2, "takes no --record-routing"),
        ({"ep": 2, **EXPERTS}, 2, "but ep(2) does not divide tp(1) * cp(1)"),
    ],
)
def test_runs_that_cannot_be_audited_are_refused(options, ranks, sentence):
    config = build({**SMALL, **options, "audit_every": 2})
    with pytest.raises(UserError, match=r"^--audit-every 2") as refused:
        check(config, ranks)
    assert sentence in str(refused.value)
    check(replace(config, run=replace(config.run, audit_every=0)), ranks)
