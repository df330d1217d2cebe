"""Context parallelism: if this failed, ranks that share a sample would train another model."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compare import relative_difference
from ranks import fork_ranks
from test_golden import check_lines
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import context_parallel
from distributed.collectives import Group
from distributed.context_parallel import chunk_kernel
from layers import attention, attention_masks
from layers.attention import attend, query_places
from layers.attention_masks import range_mask
from parallel import recompute

# ------------------------------------------------------------------------------------------------
# Attention of one rank, beside others that send what it does
# ------------------------------------------------------------------------------------------------


class OneRank(Group):
    """The last rank of a group; `calls` are its collectives."""

    def __init__(self, size: int):
        super().__init__(tuple(range(size)), size - 1)
        self.calls: list[str] = []

    def all_gather(self, output, source):
        self.calls.append("all_gather")
        output.copy_(torch.cat([source] * self.size))
        return SimpleNamespace(wait=lambda: None)

    def reduce_scatter(self, output, source):
        self.calls.append("reduce_scatter")
        output.copy_(self.size * self.shard(source))
        return SimpleNamespace(wait=lambda: None)

    def share(self, length: int, heads: int, dtype: torch.dtype) -> list[Tensor]:
        """This rank's queries of so many heads, and keys and values of one, of random tokens."""
        whole = [torch.randn(length, 2, count, 8, dtype=dtype) for count in (heads, 1, 1)]
        return [self.balanced_shard(t, 0).clone().requires_grad_() for t in whole]


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation made."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, Tensor):
                self.most = max(self.most, one.numel())
        return made


def test_gathered_keys_make_no_matrix_of_scores():
    """With 4,096 tokens on 4 ranks there is no s x s matrix, of the sample or of a rank's part."""
    length, group = 4096, OneRank(4)
    own = group.share(length, 2, torch.float32)
    with Largest() as largest:
        mixed = attend(*own, None, group)
        mixed.sum().backward()
    assert mixed.isfinite().all()
    assert 0 < largest.most <= 2 * 2 * 2 * 8 * length  # keys and values, repeated for each head


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "kernel"),
    [
        ((9, 0), torch.bfloat16, 64, "cudnn_attention"),
        ((9, 0), torch.float16, 128, "cudnn_attention"),
        ((9, 0), torch.bfloat16, 256, "cudnn_attention"),
        ((9, 0), torch.bfloat16, 264, "efficient_attention"),
        ((9, 4), torch.bfloat16, 128, "flash_attention"),
        ((10, 0), torch.bfloat16, 128, "flash_attention"),
        ((8, 0), torch.float16, 256, "flash_attention"),
        ((7, 5), torch.float16, 64, "efficient_attention"),
        ((7, 0), torch.float16, 64, "efficient_attention"),
        ((9, 0), torch.bfloat16, 12, "flash_attention"),
        ((9, 0), torch.float32, 64, "efficient_attention"),
        ((9, 0), torch.float64, 64, "math"),
    ],
)
def test_gathered_keys_take_flash_where_it_runs(monkeypatch, capability, dtype, width, kernel):
    """Before Ampere torch has another kernel, in which each head needs a key of its own."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    q = SimpleNamespace(is_cuda=True, device="cuda", dtype=dtype, shape=(2, 4, 32, width))
    assert chunk_kernel(q) == kernel


def test_wide_heads_take_flash_with_an_older_cudnn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for version, kernel in ((90800, "flash_attention"), (91000, "cudnn_attention")):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda found=version: found)
        q = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.bfloat16, shape=(2, 4, 8, 256))
        assert chunk_kernel(q) == kernel


def test_an_amd_gpu_has_no_cudnn(monkeypatch):
    """An MI250X says (9, 0), as an H100 does, and MIOpen says that cuDNN is there."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3005000)
    q = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.bfloat16, shape=(2, 4, 32, 64))
    assert chunk_kernel(q) == "flash_attention"


def test_without_cudnn_hopper_takes_flash_attention(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.bfloat16, shape=(2, 4, 32, 64))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert chunk_kernel(q) == "flash_attention"
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert chunk_kernel(q) == "flash_attention"


