"""--trace-numerics and runs.py diff: if this failed, a trace would depend on the layout, or diff
would accuse rounding, or miss a fault.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import fork_one, results_of

import runs
from base.errors import UserError
from config.command_line import build
from telemetry.numerics_trace import activation_names, bins
from tools.numerics import diff, layers
from tools.numerics.places import described
from tools.numerics.traces import TensorRow

ROTARY = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
EXPERTS = {"experts": 4, "experts_per_token": 2, "bias": False}
ONE = [
    {"micro_batch_size": 2},
    {"micro_batch_size": 4, "recompute": "full"},
    {"recompute": "selective"},
]
TWO = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True, "recompute": "full", "micro_batch_size": 2},
    {"pp": 2},
    {"pp": 2, "schedule": "zb-h1", "micro_batch_size": 2},
    {"pp": 2, "schedule": "zb-v"},
    {"dp": 2, "zero": 0},
    {"dp": 2, "zero": 1, "micro_batch_size": 2},
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3},
    {"cp": 2},
    {"cp": 2, **ROTARY},
    {"tp": 2, **EXPERTS},
    {"dp": 2, "ep": 2, **EXPERTS},
]
# Faults of tests/plants.py: the plant, the layout of the run that has it, and what diff must name:
# step, kind, tensor.
FAULTS: dict[str, tuple[dict, dict, tuple]] = {
    "no sum over tp": (
        {"site": "MLP.forward", "detail": "blocks.1", "change": "left out"},
        {"tp": 2},
        (1, "activation", "blocks.1"),
    ),
    "no sum over dp": (
        {"site": "Bucket.reduce", "change": "left out"},
        {"dp": 2, "zero": 0},
        (1, "gradient", "embedding.tokens.weight"),
    ),
    "weights not gathered": (
        {"site": "all_gather_params", "change": "left out"},
        {"dp": 2, "zero": 1},
        (2, "activation", "embedding"),
    ),
    "heads not exchanged": (
        {"site": "to_heads", "change": "left out"},
        {"cp": 2},
        (1, "activation", "blocks.0.attention"),
    ),
    "loss doubled": (
        {"site": "_CrossEntropy", "change": "doubled"},
        {"tp": 2},
        (1, "activation", "loss"),
    ),
    "gradient of the step before": (
        {"site": "ColumnLinearFn.backward", "change": "stale"},
        {"tp": 2},
        (2, "activation", "gradient of head.norm"),
    ),
    "norms_not_reduced": (
        {"by_hand": "norms_not_reduced"},
        {"tp": 2, "sequence_parallel": True},
        (1, "gradient", "blocks.0.attention_norm.weight"),
    ),
    "tied_counted_twice": (
        {"by_hand": "tied_counted_twice"},
        {"pp": 2},
        (1, "gradient", "embedding.tokens.weight"),
    ),
    "other_seed": (
        {"by_hand": "other_seed", "rank": 1},
        {"tp": 2},
        (1, "weights before", "embedding.tokens.weight"),
    ),
    "wrong_divisor": (
        {"by_hand": "wrong_divisor"},
        {"dp": 2},
        (1, "activation", "gradient of head.norm"),
    ),
    "rotary_off_by_one": (
        {"by_hand": "rotary_off_by_one", "rank": 1},
        {"cp": 2, **ROTARY},
        (1, "activation", "blocks.0.attention"),
    ),
    "other_order": ({"by_hand": "other_order"}, {"dp": 2}, (2, "activation", "tokens")),
}
SLOW = pytest.mark.slow
EIGHT_BITS = {"optimizer": "adamw8bit", "hidden": 512, "ffn_hidden": 512}
# Pairs of right runs with an optimizer that makes rounding errors larger: the layout and the model
# of the run on two ranks, and the precision.
ENLARGED: dict[str, tuple[dict, str]] = {
    "8-bit state: an element moves to the next of 256 values": ({"pp": 2, **EIGHT_BITS}, "fp32"),
    "Adafactor divides the gradient of a key's bias, which is rounding alone, by its own size": (
        {"cp": 2, "optimizer": "adafactor"},
        "fp64",
    ),
    "Muon enlarges small singular values": ({"cp": 2, "optimizer": "muon", **EXPERTS}, "fp32"),
}


def of_model(case: dict) -> dict:
    """The options of a case that are not of its layout."""
    return {name: case[name] for name in case if name in (*ROTARY, *EXPERTS, *EIGHT_BITS)}


UNTRACED = [TWO[1], TWO[7], TWO[9]]


def layouts_of(precision: str) -> list[dict]:
    """The layouts whose traces are compared: in bf16 a few, with each way of summing."""
    return [ONE[1], *UNTRACED, TWO[4], TWO[12]] if precision == "bf16" else [*ONE, *TWO]


class Traces:
    """Traced runs of one and of two ranks, all made in two starts."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.jobs: dict[int, list[dict]] = {1: [], 2: []}
        self.weights: dict[Path, dict] = {}

    def plan(self, case: dict, precision: str, fault: str = "", traced=True) -> None:
        """Add a run with a fault of FAULTS, or without one."""
        ranks = 2 if {"tp", "pp", "dp", "cp"} & set(case) else 1
        out = self.out(case, precision, fault, traced)
        options = case | {"precision": precision, "steps": 2, "out": str(out)}
        options |= {"trace_numerics": [1, 2]} if traced else {}
        plant = FAULTS[fault][0] if fault else None
        job = {"case": options, "plant": plant}
        if job not in self.jobs[ranks]:
            self.jobs[ranks].append(job)

    def plan_layouts(self, precision: str) -> None:
        """Add a run of each layout, the runs on one rank beside them, and untraced runs."""
        for case in layouts_of(precision):
            self.plan(case, precision)
            self.plan(of_model(case), precision)
        for case in UNTRACED if precision != "fp64" else []:
            self.plan(case, precision, traced=False)

    def out(self, case: dict, precision: str, fault: str = "", traced=True) -> Path:
        """Return the folder of a run."""
        words = [f"{name}-{value}" for name, value in case.items()]
        return self.folder / "_".join([precision, fault, str(traced), *words])

    def make(self) -> None:
        """Make the runs that are planned."""
        for ranks, jobs in self.jobs.items():
            results = results_of("tests/plants_worker.py", ranks, jobs, self.folder)
            for job, result in zip(jobs, results, strict=True):
                self.weights[Path(job["case"]["out"])] = result["weights"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> Traces:
    made = Traces(tmp_path_factory.mktemp("traces"))
    made.plan_layouts("fp32")
    made.plan(UNTRACED[1], "bf16", traced=False)
    for case, precision in ENLARGED.values():
        made.plan(case, precision)
        made.plan(of_model(case), precision)
    for fault, (_, case, _) in FAULTS.items():
        made.plan(case, "fp32", fault)
    made.plan({"dp": 2, "lr": 2e-3}, "fp32")
    made.make()
    return made


@pytest.fixture(scope="module")
def traces_of(request, tmp_path_factory):
    """The traces with a precision. Those in fp64 and bf16 are made for the slow tests alone."""

    def traces_in(precision: str) -> Traces:
        return request.getfixturevalue("traces" if precision == "fp32" else "slow_traces")

    return traces_in


@pytest.fixture(scope="module")
def slow_traces(tmp_path_factory) -> Traces:
    made = Traces(tmp_path_factory.mktemp("slow_traces"))
    for precision in ("fp64", "bf16"):
        made.plan_layouts(precision)
    made.make()
    return made


def loaded(run: Path, step: int) -> tuple[dict[str, np.ndarray], dict]:
    with np.load(run / "numerics" / f"step-{step:06d}.npz") as held:
        arrays = {name: held[name] for name in held.files}
    return arrays, json.loads(arrays["about"].tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ONE, *TWO], ids=str)
