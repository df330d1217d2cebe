"""z-loss of the output logits: if this failed, a layout would change its weight.

References: torch.logsumexp, and OLMo-core's definition (the mean of coefficient * (log Z)^2 over
the labels that count).
"""

import json
from dataclasses import replace

import golden_worker
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from test_golden import check_lines
from test_losses import configure, rows
from test_peaks import PeakBytes

import trainer
from config import validation
from config.schema import Layout, Training
from costs import hardware, memory_terms
from costs.job import Job
from distributed.launch import Launch
from distributed.mesh import Mesh
from layers import loss
from layers.loss import cross_entropy
from parallel import ParamSpec

WORDS, PADDED = 100, 112


def by_torch(logits, labels, z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and z-losses of the tokens, (s, b) each, for logits without padding."""
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-1
    )
    z_losses = z_loss * logits.logsumexp(-1).square() * (labels >= 0)
    return losses.view_as(labels), z_losses


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)],
    ids=["fp64", "fp32", "bf16"],
)
@pytest.mark.parametrize("rows_at_once", [1, 100], ids=["chunks", "whole"])
def test_losses_and_gradient_are_those_of_torch(dtype, tolerance, rows_at_once, monkeypatch):
    """With columns of padding, labels that do not count, and other weights of both losses."""
    monkeypatch.setitem(loss.LOGITS_AT_ONCE, "cpu", rows_at_once * 3 * PADDED)
    torch.manual_seed(0)
    labels = torch.randint(WORDS, (7, 3))
    labels[2, 1] = labels[5, 0] = -1
    logits = (5 * torch.randn(7, 3, PADDED)).to(dtype)
    exact = logits[..., :WORDS].double().requires_grad_()
    expected = by_torch(exact, labels, 0.02)
    (0.25 * expected[0] + 0.5 * expected[1]).sum().backward()
    spec = ParamSpec("w", (WORDS, 1), 0, 0, WORDS, True)
    leaf = logits.clone().requires_grad_()
    taken = leaf * 1  # the logits of a head: not a leaf, so its memory may be taken
    losses = cross_entropy(taken, labels, Mesh().tp, spec, z_loss=0.02)
    assert losses.shape == (2, 7, 3)
    (gradient,) = torch.autograd.grad((0.25 * losses[0] + 0.5 * losses[1]).sum(), taken)
    exactness = max(tolerance, 1e-6) if dtype != torch.float64 else tolerance
    for found, wanted in zip(losses, expected, strict=True):
        assert_close(found, wanted.detach(), exactness, scale=wanted.max().item())
    scale = exact.grad.abs().max().item()
    assert_close(gradient[..., :WORDS].double(), exact.grad, tolerance, scale=scale)
    assert not gradient[..., WORDS:].any()
    assert not gradient[labels < 0].any()


def test_the_language_loss_is_that_of_a_run_without_it():
    """To the bit in the first step, whose weights are the same; the steps after it differ."""
    case = {"precision": "fp64", "steps": 3}
    plain = golden_worker.run(validation.check(golden_worker.options(case), 1))
    config = validation.check(golden_worker.options(case | {"z_loss": 0.1}), 1)
    found = golden_worker.run(config)
    assert found["losses"][0] == plain["losses"][0]
    assert found["losses"][2] != plain["losses"][2]
    assert "z_losses" not in plain


@pytest.mark.parametrize(
    "masks",
    [{}, {"eod_token": 3, "vocab_size": 13, "mask_eod_loss": True}, {"objective": "prefix"}],
    ids=["all", "documents", "prefix"],
)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_the_gradient_is_that_of_the_mean_over_the_labels_that_count(masks, micro_batch_size):
    """However many labels a micro-batch has: the sum of both losses over the number of labels."""
    case = {"precision": "fp64", "z_loss": 0.3, "clip_grad": 0.0, "init_std": 0.2} | masks
    case |= {"global_batch_size": 4, "micro_batch_size": micro_batch_size, "steps": 1}
    config = validation.check(golden_worker.options(case), 1)
    state = trainer.build(config)
    samples = trainer.data.build(config).train
    whole = replace(config, layout=replace(config.layout, micro_batch_size=4))
    model = trainer.build_model(whole)  # the same weights, whose gradients autograd keeps
    batch = model.reader.batches(samples, 0, model.timeline)(0)
    model.reader.close()
    (stage,) = model.stages
    states = stage.hidden_states(batch.tokens, batch)
    logits = stage.head.logits(states)[..., : config.model.vocab_size]
    losses = by_torch(logits, batch.labels.t(), 0.3)
    count = (batch.labels >= 0).sum()
    (sum(each.sum() for each in losses) / count).backward()
    norm = sum(p.grad.square().sum() for p in stage.parameters()) ** 0.5
    result = trainer.step(state, samples, 0, 1e-3)
    state.reader.close()
    assert_close(result.grad_norm, norm.item(), 1e-12)
    means = [each.sum() / count for each in losses]
    assert_close([result.loss, result.z_loss], [m.item() for m in means], 1e-12)


@pytest.mark.slow
def test_layouts_equal_the_single_rank_run(tmp_path):
    check_lines("z_loss", tmp_path)


def test_rows_and_lines_have_it_and_evaluations_do_not(tmp_path, capsys):
    words = f"--steps 2 --z-loss 1e-2 --eval-samples 4 --save-every 2 --out {tmp_path}"
    trainer.main(configure(words), Launch("python"))
    steps = [row for row in rows(tmp_path) if "loss" in row]
    assert all(0 < row["z_loss"] < 1 for row in steps)
    printed = capsys.readouterr().out
    assert f"| z-loss {steps[0]['z_loss']:.2E} | grad norm" in printed
    (evaluation,) = [row for row in rows(tmp_path) if "validation_loss" in row]
    assert evaluation["validation_loss"] > 3  # the language loss alone
    assert json.loads((tmp_path / "run.json").read_text())["config"]["training"]["z_loss"] == 1e-2
    trainer.main(configure(f"--steps 1 --out {tmp_path / 'plain'}"), Launch("python"))
    assert "z_loss" not in rows(tmp_path / "plain")[0]
    assert "z-loss" not in capsys.readouterr().out


def test_a_trace_has_the_language_loss(tmp_path):
    """The head's output has both losses: the trace of a run with z-loss has the same row."""
    found = []
    for z_loss in ("0", "1e-2"):
        words = f"--steps 1 --z-loss {z_loss} --trace-numerics 1 --out {tmp_path / z_loss}"
        trainer.main(configure(words), Launch("python"))
        with np.load(tmp_path / z_loss / "numerics" / "step-000001.npz") as file:
            about = json.loads(bytes(file["about"]))
            first = about["activations"].index("loss") * about["bins"]
            found.append(file["values"][first : first + about["bins"]])
    assert found[0].any()
    assert np.array_equal(*found)


def test_the_plan_counts_what_the_head_keeps_for_it():
    """A number of fp32 for each token and head output; the pass itself makes no copy of logits."""
    config = validation.check(golden_worker.options({"vocab_size": 4096, "seq_length": 64}), 1)
    planned, kept, peaks = [], [], []
    parts = memory_terms.Parts(0, False, True, False)
    for z_loss in (0.0, 0.1):
        job = Job(config.model, Layout(dp=1), Training(z_loss=z_loss), hardware.load("a100-80"))
        planned.append(memory_terms.loss_bytes(job, parts, 3.0))
        stage = trainer.build(replace(config, training=replace(config.training, z_loss=z_loss)))
        head = stage.stages[0].head
        x = torch.randn(64, 1, config.model.hidden, requires_grad=True)
        with PeakBytes() as counted:
            losses = head(x, torch.randint(4096, (1, 64)))
            kept.append(sum(counted.live.values()) - losses.nbytes)
            losses.sum().backward()
        peaks.append(counted.peak)
    assert planned[1] - planned[0] == 3 * 4 * 64
    assert kept[1] - kept[0] == 4 * 64
    assert peaks[1] - peaks[0] < 10 * 4 * 64


def test_a_coefficient_below_0_is_refused():
    from base.errors import UserError

    with pytest.raises(UserError, match="z-loss"):
        configure("--steps 1 --z-loss -1e-4")