def like_cudnn(monkeypatch) -> list[str]:
    """cuDNN's operations with their arguments and shapes, computed by torch's CPU kernels."""
    aten, calls = torch.ops.aten, []
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def run(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal):
        assert attn_bias is None
        assert compute_log_sumexp
        calls.append("forward")
        mixed, sums = forward(query, key, value, dropout_p, is_causal)
        lengths = query.shape[2], key.shape[2]
        return mixed, sums[..., None], None, None, *lengths, None, None, None

    def run_backward(grad, q, k, v, out, logsumexp, seed, offset, bias, *rest):
        starts, starts_of_keys, most, most_keys, dropout_p, is_causal = rest
        assert (bias, starts, starts_of_keys) == (None, None, None)
        assert (most, most_keys) == (q.shape[2], k.shape[2])
        assert logsumexp.shape == (*q.shape[:3], 1)
        calls.append("backward")
        return backward(grad, q, k, v, out, logsumexp[..., 0], dropout_p, is_causal)

    names = [f"_scaled_dot_product_cudnn_attention{end}" for end in ("", "_backward")]
    ops = SimpleNamespace(**dict(zip(names, (run, run_backward))))
    monkeypatch.setattr(context_parallel.torch.ops, "aten", ops)
    return calls


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("before", [1, 8, 24])
def test_two_calls_of_cudnn_are_attention_with_a_mask(monkeypatch, before, heads):
    own = 8
    shapes = (2, heads, own, 16), (2, heads, before + own, 16), (2, heads, before + own, 16)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = torch.ones(own, before + own, dtype=torch.bool).tril(before)
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, weights)
    with monkeypatch.context() as patch:
        calls = like_cudnn(patch)
        mixed = context_parallel.attend_in_two_calls(*tensors, context_parallel.CUDNN)
        found = torch.autograd.grad(mixed, tensors, weights)
    assert calls == ["forward"] * 2 + ["backward"] * 2
    plain = context_parallel.attend_in_two_calls(*tensors, context_parallel.CPU_FLASH)
    for one, other in zip((mixed, *found), (expected, *wanted), strict=True):
        assert relative_difference(one, other, other.abs().max().item()) < 1e-12
    assert torch.equal(mixed, plain)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_keys_and_values_are_gathered_at_once_in_their_precision(monkeypatch, masked, again):
    """One collective each way, and one more where attention is recomputed; no fp32 is made of
    bf16, whose products take the tensor cores of a GPU.
    """
    length, group, types = 24, OneRank(2), set()
    own = group.share(length, 4, torch.bfloat16)
    bias = None
    if masked:
        starts, stops = torch.zeros(2, length, dtype=torch.int64), torch.arange(length) + 1
        places = query_places(group, length, own[0].device)
        bias = range_mask(starts, stops.repeat(2, 1), None, torch.bfloat16, places)

    def noting(run):
        def noted(*values):
            types.update(t.dtype for t in values[:3])
            return run(*values)

        return noted

    for owner, name in (attention_masks, "masked_attention"), (attention, "causal_attention"):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    run = partial(recompute, attend) if again else attend
    run(*own, bias, group).sum().backward()
    assert group.calls == ["all_gather"] * (1 + again) + ["reduce_scatter"]
    assert types == {torch.bfloat16}


# ------------------------------------------------------------------------------------------------
# Real ranks: the layout does not change the result
# ------------------------------------------------------------------------------------------------


# By ranks: cp, tp and pp, the rest is dp.
@pytest.mark.slow
def test_every_layout_with_cp_equals_the_single_rank_run(tmp_path):
    check_lines("context", tmp_path)


def test_a_run_with_cp_goes_on_with_one_rank(tmp_path):
    """From its checkpoint, to the same losses, evaluations and samples."""
    words = "--layers 2 --hidden 32 --heads 4 --kv-heads 1 --seq-length 16 --vocab-size 61 --zero 1"
    words += " --set pad_vocab_multiple=4 --precision fp64 --global-batch-size 4 --positions rotary"
    words += " --steps 4 --eval-samples 4 --eval-every 2 --sample-every 2 --sample-temperature 2"
    words += " --check-replicas-every 2 --lr 1e-2"
    both = ["train.py", *words.split(), "--sample-prompt", "3 4 5", "--out"]
    before, after = str(tmp_path / "cp"), str(tmp_path / "one")
    saved = f"{before}/checkpoints/step_00000002"
    done = [
        fork_ranks(2, *both, before, "--cp", "2", "--save-every", "2"),
        fork_ranks(1, *both, after, "--resume", saved),
    ]
    assert [outcome.status for outcome in done] == [0, 0], done
    assert "tp 1 x pp 1 x cp 2 x dp 1" in done[0].out
    assert (
        "attention: torch scaled_dot_product_attention, flash_attention, keys of 2 ranks"
        in done[0].out
    )
    assert json.loads(Path(before, "run.json").read_text())["config"]["layout"]["cp"] == 2
    rows, rest = facts_of(before), facts_of(after)
    assert len(rows) == 4 + 2 + 1  # steps, evaluations, the test split
    assert len(rest) == 2 + 1 + 1
    for key, facts in rest.items():
        assert relative_difference(facts, rows[key]) <= 1e-10, (key, facts, rows[key])
    samples = [re.findall(r"sample at step 4 \| (.*)", outcome.out) for outcome in done]
    assert len(samples[0]) == 1
    assert samples[0] == samples[1]  # drawn at a temperature, by the same seed
    drawn = json.loads(samples[0][0].partition(" -> ")[2].replace("'", '"')).split()
    assert len(set(drawn)) > 5


def facts_of(folder: str) -> dict[tuple, list[float]]:
    """The numbers of a run that no layout may change, by step and kind of row."""
    found = {}
    names = ("consumed_tokens", "loss", "grad_norm", "validation_loss", "test_loss")
    for line in Path(folder, "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        facts = {name: row[name] for name in names if name in row}
        assert len(facts) > 1
        found[row["iteration"], *facts] = list(facts.values())
    return found