def test_a_trace_in_fp64_does_not_depend_on_the_layout(slow_traces, case):
    for step in (1, 2):
        one, about = loaded(slow_traces.out(of_model(case), "fp64"), step)
        many, others = loaded(slow_traces.out(case, "fp64"), step)
        for name in ("activations", "parameters", "kinds", "bins", "samples"):
            assert about[name] == others[name]
        a, b = one["values"], many["values"]
        assert (a[:, 0] == b[:, 0]).all()
        norm = np.sqrt(a[:, 2:3])
        scale = np.concatenate([a[:, :1] + 1, norm * np.sqrt(a[:, :1]), norm**2], 1)
        scale = np.concatenate([scale, np.repeat(norm, 9, 1)], 1) + 1e-30
        assert (np.abs(a - b) / scale).max() < 1e-12


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param(case, precision, marks=() if precision == "fp32" else SLOW)
        for precision in ("fp32", "fp64", "bf16")
        for case in layouts_of(precision)
    ],
    ids=str,
)
@pytest.mark.slow
def test_diff_accuses_no_layout(traces_of, case, precision):
    traces = traces_of(precision)
    found = diff.compare(traces.out(of_model(case), precision), traces.out(case, precision))
    assert not found["differs"], diff.text(found)


@pytest.mark.parametrize(("case", "precision"), ENLARGED.values(), ids=ENLARGED)
def test_diff_explains_what_an_optimizer_enlarges(traces, case, precision):
    found = diff.compare(traces.out(of_model(case), precision), traces.out(case, precision))
    assert not found["differs"], diff.text(found)


