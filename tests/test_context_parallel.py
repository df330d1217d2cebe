"""Context parallelism: if this failed, ranks that share a sample would train another model.

Attention itself is tried with ranks that are threads of this process; the golden cases, the resume
and the samples are of real ranks.
"""

import itertools
import json
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compare import relative_difference
from ranks import mpirun
from test_golden import check_lines
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention import _attend, query_places, recompute
from corpora import attention_masks
from corpora.attention_masks import alibi_slopes, causal_alibi, visible
from distributed.collectives import Group
from distributed.context_parallel import (
    chunk_kernel,
    to_heads,
    to_tokens,
)

# ------------------------------------------------------------------------------------------------
# Attention, with threads as ranks
# ------------------------------------------------------------------------------------------------


class Done:
    """A communication that has ended."""

    def __init__(self, complete: Callable[[], object] = lambda: None):
        self.complete = complete

    def wait(self) -> None:
        self.complete()


class ThreadGroup(Group):
    """A group whose members are threads; `wires` has a queue for every pair of them."""

    def __init__(self, ranks: tuple[int, ...], rank: int, wires: dict):
        super().__init__(ranks, ranks.index(rank))
        self.wires = wires

    def send(self, tensor, to):
        self.wires[self.ranks[self.rank], self.ranks[to]].put(tensor.clone())
        return Done()

    def receive(self, tensor, source):
        wire = self.wires[self.ranks[source], self.ranks[self.rank]]
        return Done(lambda: tensor.copy_(wire.get(timeout=120)))

    def all_to_all(self, output, source):
        for to, block in enumerate(source.chunk(self.size)):
            self.send(block, to)
        return Done(
            lambda: [self.receive(o, j).wait() for j, o in enumerate(output.chunk(self.size))]
        )

    def all_gather(self, output, source):
        return self.all_to_all(output, torch.cat([source] * self.size))

    def reduce_scatter(self, output, source):
        received = torch.empty_like(source)
        handle = self.all_to_all(received, source)

        def add() -> None:
            handle.wait()
            output.copy_(torch.stack(received.chunk(self.size)).sum(0))

        return Done(add)


class Seen(NamedTuple):
    """Token q sees tokens starts[q] to stops[q] - 1, (b, s); slopes: of ALiBi, (a,)."""

    starts: Tensor | None
    stops: Tensor | None
    slopes: Tensor | None


def bias_of(seen: Seen | None, like: Tensor, length: int, group: Group):
    """Return the mask that a stage makes for samples of that length."""
    places = query_places(group, length, like.device)
    if seen is None:
        return None
    if seen.starts is not None and seen.stops is not None:
        return visible(seen.starts, seen.stops, seen.slopes, like.dtype, places)
    return causal_alibi(seen.slopes, like.shape[1], length, like.shape[3], like.dtype, places)


def on_threads(count: int, work: Callable[[int, dict], None]) -> None:
    """work(rank, wires) on so many threads at once; raises what one of them raised."""
    wires = {(a, b): SimpleQueue() for a in range(count) for b in range(count)}
    failed = []

    def run(rank: int) -> None:
        try:
            work(rank, wires)
        except BaseException as error:  # for the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads)


def mixed_by_ranks(qkv, cp: int, over_heads: int, seen: Seen | None) -> tuple[list[Tensor], ...]:
    """Output and gradients of q, k and v (s, b, heads, d), of the whole sample, by cp threads."""
    found = [None] * cp
    whole = Group(tuple(range(cp)))

    def work(rank: int, wires: dict) -> None:
        neighbours = tuple(range(rank - rank % over_heads, rank - rank % over_heads + over_heads))
        heads = ThreadGroup(neighbours, rank, wires)
        kv = ThreadGroup(tuple(range(rank % over_heads, cp, over_heads)), rank, wires)
        share = Group(whole.ranks, rank)
        own = [share.balanced_shard(t, 0).clone().requires_grad_() for t in qkv]
        slopes = None if seen is None or seen.slopes is None else heads.shard(seen.slopes)
        local = None if seen is None else seen._replace(slopes=slopes)
        q, k, v = to_heads(*own, heads)
        mixed = to_tokens(_attend(q, k, v, bias_of(local, q, len(qkv[0]), kv), kv), heads)
        mixed.backward(share.balanced_shard(weights_of(mixed.shape[2], len(qkv[0]), mixed), 0))
        found[rank] = [mixed.detach(), *(t.grad for t in own)]

    on_threads(cp, work)
    # Back in the sample's order.
    places = [
        Group(whole.ranks, rank).balanced_shard(torch.arange(len(qkv[0])), 0) for rank in range(cp)
    ]
    order = torch.cat(places).argsort()
    return tuple(torch.cat(parts)[order] for parts in zip(*found, strict=True))


