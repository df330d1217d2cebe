"""--stats-every: the same numbers under every layout, and what they are."""

import json
import math

import golden_worker
import pytest
import ranks
import sample_worker
import torch
from compare import assert_close

import data
import trainer
from config import validation
from telemetry.layer_stats import FIELDS, LayerStats

ROTARY = {"positions": "rotary", "tied": False}
STD = 0.2  # so that samples are of different tokens
CASES = [
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "sequence_parallel": True, "zero": 0},
    {"tp": 2, "zero": 2},
    {"zero": 1, "overlap_param_gather": True},
    {"zero": 3},
    {"pp": 2, "schedule": "zb-v", "recompute": "full", "zero": 2},
    {"pp": 4, "vocab_pp": True, "partition": "1,0,1,0"},
    ROTARY | {"tp": 2, "pp": 2, "clip_grad": 0.1},
    {"pp": 2, "precision": "bf16"},
]


def one_rank(case: dict) -> list[dict]:
    """The rows of one rank, in this process."""
    options = {"positions": case.get("positions", "learned"), "tied": case.get("tied", True)}
    options |= {name: case[name] for name in ("clip_grad", "precision") if name in case}
    options |= {"init_std": STD}
    config = golden_worker.options(options | {"stats_every": 2})
    return sample_worker.layer_rows(validation.check(config, 1))


def test_no_layout_changes_the_statistics_of_a_layer(tmp_path):
    source, target = tmp_path / "jobs.json", tmp_path / "results.json"
    source.write_text(json.dumps([{"stats": case | {"init_std": STD}} for case in CASES]))
    done = ranks.fork_ranks(4, "tests/sample_worker.py", str(source), str(target))
    assert done.status == 0, done.err[-4000:]
    for case, found in zip(CASES, json.loads(target.read_text()), strict=True):
        expected = one_rank(case)
        plain = {"grad_norm"} if "vocab_pp" in case else {"grad_norm", "sample"}
        assert [set(row) for row in found] == [plain, {*FIELDS, *plain}, plain]
        tolerance = 5e-2 if case.get("precision") == "bf16" else 2e-5
        for ours, theirs in zip(found, expected):
            assert_close(ours["grad_norm"], theirs["grad_norm"], tolerance, case)
            if tolerance < 1e-3 and "sample" in plain:
                assert ours["sample"] == theirs["sample"]
                assert len(ours["sample"]) == 12
        for field in FIELDS:
            ours, theirs = found[1][field], expected[1][field]
            assert list(ours) == ["embedding", "blocks.0", "blocks.1", "head"] == list(theirs)
            for layer, value in theirs.items():
                assert value > 0
                assert_close(ours[layer], value, tolerance, (case, field, layer))
        total = math.sqrt(sum(norm**2 for norm in found[1]["layer_grad_norm"].values()))
        assert_close(total, found[1]["grad_norm"], 1e-6, case)


def test_the_statistics_are_those_of_the_tensors():
    """Of one rank and one micro-batch, against its own tensors."""
    config = golden_worker.options({"stats_every": 2, "micro_batch_size": 8})
    config = validation.check(config, 1)
    splits, state = data.build(config), trainer.build(config)
    stats = LayerStats(config, state.stages, state.optimizer, state.factory.mesh)
    stats.begin(1)
    assert stats.finish() == {}
    block, seen = state.stages[0].blocks[1], []
    block.register_forward_hook(lambda module, x, y: seen.append(y.abs().max().item()))
    stats.begin(2)
    trainer.step(state, splits.train, 0, 1e-3)
    row = stats.finish()
    state.reader.close()
    assert [row["layer_activation_max"]["blocks.1"]] == seen
    weights = torch.cat([p.detach().flatten() for p in block.parameters()])
    assert row["layer_weight_norm"]["blocks.1"] == pytest.approx(weights.norm().item(), rel=1e-6)
    assert state.optimizer.before_update is None