@pytest.mark.parametrize("fault", FAULTS)
def test_diff_names_the_tensor_of_a_fault(traces, fault):
    _, case, named = FAULTS[fault]
    found = diff.compare(traces.out(of_model(case), "fp32"), traces.out(case, "fp32", fault))
    tensor = found["tensor"]
    assert tensor, diff.text(found)
    assert (tensor["step"], tensor["kind"], tensor["name"]) == named, diff.text(found)
    if fault == "other_order":
        here, there = tensor["where"]
        assert here["samples"] == there["samples"] == [2, 5], "of the step"
        assert there["micro_batches"] == {0: [1], 1: [2]}
    if fault == "no sum over tp":
        assert "MLP down and its reduction over tp" in tensor["between"]
        assert tensor["last_good"] == "the output of block 1's attention"
    assert len(diff.text(found).splitlines()) < 40


def test_the_picture_has_the_layer_and_the_step_of_a_fault(traces, tmp_path):
    a = traces.out({}, "fp32")
    b = traces.out({"tp": 2}, "fp32", "no sum over tp")
    found = layers.by_layer(a, b)
    assert found["steps"] == [1, 2]
    assert found["layers"] == ["embedding", "block 0", "block 1", "head"]
    outputs, gradients, _ = np.array(found["shares"])
    assert (outputs[:2, 0] <= 1.0).all()
    assert (outputs[2:, 0] > 1.0).all()
    assert (gradients[:, 0] > 1.0).all()
    status = runs.run_command(["diff", str(a), str(b), "--picture", str(tmp_path / "p.html")])
    page = (tmp_path / "p.html").read_text()
    assert status == 1
    assert ">block 1</text>" in page
    assert "the output of block 1" in page


def test_another_learning_rate_is_said_first(traces):
    a, b = traces.out({}, "fp32"), traces.out({"dp": 2, "lr": 2e-3}, "fp32")
    lines = diff.text(diff.compare(a, b)).splitlines()
    assert lines[2] == "step 1: the learning rate is 0.001 in A and 0.002 in B"


def test_diff_reads_the_files_that_train_writes(tmp_path):
    """train.py's own metrics.jsonl and traces: another rate is said, and its updates are named."""
    shape = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 61 --steps 2"
    for name, lr in (("a", "0.001"), ("b", "0.002")):
        words = f"{shape} --device cpu --lr {lr} --trace-numerics 1 --out {tmp_path / name}"
        assert fork_one("train.py", *words.split()).status == 0
    found = diff.compare(tmp_path / "a", tmp_path / "b")
    (first,) = found["settings"]
    assert (first["step"], first["of"], first["values"]) == (1, "learning_rate", [0.001, 0.002])
    assert found["traces"] == ["step-000001.npz"]
    assert found["tensor"]["kind"] == "weights after"


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=SLOW)])
@pytest.mark.parametrize("case", UNTRACED, ids=str)
def test_a_traced_run_has_the_weights_of_an_untraced_one(traces_of, case, precision):
    traces = traces_of(precision)
    untraced = traces.weights[traces.out(case, precision, traced=False)]
    assert traces.weights[traces.out(case, precision)] == untraced


