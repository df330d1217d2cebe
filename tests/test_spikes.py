"""--on-spike: if this failed, a spike would go unseen, change the weights, or stop a good run."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Outcome, fork_ranks, mpi_command, start

import data
import trainer
from base.errors import number_ranges
from checkpointing.index import Index
from config.command_line import parse
from config.validation import check
from corpora.token_files import IndexedDatasetWriter
from telemetry.loss_monitor import WINDOW, earlier_steps, layer_of, sketch
from tools.numerics import spikes

# The samples 180 to 183, step 46, hold random tokens.
PLANTED = "180:184"
SHAPE = "--layers 2 --hidden 16 --heads 2 --seq-length 16 --vocab-size 64 --global-batch-size 4 "
WORDS = f"{SHAPE}--micro-batch-size 2 --lr 1e-2 --device cpu --steps 60 --log-every 20 ".split()
SYNTHETIC = ["--data", "synthetic"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def train(out: Path, *words: str, planted: str = PLANTED, ranks: int = 1) -> Outcome:
    given = words if "--data" in words else (*SYNTHETIC, *words)
    line = [*WORDS, *given, "--out", str(out)]
    return fork_ranks(ranks, "tests/spike_worker.py", planted, *line)


def rows(folder: Path, name: str = "spikes.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """The losses by step of the last start."""
    found = rows(folder, "metrics.jsonl")
    return {row["iteration"]: row["loss"] for row in found if "loss" in row}


def saved(folder: Path, step: int) -> dict[tuple[str, str], bytes]:
    """The bytes of each tensor of a checkpoint."""
    with Index(str(folder / "checkpoints" / f"step_{step:08d}")) as index:
        return {
            (kind, name): index.read_whole(kind, name).tobytes()
            for kind in index.kinds
            for name in index.shapes
        }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    prefix = str(tmp_path_factory.mktemp("corpus") / "a")
    with IndexedDatasetWriter(prefix, vocab_size=64) as writer:
        for i in range(300):
            writer.add_document(np.arange(5 + i % 23) % 64)
    return prefix


# ---- Record and skip -----------------------------------------------------------------------------


def test_a_spike_is_recorded_or_skipped(tmp_path, corpus):
    """Two replicas: a record changes nothing; a skipped batch is one that --skip-samples names."""
    ways = {
        "off": "",
        "record": "--on-spike record",
        "skip": "--on-spike skip --save-every 60",
        "never": f"--skip-samples {PLANTED} --save-every 60",
    }
    for name, words in ways.items():
        outcome = train(tmp_path / name, "--data", corpus, *words.split(), ranks=2)
        assert outcome.status == 0, outcome.err
    assert losses(tmp_path / "record") == losses(tmp_path / "off")
    (row,) = rows(tmp_path / "record")
    assert (row["iteration"], row["action"], row["first_sample"]) == (46, "record", 180)
    assert "passed_over" not in row
    config = check(parse([*WORDS, "--data", corpus]), 2)
    samples = data.build(config).train
    spans = [[span._asdict() for span in samples.spans(k)] for k in range(180, 184)]
    assert [sample["text"] for sample in row["samples"]] == spans
    step = rows(tmp_path / "record", "metrics.jsonl")[45]
    before = rows(tmp_path / "record", "metrics.jsonl")[44]
    for norms, whole in ((row["layer_norms"], step), (row["before"]["layer_norms"], before)):
        assert norms.keys() == {"embedding", "blocks.0", "blocks.1", "head"}
        assert math.hypot(*norms.values()) == pytest.approx(whole["grad_norm"], rel=1e-6)
    assert row["sketch"]["entropy"] > row["before"]["sketch"]["entropy"] + 1
    assert row["before"]["sketch"]["distinct"] == 8

    found = spikes.compare(tmp_path / "record")
    (explained,) = found["spikes"]
    numbers = {span["document"] for sample in spans for span in sample}
    text = spikes.text(found)
    assert f"\n    documents {number_ranges(numbers)} of {corpus}\n" in text
    norms = row["layer_norms"]
    growth = {layer: norms[layer] / row["before"]["layer_norms"][layer] for layer in norms}
    assert explained["growth"] == growth
    largest = max(growth, key=growth.__getitem__)
    assert next(iter(explained["growth"])) == largest
    assert f"\n    the norm grew most in {largest} (" in text
    (unexplained,) = spikes.compare(tmp_path / "off")["spikes"]
    assert unexplained["growth"] == {}

    (row,) = rows(tmp_path / "skip")
    assert (row["iteration"], row["action"]) == (46, "skip")
    seen = losses(tmp_path / "skip")
    del seen[46]
    assert seen == losses(tmp_path / "never")
    assert seen[60] != losses(tmp_path / "off")[60]
    assert saved(tmp_path / "skip", 60) == saved(tmp_path / "never", 60)


LAYOUTS = ["--tp 2", "--pp 2", "--zero 3", "--tp 2 --sequence-parallel", "--cp 2"]


EXACT = ["--on-spike", "skip", "--precision", "fp64", "--lr-schedule", "constant"]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory) -> Path:
    """The folder of a run on one rank that skips a spike."""
    folder = tmp_path_factory.mktemp("one")
    assert train(folder, *EXACT).status == 0
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_decides_alike(on_one_rank, tmp_path, layout):
    outcome = train(tmp_path / "two", *EXACT, *layout.split(), ranks=2)
    assert outcome.status == 0, outcome.err
    (one,) = rows(on_one_rank)
    (two,) = rows(tmp_path / "two")
    for a, b in ((one, two), (one["before"], two["before"])):
        assert b["layer_norms"] == pytest.approx(a["layer_norms"], rel=1e-9)
        assert b["sketch"] == a["sketch"]
    for name in ("iteration", "of", "action", "passed_over", "samples"):
        assert two[name] == one[name]


@pytest.mark.slow
def test_a_restart_keeps_the_steps_before_and_the_batches_left_out(tmp_path):
    """The second spike is the second step after a restart, which follows the first spike."""
    words = ["--on-spike", "skip", "--save-every", "40", "--resume", "auto"]
    planted = "164:168,180:184"
    assert train(tmp_path / "whole", *words, planted=planted).status == 0
    parts = tmp_path / "parts"
    outcome = train(parts, *words, "--stop-at-samples", "176", planted=planted)
    assert outcome.status == 75, outcome.err
    assert len(losses(parts)) == 44
    outcome = train(parts, *words, planted=planted)
    assert outcome.status == 0, outcome.err
    after = losses(parts)
    whole = losses(tmp_path / "whole")
    assert after == {step: whole[step] for step in range(45, 61)}
    assert [row["iteration"] for row in rows(parts)] == [42, 46]
    assert rows(parts)[1]["mean"] == rows(tmp_path / "whole")[1]["mean"]
    # From the checkpoint of step 40 the batch of step 42 is skipped.
    for step in (44, 60):
        folder = parts / "checkpoints" / f"step_{step:08d}"
        folder.rename(parts / folder.name)
    outcome = train(parts, *words, planted=planted)
    assert outcome.status == 0, outcome.err
    assert "batches that hold samples of 164:168, 180:184 are skipped" in outcome.out
    again = losses(parts)
    assert again == {step: whole[step] for step in range(41, 61) if step not in (42, 46)}


@pytest.mark.slow
def test_the_run_ends_after_so_many_spikes(tmp_path):
    words = ["--on-spike", "skip", "--set", "spike_limit=1", "--save-every", "40"]
    planted = "164:168,180:184"
    outcome = train(tmp_path, *words, planted=planted, ranks=2)
    assert outcome.status == 2
    assert "error: step 46 is spike 2 of this run, see" in outcome.err
    assert outcome.err.count("spike_limit is 1\n") == 1
    assert "Traceback" not in outcome.err
    assert [row["action"] for row in rows(tmp_path)] == ["skip", "end"]
    outcome = train(tmp_path, *words, "--resume", "auto", planted=planted, ranks=2)
    assert "error: step 46 is spike 2 of this run" in outcome.err
    words[3] = "spike_limit=2"
    assert train(tmp_path, *words, "--resume", "auto", planted=planted).status == 0
    assert [row["action"] for row in rows(tmp_path)] == ["skip", "end", "end", "skip"]


def test_a_loss_that_is_not_finite_is_a_spike(tmp_path):
    words = [*WORDS, *SYNTHETIC, "--on-spike", "skip", "--steps", "6", "--out", str(tmp_path)]
    outcome = fork_ranks(2, "tests/corrupted_worker.py", "nan", "1", "3", *words)
    assert outcome.status == 0, outcome.err
    (row,) = rows(tmp_path)
    assert (row["iteration"], row["of"], row["loss"]) == (3, "loss", None)
    assert row["passed_over"] == [8, 12]
    assert math.isnan(row["layer_norms"]["blocks.1"])
    outcome = start([sys.executable, "runs.py", "diff", str(tmp_path), "--spikes"])
    assert outcome.status == 1, outcome.err
    assert "step 3: loss None, spike of loss\n" in outcome.out
    assert "(nan times)" in outcome.out


def test_a_refused_step_leaves_the_whole_state(tmp_path):
    """Also the loss scale of fp16, which a run without the batch would not have moved."""
    words = [*SHAPE.split(), *SYNTHETIC, "--steps", "9", "--device", "cpu", "--precision", "fp16"]
    config = check(parse([*words, "--lr", "1e-2"]), 1)
    state = trainer.build(config)
    samples = data.Synthetic(64, 16, 1)
    trainer.step(state, samples, 0, 1e-3)
    kinds = ("weights", *state.optimizer.state_kinds)

    def values() -> list[torch.Tensor]:
        shards = state.optimizer.owned()
        return [s.read(kind, s.start, s.stop).clone() for s in shards for kind in kinds]

    before = values()
    scalars = state.optimizer.scalars()
    state.optimizer.accepts = lambda *_: False
    assert trainer.step(state, samples, 4, 1e-3).skipped
    assert state.optimizer.scalars() == scalars
    assert all(torch.equal(a, b) for a, b in zip(before, values(), strict=True))


# ---- Rollback ------------------------------------------------------------------------------------


def supervised(out: Path, planted: str, *words: str) -> Outcome:
    program = [sys.executable, "tests/spike_worker.py", planted, *WORDS, *SYNTHETIC]
    options = ["--on-spike", "rollback", "--save-every", "10", "--resume", "auto", *words]
    command = [*mpi_command(2), *program, *options, "--out", str(out)]
    return start([sys.executable, "supervise.py", "--", *command], **ONE_THREAD)


def actions(out: Path) -> list[tuple[str, str]]:
    found = rows(out, "supervisor.jsonl")
    return [(row["evidence"]["kind"], row["action"]) for row in found]


@pytest.mark.slow
def test_a_rollback_is_a_run_without_the_batches_since_the_checkpoint(tmp_path):
    """The supervisor starts again twice; the second spike comes before another checkpoint."""
    outcome = supervised(tmp_path / "run", "180:184,196:200")
    assert outcome.status == 0, outcome.out + outcome.err
    assert actions(tmp_path / "run") == [
        ("spike", "restart"),
        ("spike", "restart"),
        ("", "pass the status on"),
    ]
    found = rows(tmp_path / "run")
    assert [(row["iteration"], row["action"]) for row in found] == [
        (46, "rollback"),
        (50, "rollback"),
    ]
    assert [row["passed_over"] for row in found] == [[160, 184], [160, 200]]
    assert "step 46 is spike 1 of this run" in outcome.err
    never = train(tmp_path / "never", "--skip-samples", "160:200", "--save-every", "60", ranks=2)
    assert never.status == 0, never.err
    assert losses(tmp_path / "run") == {
        step: loss for step, loss in losses(tmp_path / "never").items() if step > 40
    }
    assert saved(tmp_path / "run", 60) == saved(tmp_path / "never", 60)


@pytest.mark.slow
def test_a_rollback_has_a_limit(tmp_path):
    outcome = supervised(tmp_path, "180:184,220:224", "--set", "spike_limit=1")
    assert outcome.status == 2, outcome.out
    assert actions(tmp_path) == [("spike", "restart"), ("", "stop")]
    assert "step 56 is spike 2 of this run" in outcome.err
    assert "spike_limit is 1" in outcome.err
    assert [row["action"] for row in rows(tmp_path)] == ["rollback", "end"]


# ---- Parts ---------------------------------------------------------------------------------------


STARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.booleans()), max_size=5)


@given(STARTS, st.integers(0, 60), st.data())
def test_earlier_steps_are_those_that_led_here(tmp_path_factory, starts, done, drawn):
    """Each start goes back by some steps; some of its steps are skipped, or passed over."""
    folder = tmp_path_factory.mktemp("run")
    course: dict[int, tuple[float, float] | None] = {}
    last = 0
    for number, (back, steps, evaluates) in enumerate(starts, 1):
        begin = max(0, last - back)
        last = begin + steps
        lines = []
        for step in range(begin + 1, last + 1):
            kind = drawn.draw(st.sampled_from(["trained", "trained", "skipped", "passed over"]))
            row: dict = {"iteration": step}
            course[step] = None
            if kind == "passed over":
                row["skipped_samples"] = 4
            else:
                row |= {"loss": float(number), "grad_norm": float(step)}
                row["skipped"] = kind == "skipped"
            if kind == "trained":
                course[step] = number, step
            lines.append(row)
            lines += [{"iteration": step, "validation_loss": 1.0}] * evaluates
        course = {step: course[step] for step in range(1, last + 1)}
        text = "\n".join(map(json.dumps, lines))
        (folder / f"metrics.jsonl.{number}").write_text(text)
    expected = [course[step] for step in sorted(course) if step <= min(done, last)]
    found = earlier_steps(str(folder), min(done, last))
    assert found == [pair for pair in expected if pair][-WINDOW:]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.13.mlp.up.weight", "blocks.13"),
        ("embedding.tokens.weight", "embedding"),
        ("head.norm.weight", "head"),
    ],
)
def test_the_layer_of_a_parameter(name, layer):
    assert layer_of(name) == layer


def test_a_sketch_tells_few_tokens_from_many():
    samples = data.Synthetic(64, 16, 1)
    found = sketch(samples, range(8))
    tokens = np.concatenate([samples.sample(k) for k in range(8)])
    assert found["distinct"] == len(set(tokens.tolist()))
    assert 3.5 < found["entropy"] <= math.log(64)
    assert found["sha256"] != sketch(samples, range(1, 9))["sha256"]