def weights_of(width: int, length: int, like: Tensor) -> Tensor:
    """Return the weights, (s, b, a d), of the outputs in the sum whose gradients are compared."""
    return torch.randn(
        length, like.shape[1], width, generator=generator(9), dtype=torch.float64
    ).to(like.dtype)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(qkv, seen: Seen | None) -> tuple[Tensor, ...]:
    """Return the expected outputs and gradients, by a matrix of s x s scores in fp64."""
    own = [t.double().requires_grad_() for t in qkv]
    q, k, v = (t.permute(1, 2, 0, 3) for t in own)
    place = torch.arange(q.shape[2])
    starts, stops, slopes = seen or (None, None, None)
    starts = torch.zeros(1, len(place)) if starts is None else starts
    stops = (place + 1)[None] if stops is None else stops
    visible = (place >= starts[..., None]) & (place < stops[..., None])
    bias = torch.zeros(1, len(place), len(place), dtype=torch.float64)
    if slopes is not None:
        bias = -slopes[:, None, None] * (place[:, None] - place).abs()
    bias = bias.masked_fill(~visible[:, None], -torch.inf)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    mixed.backward(weights_of(mixed.shape[2], len(place), mixed))
    return mixed.detach(), *(t.grad for t in own)


def sample(length: int, heads: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(length, 2, count, 8) for count in (heads, groups, groups)]
    return [
        torch.randn(s, generator=generator(i), dtype=torch.float64).to(dtype)
        for i, s in enumerate(shapes)
    ]


ENDS = torch.tensor([[0, 5, 13, 24], [0, 1, 12, 24]])


def documents(length: int, prefix: bool) -> tuple[Tensor, Tensor]:
    """Starts and stops of two samples of three documents; prefix: of which two tokens see more."""
    starts, stops = torch.zeros(2, length, dtype=torch.int64), torch.arange(length).repeat(2, 1) + 1
    for row, ends in enumerate(ENDS * length // 24):
        for begin, end in itertools.pairwise(ends):
            starts[row, begin:end] = begin
            if prefix:
                stops[row, begin:end] = stops[row, begin:end].clamp(min=min(begin + 4, end))
    return starts, stops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cp", "over_heads", "groups"), [(2, 1, 1), (3, 1, 2), (4, 2, 2), (2, 2, 2)]
)
@pytest.mark.parametrize("kind", ["causal", "alibi", "documents", "prefix", "prefix, alibi"])
def test_attention_of_several_ranks_is_that_of_one(dtype, cp, over_heads, groups, kind):
    """Gathering keys, after an all-to-all over heads, and both; masks may hide a rank's keys."""
    length, heads, seen = 24, 4, None
    qkv = sample(length, heads, groups, dtype)
    if kind != "causal":
        slopes = alibi_slopes(heads) if "alibi" in kind else None
        starts, stops = (None, None) if kind == "alibi" else documents(length, "prefix" in kind)
        seen = Seen(starts, stops, slopes)
    found, expected = mixed_by_ranks(qkv, cp, over_heads, seen), plain(qkv, seen)
    limit = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 0.03}[dtype]
    for name, own, wanted in zip(("mixed", "dq", "dk", "dv"), found, expected, strict=True):
        off = (own.double() - wanted).abs().max().item()
        assert off <= limit * wanted.abs().max().item(), name  # which a NaN is not
    assert found[0].dtype == dtype


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation made."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, Tensor):
                Largest.most = max(Largest.most, one.numel())
        return made


