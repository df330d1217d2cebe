"""Checkpoints: if this failed, a run would not go on as it was, under this or another layout.

Same layout: the next 8 steps, of a ramp-up 12, are bitwise those of the run that never stopped.
Another layout: the next 5 losses within 1e-5 relative. Ranks are started four times in total.
"""

import itertools
import json
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
from base.errors import UserError
from checkpointing import save
from checkpointing.index import Index
from checkpointing.load import repeatability
from checkpointing.state import Progress
from config import validation
from config.optimizers import OPTIMIZERS

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
    "fp16": (1, {"precision": "fp16"}),
    # adamw is that of the others; apex needs a GPU.
    **{f"dp2-{o}": (2, {"optimizer": o}) for o in OPTIMIZERS if o not in ("adamw", "apex")},
    "dp2-zero2-overlap": (2, {"zero": 2, "overlap_param_gather": True}),
    "tp2-fp16": (2, {"tp": 2, "precision": "fp16"}),
    "dp2-zero3-bf16": (2, {"zero": 3, "precision": "bf16"}),
    "sync": (1, {"async_save": False}),
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


def pairs_of(model: str) -> list[tuple[str, str]]:
    """Layouts that save and that load: the same; one rank's and another; one and the next."""
    names = list(LAYOUTS) if model == "gpt" else list(FEW_LAYOUTS)
    pairs = {pair for name in names for pair in ((name, name), (name, "1"), ("1", name))}
    pairs |= {*itertools.pairwise([*names, names[0]])}
    return sorted(pairs | ({(name, name) for name in SAME_ONLY} if model == "gpt" else set()))


@pytest.mark.slow
def test_what_each_layout_saves_each_other_loads(saved, tmp_path):
    """A checkpoint knows no layout, so each saves and loads for one rank, and for the next."""
    folder, first = saved
    jobs = {}
    for model in MODELS:
        for source, target in pairs_of(model):
            ranks, extra = (LAYOUTS | SAME_ONLY)[target]
            own = {"out": str(tmp_path), "resume": str(folder / model / source)}
            job = {"options": MODELS[model] | extra | own, "before": 0}
            job["after"] = AFTER[model] if source == target else 5
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
    for name in LAYOUTS:
        step = folder / "gpt" / name / "checkpoints/step_00000005"
        with h5py.File(step / "index.h5") as index:
            assert index["weights/embedding.tokens.weight"].shape == (61, 32)
            assert index["exp_avg_sq/blocks.1.mlp.down.weight"].shape == (32, 128)
            elements = sum(d.size for d in index["weights"].values())
        stored = 0
        for part in step.glob("rank_*.h5"):
            with h5py.File(part) as shard:
                assert len({d.size for d in shard.values()}) == 1
                stored += shard["exp_avg"].size
        assert stored == elements


# ------------------------------------------------------------------------------------------------
# One rank
# ------------------------------------------------------------------------------------------------


def test_attributes_of_the_index(tmp_path):
    folder = save_some(tmp_path)
    with h5py.File(folder / "step_00000001/index.h5") as index:
        progress = {"iteration": 1, "consumed_samples": 8, "skipped_samples": 0}
        assert dict(index["progress"].attrs) == progress
        assert index["model"].attrs["hidden"] == 32
        assert index["optimizer"].attrs["kind"] == "adamw"
        assert json.loads(index["run"].attrs["config"])["layout"]["tp"] == 1
        assert json.loads(index["run"].attrs["versions"])["torch"] == torch.__version__
        assert index["data"].attrs["seed"] == 1234


ALIBI = {"positions": "alibi", "rotary_scaling": "linear:2", "max_positions": 8}


@pytest.mark.parametrize(
    ("saved", "changes", "parts"),
    [
        ({"save_weights_only": True}, {}, ("only weights", "--load-weights-only")),
        ({}, {"hidden": 64}, ("hidden 32 against 64", "ffn_hidden 128")),
        ({}, {"layers": 3}, ("layers 2 against 3",)),
        (
            {},
            {"hidden": 64, "load_weights_only": True},
            ("blocks.0.attention.out.bias is (32,) there and (64,) here",),
        ),
        (ALIBI, {"positions": "rotary"}, ("positions alibi against rotary",)),
        (
            {"optimizer": "sgd"},
            {"optimizer": "adamw"},
            ("sgd (momentum_buffer)", "adamw (exp_avg, exp_avg_sq)", "--load-weights-only"),
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(saved, changes, parts, tmp_path):
    save_some(tmp_path / "a", **saved)
    config = make(tmp_path / "b", resume=str(tmp_path / "a"), **saved | changes)
    with pytest.raises(UserError) as caught:
        build_run(config)[1].resume()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert [part for part in parts if part not in sentence] == []


def test_options_that_the_positions_do_not_use_may_differ(tmp_path):
    save_some(tmp_path / "a", **ALIBI)
    config = make(tmp_path / "b", resume=str(tmp_path / "a"), positions="alibi", seq_length=8)
    assert build_run(config)[1].resume().iteration == 1


@pytest.mark.parametrize(
    "options", [{"load_weights_only": True}, {"precision": "bf16"}, {"precision": "fp64"}]
)
def test_weights_are_loaded_in_every_precision(options, tmp_path):
    """The master weights of bf16 and fp64 represent fp32 weights exactly."""
    name, weights_only = "blocks.1.mlp.down.weight", "load_weights_only" in options
    folder = save_some(tmp_path / "a", save_weights_only=weights_only)
    with Index(str(folder / "step_00000001")) as index:
        expected = torch.from_numpy(index.read_whole("weights", name).ravel())
    config = make(tmp_path / "b", resume=str(tmp_path / "a"), seed=9, **options)
    state, checkpoints = build_run(config)
    assert checkpoints.resume().iteration == (0 if weights_only else 1)
    (shard,) = [s for s in state.optimizer.owned() if s.spec.name == name]
    assert torch.equal(shard.read("weights", shard.start, shard.stop).float(), expected)
    (weight,) = [p.data for p in state.stages.parameters() if p.spec.name == name]
    assert torch.equal(weight.bfloat16().ravel(), expected.bfloat16())


def test_missing_and_surplus_tensors_are_listed(tmp_path):
    save_some(tmp_path / "a", tied=False)
    config = make(tmp_path / "b", resume=str(tmp_path / "a"), load_weights_only=True, layers=3)
    lines = []
    build_run(config, lines)[1].resume()
    text = " ".join(lines)
    assert "missing there: blocks.2.attention.out.bias, " in text
    assert "not in this model: head.weight;" in text


def test_changed_options_and_data_are_printed(tmp_path):
    lines = []
    for name, seed, extra in (("a", 7, {}), ("b", 8, {"resume": str(tmp_path / "a"), "lr": 5e-4})):
        config = make(tmp_path / name, **extra)
        state, samples = trainer.build(config), worker.data.Synthetic(61, 16, seed)
        mesh, optimizer = state.factory.mesh, state.optimizer
        run = save.Checkpointer(config, mesh, optimizer, None, samples, lines.append)
        run.resume()
        run.after_step(Progress(1, 8))
        run.close()
    assert any("samples before 8 are not those" in line for line in lines)
    assert any("lr 0.001 before, 0.0005 now" in line for line in lines)


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


def test_what_a_resumed_run_repeats_is_said_on_gpus():
    """Attention's backward pass on a GPU adds in an order that differs from run to run."""
    assert "need --deterministic" in repeatability("cuda", deterministic=False)
    assert repeatability("cuda", deterministic=True) == ""
    assert repeatability("cpu", deterministic=False) == ""
