"""If this failed, a GPU would compute other results than the CPU; skipped where there is none.

With --rehearse-cuda the tests themselves run, the CPU in the place of the GPU.
"""

import json

import pytest

pytest.importorskip("h5py", reason="Trine's checkpoints need h5py, which is not installed here")

import golden_worker
import torch
from compare import assert_close
from ranks import start_ranks
from test_golden import POSITIONS

import data
import trainer
from config import validation
from config.optimizers import OPTIMIZERS
from distributed.collectives import Group
from distributed.context import start as start_cluster
from distributed.context_parallel import causal_attention
from distributed.launch import Launch
from parallel import draw_normal
from tools.numerics import diff
from watchdog import flight_recorder
from watchdog.flight_recorder import FlightRecorder

pytestmark = pytest.mark.cuda
KINDS = list(POSITIONS.values())
SMALL = "--layers 2 --hidden 64 --heads 4 --seq-length 32 --vocab-size 256 --steps 5"


def losses(options: dict, device: str) -> list[float]:
    """Loss of ten steps of a small model, one rank, on that device."""
    options = {"hidden": 128, "seq_length": 64, "vocab_size": 500} | options
    options |= {"device": device, "watchdog": False}  # its monitor would end this process
    config = validation.check(golden_worker.options(options), 1)
    context = start_cluster(Launch("python"), config.run)
    pieces = trainer.build(config, context)
    samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 1)
    return [trainer.step(pieces, samples, 8 * i, 1e-3).loss for i in range(10)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 1e-2)]
)
def test_the_gpu_computes_what_the_cpu_does(cuda_device, kind, precision, tolerance):
    """16 bits on the GPU are compared with fp32 on the CPU."""
    exact = "fp32" if precision in ("bf16", "fp16") else precision
    ours = losses(kind | {"precision": precision}, cuda_device)
    theirs = losses(kind | {"precision": exact}, "cpu")
    assert_close(ours, theirs, tolerance, kind)


def test_many_small_experts_on_the_gpu(cuda_device):
    """Their products are one kernel in bf16, and one for each expert on the CPU."""
    options = {"experts": 32, "experts_per_token": 4, "bias": False, "activation": "swiglu"}
    ours = losses(options | {"precision": "bf16"}, cuda_device)
    assert_close(ours, losses(options | {"precision": "fp32"}, "cpu"), 2e-2)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_on_the_gpu(cuda_device, recompute):
    plain = losses({"precision": "bf16"}, cuda_device)
    again = losses({"precision": "bf16", "recompute": recompute}, cuda_device)
    assert_close(again, plain, 1e-6)


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {"adamw"}))
def test_the_other_update_rules_on_the_gpu(cuda_device, optimizer):
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    options = {"optimizer": optimizer, "hidden": 256}
    on_cpu = options
    if optimizer == "apex":
        pytest.importorskip("apex.optimizers", reason="needs NVIDIA's apex, built for this GPU")
        on_cpu = options | {"optimizer": "adamw"}
    assert_close(losses(options, cuda_device), losses(on_cpu, "cpu"), 1e-2)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 4e-2)],
)
def test_a_share_of_the_tokens_on_the_gpu(cuda_device, dtype, tolerance, width, groups):
    """Over all keys of three ranks, and its gradients: flash attention's causal mask must be that
    of the last tokens, which fp64 on the CPU has by two kernels.
    """
    torch.manual_seed(1)
    drawn = [torch.randn(2, heads, 96, width) for heads in (4, groups, groups)]
    for rank in range(3):
        group, found = Group((0, 1, 2), rank), []
        for device, precision in ((cuda_device, dtype), ("cpu", torch.float64)):
            q, k, v = (t.to(device, precision, copy=True).requires_grad_() for t in drawn)
            mixed = causal_attention(group.balanced_shard(q, 2), k, v, group)
            mixed.square().sum().backward()
            found.append([mixed, *(t.grad for t in (q, k, v))])
        for own, expected in zip(*found, strict=True):
            off = (own.double().cpu() - expected).abs().max() / expected.abs().max()
            assert off.item() <= tolerance