def test_gathered_keys_make_no_matrix_of_scores():
    """With 4,096 tokens on 4 ranks there is no s x s matrix, of the sample or of a rank's part."""
    length, cp = 4096, 4
    qkv = [t[:, :1].clone() for t in sample(length, 2, 1, torch.float32)]
    made = []

    def work(rank: int, wires: dict) -> None:
        group = ThreadGroup(tuple(range(cp)), rank, wires)
        own = [group.balanced_shard(t, 0).clone().requires_grad_() for t in qkv]
        with Largest():
            mixed = _attend(*own, None, group)
            mixed.sum().backward()
        made.append(mixed.isfinite().all().item())

    Largest.most = 0
    on_threads(cp, work)
    assert made == [True] * cp
    assert 0 < Largest.most <= 2 * 2 * 8 * length  # keys and values, repeated for each head


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "kernel"),
    [
        ((9, 0), torch.bfloat16, 64, "flash_attention"),
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
    q = SimpleNamespace(is_cuda=True, device="cuda", dtype=dtype, shape=(2, 4, 32, width))
    assert chunk_kernel(q) == kernel


class CountedGroup(ThreadGroup):
    """Notes which operations there are."""

    def __init__(self, *about):
        super().__init__(*about)
        self.calls: list[str] = []

    def all_gather(self, output, source):
        self.calls.append("all_gather")
        return super().all_gather(output, source)

    def reduce_scatter(self, output, source):
        self.calls.append("reduce_scatter")
        return super().reduce_scatter(output, source)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_keys_and_values_are_gathered_at_once_in_their_precision(monkeypatch, masked, again):
    """One collective each way, and one more where attention is recomputed; no fp32 is made of
    bf16, whose products take the tensor cores of a GPU.
    """
    length, cp, types, calls = 24, 2, set(), []
    qkv = sample(length, 4, 1, torch.bfloat16)
    seen = Seen(*documents(length, True), None) if masked else None

    def kept(run: Callable) -> Callable:
        def noted(*about):
            types.update(t.dtype for t in about[:3])
            return run(*about)

        return noted

    for owner, name in (attention_masks, "masked_attention"), (attention, "causal_attention"):
        monkeypatch.setattr(owner, name, kept(getattr(owner, name)))

    def work(rank: int, wires: dict) -> None:
        group = CountedGroup(tuple(range(cp)), rank, wires)
        own = [group.balanced_shard(t, 0).clone().requires_grad_() for t in qkv]
        bias = bias_of(seen, own[0], length, group)
        run = partial(recompute, _attend) if again else _attend
        run(*own, bias, group).sum().backward()
        calls.append(group.calls)

    on_threads(cp, work)
    assert calls == [["all_gather"] * (1 + again) + ["reduce_scatter"]] * cp
    assert types == {torch.bfloat16}


def test_chunks_are_balanced():
    """Together they are the sample, and each rank's queries see as many keys."""
    for cp in (1, 2, 3, 8):
        ranks = tuple(range(cp))
        shares = [Group(ranks, rank).balanced_shard(torch.arange(48), 0) for rank in ranks]
        assert sorted(torch.cat(shares).tolist()) == list(range(48))
        assert len({(share + 1).sum().item() for share in shares}) == 1
        assert all((share.diff() > 0).all() for share in shares)


# ------------------------------------------------------------------------------------------------
# Real ranks: the layout does not change the result
# ------------------------------------------------------------------------------------------------


# By ranks: cp, tp and pp, the rest is dp.
def test_every_layout_with_cp_equals_the_single_rank_run(tmp_path):
    check_lines("context", tmp_path)


def test_a_run_with_cp_goes_on_with_one_rank(tmp_path):
    """From its checkpoint, to the same losses, evaluations and samples."""
    words = "--layers 2 --hidden 32 --heads 4 --kv-heads 1 --seq-length 16 --vocab-size 61 --zero 1"
    words += " --pad-vocab-multiple 4 --precision fp64 --global-batch-size 4 --positions rotary"
    words += " --steps 4 --eval-samples 4 --eval-every 2 --sample-every 2"
    words += " --check-replicas-every 2 --lr 1e-2"
    both = ["train.py", *words.split(), "--sample-prompt", "3 4 5", "--out"]
    before, after = str(tmp_path / "cp"), str(tmp_path / "one")
    saved = f"{before}/checkpoints/step_00000002"
    done = [
        mpirun(2, *both, before, "--cp", "2", "--save-every", "2"),
        mpirun(1, *both, after, "--resume", saved),
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
    samples = [re.findall(r"sample at iteration 4 \| (.*)", outcome.out) for outcome in done]
    assert len(samples[0]) == 1
    assert samples[0] == samples[1]


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