def test_runs_without_traces_get_the_commands_that_make_them(traces, tmp_path, capsys):
    case = UNTRACED[1]
    a, b = traces.out(case, "fp32", traced=False), traces.out(case, "bf16", traced=False)
    assert runs.run_command(["diff", str(a), str(b)]) in (0, 1)
    printed = capsys.readouterr().out
    assert "option precision: fp32 in A, bf16 in B" in printed
    assert printed.count("--trace-numerics 1 2") == 2
    assert runs.run_command(["diff", str(a), str(a), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differs"] is False
    with pytest.raises(UserError, match="is no folder of a run"):
        runs.run_command(["diff", str(a), str(tmp_path)])


def test_the_commands_of_a_resumed_run_are_those_of_its_first_start(tmp_path):
    """A later start takes from its checkpoint what the command does not say."""
    words = (
        "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 --steps 2 --save-every 2"
    )
    for more in (words, "--resume auto --steps 3"):
        done = fork_one("train.py", *more.split(), "--device", "cpu", "--out", str(tmp_path))
        assert done.status == 0, done.err
    for path in tmp_path.glob("checkpoints/*"):
        shutil.rmtree(path)
    for command in diff.compare(tmp_path, tmp_path)["commands"]:
        assert "--layers 1 --hidden 8" in command
        assert "--resume" not in command


def test_a_step_of_176b_is_at_most_a_megabyte():
    model = build({"model": "bloom-176b", "steps": 1}).model
    activations = activation_names(model)
    parameters = 12 * model.layers + 6  # four norms, two matrices with biases, two more
    count = bins(2048, len(activations), parameters, 5)
    names = 40 * (len(activations) + parameters)
    numbers = 12 * (count * len(activations) + 5 * parameters)
    assert count >= 8
    responses = len(activations) + parameters
    assert 8 * numbers + 4 * responses + names < 1_000_000


def test_a_sample_that_only_one_run_has_read_is_a_difference_of_the_data(tmp_path):
    """Sample 7 is read twice and sample 6 never: the tokens are named, and no gradient."""
    words = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 --device cpu --steps 1"
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        done = fork_one("train.py", *words.split(), "--trace-numerics", "1", "--out", str(folder))
        assert done.status == 0, done.err
    path = folders[1] / "numerics/step-000001.npz"
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(arrays["about"].tobytes())
    assert (about["bins"], about["samples"]) == (8, 8)
    for first in range(0, 8 * len(about["activations"]), 8):
        arrays["values"][first + 7] *= 2
        arrays["values"][first + 6] = 0
    np.savez(path, **arrays)
    found = diff.compare(*folders)
    assert (found["tensor"]["kind"], found["tensor"]["name"]) == ("activation", "tokens")
    assert found["tensor"]["where"][0]["samples"] == [6, 7]
    assert "reading the samples" in diff.text(found)
    # Runs with other numbers of samples in a step are not compared by activation, with a note.
    about["samples"] = 16
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(path, **arrays)
    (note,) = diff.compare(*folders)["notes"]
    assert "has 8 samples in A and 16 in B: its activations are not compared" in note


def test_a_tensor_that_one_run_lacks_is_a_difference(tmp_path):
    """A bias that is 0 in one run and absent in the other, and what a trace has not counted."""
    words = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 --device cpu --steps 1"
    for name, more in (("a", ()), ("b", ("--no-bias",)), ("c", ())):
        out = ("--trace-numerics", "1", "--out", str(tmp_path / name))
        done = fork_one("train.py", *words.split(), *more, *out)
        assert done.status == 0, done.err
    a, b, c = (tmp_path / name for name in "abc")
    for pair, has in (((a, b), "A"), ((b, a), "B")):
        found = diff.compare(*pair)
        assert found["tensor"]["only"] == has
        assert found["tensor"]["kind"] == "weights before"
        assert found["tensor"]["name"].endswith(".bias")
        printed = diff.text(found)
        assert f"only {has} has it" in printed
        assert diff.METRICS not in printed
        shares = layers.by_layer(*pair)["shares"]
        assert shares[2][layers.by_layer(*pair)["layers"].index("block 0")] == [1e300]
    assert diff.compare(a, c)["tensor"] is None

    path = c / "numerics/step-000001.npz"
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(arrays["about"].tobytes())
    written = arrays["values"].copy()
    place = 8 * about["activations"].index("blocks.0.attention")
    arrays["values"][place : place + 8] = 0
    np.savez(path, **arrays)
    found = diff.compare(a, c)["tensor"]
    assert (found["name"], found["only"]) == ("blocks.0.attention", "A")
    gradients = 8 * len(about["activations"])  # the first kind of the parameters' rows
    name = "blocks.0.mlp.up.weight"
    arrays["values"] = written
    arrays["values"][gradients + about["parameters"].index(name)] = 0
    np.savez(path, **arrays)
    found = diff.compare(a, c)["tensor"]
    assert (found["kind"], found["name"], found["only"]) == ("gradient", name, "A")


def test_an_evaluation_of_other_texts_is_a_difference(tmp_path):
    words = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 --device cpu --steps 1"
    a, b = tmp_path / "a", tmp_path / "b"
    done = fork_one("train.py", *words.split(), "--out", str(a))
    assert done.status == 0, done.err
    shutil.copytree(a, b)
    for folder, loss in ((a, 4.0), (b, 4.5)):
        rows = [{"iteration": 1, "validation_loss": 4.2}, {"iteration": 1, "books_loss": loss}]
        with open(folder / "metrics.jsonl", "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    found = diff.compare(a, b)
    assert found["losses"] is None
    assert found["evaluations"]["of"] == "books_loss"
    assert found["differs"]
    assert "step 1: the evaluation's books_loss is 4 in A and 4.5 in B" in diff.text(found)
    assert not diff.compare(a, a)["differs"]


@pytest.mark.parametrize("name", ["blocks.0.attention", "gradient of blocks.0"])
def test_the_norms_of_queries_and_keys_are_among_the_operations(name):
    row = TensorRow("activation", name, 1.0, 0.0, 1.0)
    assert "norms of q and k" in described(row)["between"]
