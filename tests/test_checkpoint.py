"""Checkpoints: if this failed, a run would not go on as it was, under this or another layout.

Same layout: the next 8 steps, of a ramp-up 12, are bitwise those of the run that never stopped.
Another layout: the next 5 losses within 1e-5 relative. Ranks are started four times in total.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkpoint_worker as worker
import h5py
import numpy as np
import pytest
import torch
from checkpoint_worker import build_run, make, save_some
from compare import assert_close, assert_within
from ranks import results_of

import trainer
from checkpointing import file_format, folders, index, save
from checkpointing.index import Index
from checkpointing.load import repeatability
from checkpointing.state import Progress
from config import validation
from config.messages import UserError

GPT = {"positions": "learned"}
LLAMA = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "kv_heads": 4,
    "tied": False,
}
# Batches of 4, from step 9 on of 8, from step 13 on of 12: saved in the middle of the ramp-up.
RAMP = GPT | {"rampup_batch_size": [4, 4, 64], "global_batch_size": 12, "lr_warmup_samples": 50}
MODELS = {"gpt": GPT, "llama": LLAMA, "ramp": RAMP}
# Name of a layout: ranks, options.
LAYOUTS = {
    "1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {"zero": 1}),
    "dp2-zero3": (2, {"zero": 3}),
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2, "zero": 1}),
}
# Steps after the save: fp16's loss scale grows within 4 of them, the ramp-up's batch last at 8.
AFTER = {"gpt": 8, "llama": 8, "ramp": 12}
FEW_LAYOUTS = ("1", "tp2", "tp2-pp2-dp2")  # for the other models
# Resumed under the same layout only.
SAME_ONLY = {
    "bf16": (1, {"precision": "bf16"}),
    "fp64": (1, {"precision": "fp64"}),
    "fp16": (1, {"precision": "fp16", "loss_scale_window": 3}),
    "muon": (1, {"optimizer": "muon"}),
    "dp2-muon": (2, {"optimizer": "muon"}),
    "dp2-adafactor": (2, {"optimizer": "adafactor"}),
    "dp2-8bit": (2, {"optimizer": "adamw8bit"}),
    "pp2-sgd": (2, {"pp": 2, "optimizer": "sgd"}),
    "dp2-zero2-overlap": (2, {"zero": 2, "overlap_param_gather": True}),
    "tp2-fp16": (2, {"tp": 2, "precision": "fp16", "loss_scale_window": 4}),
    "dp2-zero3-bf16": (2, {"zero": 3, "precision": "bf16"}),
    "sync": (1, {"async_save": False}),
    "dp2-zero0": (2, {"zero": 0}),
    "dp2-zero0-bf16": (2, {"zero": 0, "precision": "bf16"}),
    "tp2-bf16": (2, {"tp": 2, "precision": "bf16", "sequence_parallel": True}),
    "dp2-fp64": (2, {"zero": 1, "precision": "fp64"}),
    "tp2-pp2-dp2-bf16": (8, {"tp": 2, "pp": 2, "zero": 1, "precision": "bf16"}),
    "tp2-pp2-dp2-zero0": (8, {"tp": 2, "pp": 2, "zero": 0}),
}


def execute(jobs: dict[tuple, tuple[int, dict]], folder: Path) -> dict[tuple, dict]:
    """Results of jobs, each with its number of ranks; one start of ranks for each such number.

    The starts are made at once, since ranks mostly wait for messages; one rank is this process.
    """
    worlds: dict[int, dict] = {}
    for key, (ranks, job) in jobs.items():
        worlds.setdefault(ranks, {})[key] = job
    alone = worlds.pop(1, {})
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(run_ranks, ranks, own, folder) for ranks, own in worlds.items()]
        results = {}
        for key, job in alone.items():
            config = validation.check(worker.options(job["options"]), 1)
            results[key] = worker.run(config, job["before"], job["after"])
        for start in starts:
            results |= start.result()
    return results


def check_chain(ranks: int, common: dict, layouts: list[dict], folder: Path) -> None:
    """Each layout in turn continues for two steps what the one before it has saved: its steps after
    that are those of one rank that never stopped.
    """
    jobs = {}
    for number, layout in enumerate(layouts):
        places = {"out": str(folder / str(number))}
        places |= {"resume": str(folder / str(number - 1))} if number else {}
        jobs[(number,)] = ranks, {"options": common | layout | places, "before": 2, "after": 2}
    plain = {"options": common | {"out": str(folder / "plain")}}
    plain |= {"before": 0, "after": 2 * len(layouts) + 2}
    ((_, expected),) = execute({("plain",): (1, plain)}, folder).items()
    for (number,), result in execute(jobs, folder).items():
        first = 2 * number + 2
        assert result["progress"]["iteration"] == first
        assert_close(result["numbers"], expected["numbers"][first : first + 2], 1e-10, number)


def run_ranks(ranks: int, jobs: dict[tuple, dict], folder: Path) -> dict[tuple, dict]:
    """Results of jobs in one start of that many ranks."""
    timeout = 2 * (90 + 20 * len(jobs))
    results = results_of("tests/checkpoint_worker.py", ranks, [*jobs.values()], folder, timeout)
    return dict(zip(jobs, results, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs of every layout: 5 steps, a save, AFTER more. Folder, and results by model, name."""
    folder = tmp_path_factory.mktemp("saved")
    jobs = {}
    wanted = [("gpt", name) for name in LAYOUTS | SAME_ONLY]
    wanted += [(model, name) for model in ("llama", "ramp") for name in FEW_LAYOUTS]
    for model, name in wanted:
        ranks, extra = (LAYOUTS | SAME_ONLY)[name]
        out = {"out": str(folder / model / name), "save_every": 5}
        job = {"options": MODELS[model] | extra | out, "before": 5, "after": AFTER[model]}
        jobs[model, name] = (ranks, job)
    return folder, execute(jobs, folder)