def test_weights_do_not_depend_on_the_device(cuda_device):
    devices = (cuda_device, "cpu")
    ours, theirs = (torch.empty(64, 48, dtype=torch.float64, device=d) for d in devices)
    for out in (ours, theirs):
        draw_normal(out, "w", (64, 48), 0, 0, 1.0, 7)
    assert_close(ours.cpu(), theirs, 1e-12, scale=1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replicas_on_the_gpu_are_equal_in_audits(cuda_device, tmp_path, precision):
    words = f"{SMALL} --device {cuda_device} --precision {precision} --audit-every 1"
    words += f" --out {tmp_path}"
    outcome = start_ranks(2, "train.py", *words.split(), timeout=120, TRINE_TEST_SHARE_GPU="1")
    assert outcome.status == 0, outcome.err
    rows = map(json.loads, (tmp_path / "audits.jsonl").read_text().splitlines())
    audits = [row for row in rows if "finding" in row]
    assert [row["finding"] for row in audits] == [""] * 5
    assert min(row["results"] for row in audits) > 30


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_diff_accuses_no_gpu(cuda_device, tmp_path, precision):
    """Rounding explains how the traces of the GPU and of the CPU differ."""
    for name, device in (("here", cuda_device), ("cpu", "cpu")):
        words = f"{SMALL} --device {device} --precision {precision} --trace-numerics 1 3"
        outcome = start_ranks(1, "train.py", *words.split(), "--out", str(tmp_path / name))
        assert outcome.status == 0, outcome.err
    found = diff.compare(tmp_path / "here", tmp_path / "cpu")
    assert found["traces"] == ["step-000001.npz", "step-000003.npz"]
    assert not found["differs"], diff.text(found)


def test_the_table_of_stages_has_allocated_bytes(cuda_device, tmp_path):
    words = f"{SMALL} --device {cuda_device} --out {tmp_path}"
    if cuda_device != "cuda":
        pytest.skip("a rehearsal on the CPU: it has no allocator to record")
    outcome = start_ranks(1, "train.py", *words.split(), timeout=120)
    assert outcome.status == 0, outcome.err
    by_part = "reserved: by torch's allocator); by part: python plan.py stages"
    assert f"peak memory of a rank, MB (allocated; {by_part}" in outcome.out


def test_waits_of_a_stream_are_timed_and_seen(cuda_device, monkeypatch):
    """The host continues while the stream waits; the recorder knows that the device still waits."""
    monkeypatch.setattr(flight_recorder, "SECONDS_TO_ASK", 0.0)  # the device, in each snapshot
    if cuda_device != "cuda":
        pytest.skip("a rehearsal on the CPU: it has no streams")
    recorder = FlightRecorder(torch.cuda.Event)
    torch.cuda.synchronize()

    def stamp():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    class Work:
        def wait(self):
            torch.cuda._sleep(2_000_000_000)  # cycles: a second

    recorder.keep_spans(stamp)
    recorder.begin_step(1)
    operation = recorder.group_log("dp", (0, 1)).enter("all_reduce", 4).under_way(Work())
    operation.wait()
    assert recorder.stream.not_passed() is operation
    assert recorder.snapshot(1)["wait"]["number"] == 1
    torch.cuda.synchronize()
    assert recorder.stream.not_passed() is None
    assert recorder.take_waited() > 0.01  # whatever the clock rate, the cycles take longer


# The last ones, for each kind of mask is compiled: if the time ends, all others are done.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("precision", "recompute", "tolerance"),
    [("fp32", "none", 1e-4), ("bf16", "selective", 2e-2), ("bf16", "full", 2e-2)],
)
def test_masks_on_the_gpu(cuda_device, kind, precision, tolerance, recompute):
    """flex_attention against the mask written out; a prefix in each document."""
    masks = {"objective": "prefix", "reset_attention": True, "eod_token": 3, "vocab_size": 40}
    masks |= {"mask_eod_loss": True, "reset_positions": kind["positions"] != "alibi"}
    masks |= {"seq_length": 140} | kind
    ours = losses(masks | {"precision": precision, "recompute": recompute}, cuda_device)
    assert_close(ours, losses(masks, "cpu"), tolerance, kind)
