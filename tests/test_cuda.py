"""The same results on a GPU as on the CPU; skipped where there is none (scripts/gpu_check.sh)."""

import json
import sys

import golden_worker
import pytest
import torch
from ranks import start

import config as configuration
import data
import train
from cluster import Launch
from cluster import start as start_cluster
from parallel import draw_normal

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
KINDS = [
    {"positions": "learned"},
    {"positions": "alibi", "embedding_norm": True},
    {
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "kv_heads": 4,
    },
]


def losses(options: dict, device: str) -> list[float]:
    """Loss of ten steps of a small model, one rank, on that device."""
    options = {"hidden": 128, "seq_length": 64, "vocab_size": 500} | options | {"device": device}
    config = configuration.check(golden_worker.options(options), 1)
    cluster = start_cluster(Launch("python"), config.run)
    pieces = train.build(config, cluster)
    samples = data.Synthetic(500, 64, 1)
    return [train.step(pieces, samples, 8 * i, 1e-3).loss for i in range(10)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4), ("bf16", 2e-2)]
)
def test_the_gpu_computes_what_the_cpu_does(kind, precision, tolerance):
    """bf16 on the GPU is held against fp32 on the CPU."""
    exact = "fp32" if precision == "bf16" else precision
    ours = losses(kind | {"precision": precision}, "cuda")
    theirs = losses(kind | {"precision": exact}, "cpu")
    assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_on_the_gpu(recompute):
    plain = losses({"precision": "bf16"}, "cuda")
    assert losses({"precision": "bf16", "recompute": recompute}, "cuda") == pytest.approx(plain)


def test_weights_do_not_depend_on_the_device():
    shape = (64, 48)
    ours, theirs = (
        draw_normal("w", shape, 0, 0, 64, 1.0, 7, device).cpu() for device in ("cuda", "cpu")
    )
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["--tp 2", "--tp 2 --sequence-parallel", "--pp 2", "--zero 1"])
def test_two_ranks_share_one_gpu_over_gloo(tmp_path, layout):
    words = "--layers 2 --hidden 64 --heads 4 --seq-length 32 --vocab-size 256 --steps 5"
    rows = {}
    for name, launcher, more in (
        ("one", [], ""),
        ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], layout),
    ):
        command = [sys.executable, *launcher, "train.py", *words.split(), *more.split()]
        device = ["--device", "cuda", "--backend", "gloo", "--out", str(tmp_path / name)]
        outcome = start([*command, *device], timeout=120)
        assert outcome.status == 0, outcome.err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line)["loss"] for line in lines]
    assert rows["two"] == pytest.approx(rows["one"], rel=1e-4)