@pytest.mark.slow
def test_save_under_each_layout_and_load_under_each_other(saved, tmp_path):
    folder, first = saved
    jobs = {}
    for model, source in first:
        for target, (ranks, extra) in (LAYOUTS | SAME_ONLY).items():
            same = source == target
            if not same and (target in SAME_ONLY or source in SAME_ONLY):
                continue
            if model != "gpt" and target not in FEW_LAYOUTS:
                continue
            own = {"out": str(tmp_path), "resume": str(folder / model / source)}
            job = {"options": MODELS[model] | extra | own, "before": 0}
            job["after"] = AFTER[model] if same else 5
            jobs[model, source, target] = (ranks, job)
    largest, bitwise = 0.0, 0
    for (model, source, target), result in execute(jobs, tmp_path).items():
        expected = first[model, source]["numbers"]
        assert result["progress"]["iteration"] == 5
        losses, norms = zip(*result["numbers"])
        if "fp16" in target:  # the only one that may skip a step
            norms = [norm for norm in norms if norm is not None]
        assert np.isfinite([*losses, *norms]).all(), (model, source, target, result)
        if source == target:
            assert result["numbers"] == expected, (model, source)
            bitwise += 1
            continue
        difference = relative_difference(result["numbers"], expected[:5])
        assert_within(difference, 1e-5, (model, source, target, result, expected))
        largest = max(largest, difference)
    assert bitwise == len(first)
    print(
        f"{bitwise} layouts resumed bitwise over 8 or 12 steps; {len(jobs) - bitwise} loaded "
        f"under another, largest relative difference of 5 losses {largest:.1e}"
    )


def relative_difference(numbers: list, expected: list) -> float:
    """The largest of the losses, the first of each pair; NaN if one of them is NaN."""
    found, wanted = (np.array([loss for loss, _ in pairs]) for pairs in (numbers, expected))
    assert found.shape == wanted.shape
    return np.max(np.abs(found - wanted) / np.abs(wanted))


@pytest.mark.slow
def test_every_element_is_written_once_and_without_padding(saved):
    folder, _ = saved
    wholes = []
    for name in LAYOUTS:
        with h5py.File(folder / "gpt" / name / "checkpoints/step_00000005/index.h5") as index:
            assert index["weights/embedding.tokens.weight"].shape == (61, 32)
            assert index["exp_avg_sq/blocks.1.mlp.down.weight"].shape == (32, 128)
            wholes.append({n: d[...] for n, d in index["weights"].items()})
            elements = sum(d.size for d in index["weights"].values())
        parts = (folder / "gpt" / name / "checkpoints/step_00000005").glob("rank_*.h5")
        stored = 0
        for part in parts:
            with h5py.File(part) as shard:
                assert len({d.size for d in shard.values()}) == 1
                stored += shard["exp_avg"].size
        assert stored == elements
    for whole in wholes:
        assert whole.keys() == wholes[0].keys()
        for name, tensor in whole.items():
            # After 5 steps of 1e-3 each.
            assert_close(tensor, wholes[0][name], 3e-6, name, scale=1.0)


# ------------------------------------------------------------------------------------------------
# One rank
# ------------------------------------------------------------------------------------------------


def check_refused(config, *parts: str) -> None:
    """Resume must fail with one sentence that contains these parts."""
    with pytest.raises(UserError) as caught:
        build_run(config)[1].resume()
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence


def test_attributes_of_the_index(tmp_path):
    folder = save_some(tmp_path)
    with h5py.File(folder / "step_00000001/index.h5") as index:
        assert dict(index["progress"].attrs) == {
            "iteration": 1,
            "consumed_samples": 8,
            "skipped_samples": 0,
        }
        assert index["model"].attrs["hidden"] == 32
        assert index["optimizer"].attrs["kind"] == "adamw"
        assert json.loads(index["run"].attrs["config"])["layout"]["tp"] == 1
        assert json.loads(index["run"].attrs["versions"])["torch"] == torch.__version__
        assert index["data"].attrs["seed"] == 1234


def test_weights_only(tmp_path):
    folder = save_some(tmp_path / "a", save_weights_only=True)
    with h5py.File(folder / "step_00000001/index.h5") as index:
        assert "exp_avg" not in index
        expected = index["weights/blocks.0.mlp.up.weight"][...]
    resume = str(tmp_path / "a")
    check_refused(
        make(tmp_path / "b", resume=resume, seed=5), "only weights", "--load-weights-only"
    )
    config = make(tmp_path / "b", resume=resume, load_weights_only=True, seed=5)
    state, checkpoints = build_run(config)
    own = {p.spec.name: p for p in state.stages.parameters()}["blocks.0.mlp.up.weight"]
    assert not np.array_equal(own.detach().numpy(), expected)
    assert checkpoints.resume() == Progress()
    assert np.array_equal(own.detach().numpy(), expected)


def test_another_model_shows_both_shapes(tmp_path):
    save_some(tmp_path / "a")
    resume = str(tmp_path / "a")
    check_refused(
        make(tmp_path / "b", resume=resume, hidden=64), "hidden 32 against 64", "ffn_hidden 128"
    )
    check_refused(make(tmp_path / "b", resume=resume, layers=3), "layers 2 against 3")
    check_refused(make(tmp_path / "b", resume=resume, seq_length=8), "seq_length 16 against 8")
    bad = make(tmp_path / "b", resume=resume, hidden=64, load_weights_only=True)
    check_refused(bad, "blocks.0.attention.out.bias is (32,) there and (64,) here")


def test_options_that_the_positions_do_not_use_may_differ(tmp_path):
    old = {"positions": "alibi", "rotary_scaling": "linear:2", "max_positions": 8}
    save_some(tmp_path / "a", **old)
    resume = str(tmp_path / "a")
    config = make(tmp_path / "b", resume=resume, positions="alibi", seq_length=8)
    assert build_run(config)[1].resume().iteration == 1
    again = make(tmp_path / "b", resume=resume, **old | {"positions": "rotary"})
    check_refused(again, "positions alibi against rotary")


def test_missing_and_surplus_tensors_are_listed(tmp_path):
    save_some(tmp_path / "a", tied=False)
    config = make(tmp_path / "b", resume=str(tmp_path / "a"), load_weights_only=True, layers=3)
    lines = []
    build_run(config, lines)[1].resume()
    text = " ".join(lines)
    assert "missing there: blocks.2.attention.out.bias, " in text
    assert "not in this model: head.weight;" in text
    # The attributes are right, one tensor is missing: a file of another program.
    index = tmp_path / "a/checkpoints/step_00000001/index.h5"
    with h5py.File(index, "r+") as file:
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            del file[f"{kind}/head.weight"]
    resign(index.parent)
    check_refused(
        make(tmp_path / "c", resume=str(tmp_path / "a"), tied=False),
        "head.weight is missing, its model has (61, 32)",
    )


def resign(folder: Path) -> None:
    """Give a changed checkpoint a manifest that fits it."""
    step = folders.read_manifest(str(folder))["step"]
    names = [n for n in os.listdir(folder) if n.endswith(".h5")]
    folders.write_manifest(
        str(folder), step, {n: file_format.checksum_file(folder / n) for n in names}
    )


def test_another_optimizers_state_is_refused(tmp_path):
    save_some(tmp_path / "a", optimizer="sgd")
    config = make(tmp_path / "b", resume=str(tmp_path / "a"))
    ours = "adamw (exp_avg, exp_avg_sq)"
    check_refused(config, "sgd (momentum_buffer)", ours, "--load-weights-only")


def test_other_precisions_load(tmp_path):
    """The master weights of bf16 and fp64 represent fp32 weights exactly."""
    folder = save_some(tmp_path / "a")
    with Index(str(folder / "step_00000001")) as index:
        expected = index.read_whole("weights", "blocks.1.mlp.down.weight").ravel()
    for precision in ("bf16", "fp64"):
        config = make(tmp_path / "b", resume=str(tmp_path / "a"), precision=precision, seed=9)
        state, checkpoints = build_run(config)
        assert checkpoints.resume().iteration == 1
        shards = [s for s in state.optimizer.owned() if s.spec.name == "blocks.1.mlp.down.weight"]
        assert len(shards) == 1
        loaded = shards[0].read("weights", shards[0].start, shards[0].stop)
        assert np.array_equal(loaded.numpy(), expected)
        weight = {p.spec.name: p for p in state.stages.parameters()}["blocks.1.mlp.down.weight"]
        assert torch.equal(
            weight.data.double().ravel().bfloat16(), torch.tensor(expected).bfloat16()
        )


def test_nothing_to_resume_from(tmp_path):
    lines = []
    assert build_run(make(tmp_path, resume="auto"), lines)[1].resume() == Progress()
    assert "training begins at step 0" in lines[0]
    check_refused(
        make(tmp_path, resume=str(tmp_path / "nowhere")), "nowhere", "not a complete checkpoint"
    )
    (tmp_path / "file").write_text("x")
    check_refused(make(tmp_path, resume=str(tmp_path / "file")), "file")


def test_changed_options_and_data_are_printed(tmp_path):
    lines = []
    config = make(tmp_path / "a")
    state = trainer.build(config)
    samples = worker.data.Synthetic(61, 16, 7)
    mesh, optimizer = state.factory.mesh, state.optimizer
    first = save.Checkpointer(config, mesh, optimizer, None, samples, lines.append)
    first.after_step(Progress(1, 8))
    first.close()
    other = make(tmp_path / "b", resume=str(tmp_path / "a"), lr=5e-4)
    samples = worker.data.Synthetic(61, 16, 8)
    save.Checkpointer(other, mesh, optimizer, None, samples, lines.append).resume()
    assert "samples before 8 are not those" in lines[-2]
    assert "lr 0.001 before, 0.0005 now" in lines[-1]


@pytest.mark.parametrize(("before", "after"), [("adamw8bit", "adamw"), ("adamw", "adamw8bit")])
def test_8_bit_state_loads_as_32_bit_and_back(before, after, tmp_path):
    numbers = {}
    for name in (before, after):
        options = GPT | {"optimizer": before, "out": str(tmp_path / name), "save_every": 5}
        if name == after:
            options |= {"optimizer": after, "resume": str(tmp_path / before)}
        config = validation.check(worker.options(options), 1)
        numbers[name] = worker.run(config, 5 if name == before else 0, 5)["numbers"]
    assert relative_difference(numbers[after], numbers[before]) <= 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_the_shapes_that_are_verified_are_those_of_the_model(name, tmp_path):
    state = trainer.build(make(tmp_path, **MODELS[name], embedding_norm=True))
    built = {spec.name: tuple(spec.shape) for spec in state.optimizer.specs}
    assert index.canonical_shapes(state.config.model) == built


def test_what_a_resumed_run_repeats_is_said_on_gpus():
    """Attention's backward pass on a GPU adds in an order that differs from run to run."""
    assert "need --deterministic" in repeatability("cuda", deterministic=False)
    assert repeatability("cuda", deterministic=True) == ""
    assert repeatability("cpu", deterministic=False) == ""
