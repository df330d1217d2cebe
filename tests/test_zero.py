"""The optimizer: if this failed, an update would not be that of torch's own."""

import gc
import weakref

import golden_worker
import pytest
import torch
from compare import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import data
import parallel
import trainer
import zero
from config import schema as configuration
from config import validation
from config.timeline import Timeline
from distributed.mesh import Mesh
from model import Stage
from optim import buckets
from parallel import ParamFactory
from telemetry import replica_check


def build(**options) -> trainer.TrainState:
    return trainer.build(validation.check(golden_worker.options(options), 1))


def copy_of(stage) -> dict[str, torch.Tensor]:
    return {p.spec.name: p.detach().clone().requires_grad_() for p in stage.parameters()}


def test_a_hundred_steps_equal_torch_adamw_with_clipping(monkeypatch):
    """Same gradients in, same weights out: decay groups, clipping, bias correction, rate."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 5000)  # several buckets
    run = build(precision="fp64", weight_decay=0.1, clip_grad=0.5)
    assert len(run.optimizer.buckets) > 3
    theirs = copy_of(run.stages)
    specs = {p.spec.name: p.spec for p in run.stages.parameters()}
    groups = [
        {"params": [p for n, p in theirs.items() if specs[n].decay], "weight_decay": 0.1},
        {"params": [p for n, p in theirs.items() if not specs[n].decay], "weight_decay": 0.0},
    ]
    eps = golden_worker.ADAM_EPS
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=eps, foreach=False)
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        for p in run.stages.parameters():
            gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 10 ** (
                step % 3 - 2
            )
            p.main_grad.copy_(gradient)
            theirs[p.spec.name].grad = gradient.clone()
        lr = 1e-3 * (1 + step % 7)
        for group in adamw.param_groups:
            group["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        adamw.step()
        run.optimizer.begin_step(2, 1)
        result = run.optimizer.step(lr, torch.tensor(3.0))
        assert_close(result.grad_norm, norm, 1e-12)
        assert result.loss == 1.5
        assert not result.skipped
    for p in run.stages.parameters():
        largest = theirs[p.spec.name].abs().max().item()
        assert_close(p, theirs[p.spec.name], 1e-10, p.spec.name, scale=largest)


def test_biases_and_norms_do_not_decay():
    run = build()
    decayed = {
        p.spec.name for b in run.optimizer.buckets if not b.key.no_decay for p, _ in b.places
    }
    names = {p.spec.name for p in run.stages.parameters()}
    assert decayed == {n for n in names if n.endswith("weight") and "norm" not in n}


def test_bf16_keeps_an_exact_master_and_sums_gradients_in_fp32():
    """Weights are rounded masters, and updates too small for bf16 add up."""
    run, exact = build(precision="bf16"), build(precision="fp32")
    drawn = {p.spec.name: p for p in exact.stages.parameters()}
    rounded = copy_of(run.stages)
    assert len(run.optimizer.owned()) == len(drawn)
    for shard in run.optimizer.owned():
        whole = drawn[shard.spec.name].detach().flatten()
        master = shard.read("weights", shard.start, shard.stop)
        assert master.dtype == torch.float32
        assert torch.equal(master, whole)
        assert torch.equal(rounded[shard.spec.name].flatten(), whole.bfloat16())
    assert {bucket.gradients.dtype for bucket in run.optimizer.buckets} == {torch.float32}
    weight = run.stages[0].blocks[0].mlp.up.weight
    before = weight.detach().clone()
    for _ in range(200):
        weight.main_grad.fill_(1e-3)
        run.optimizer.begin_step(1, 1)
        run.optimizer.step(1e-6, torch.tensor(0.0))
    assert 1e-4 < (before - weight).float().mean() < 3e-4


class Operations(TorchDispatchMode):
    """The names of the kernels that run, with the elements of their largest result."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function.overloadpacket)
        nothing = ("aten.empty", "aten.new_empty", "profiler.")
        if not function.is_view and not name.startswith(nothing):
            largest = max((t.numel() for t in tree_iter(result) if torch.is_tensor(t)), default=0)
            self.seen.append((name, largest))
        return result


@pytest.mark.parametrize(("positions", "tied"), [("learned", True), ("rotary", False)])
def test_products_add_weight_gradients_by_themselves(positions, tied):
    """No temporary of a linear layer's weight or of the embedding, and no kernel that adds it, but
    one for the matrix that embedding and head share; the sums are autograd's.
    """
    run = build(precision="fp64", positions=positions, layers=3, tied=tied, vocab_size=509)
    config, stage = run.config, run.stages[0]
    theirs = Stage(run.factory, config.model, config.layout, run.stage_specs[0])  # no main_grad
    weights = [p.numel() for p in stage.blocks.parameters() if p.spec.decay]
    places = [p.main_grad.data_ptr() for p in stage.parameters()]
    batches = run.reader.batches(data.Synthetic(509, 16, 1), 0, Timeline(config))
    with Operations() as operations:
        run.pipeline.train(batches, 2, run.optimizer.begin_step(100, 2))
    for index in range(2):
        batch = batches(index)
        (theirs(batch.tokens, batch) * 0.01).backward()
    products = [size for name, size in operations.seen if name == "aten.addmm_"]
    head = [] if tied else [stage.head.weight.numel()]
    assert sorted(products) == sorted(2 * (weights + head))
    assert not [s for name, s in operations.seen if name == "aten.add_" and s in weights]
    names = {name for name, _ in operations.seen}
    assert not names & {"aten.embedding_dense_backward", "aten.embedding_backward"}
    assert [p.main_grad.data_ptr() for p in stage.parameters()] == places
    assert all(bucket.missing == 0 for bucket in run.optimizer.buckets), "each was reported"
    for p, q in zip(run.stages.parameters(), theirs.parameters()):
        largest = q.grad.abs().max().item()
        assert_close(p.main_grad, q.grad, 1e-12, p.spec.name, scale=largest)


def test_sums_in_fp32_of_products_in_16_bits_are_asked_of_the_product():
    """Only GPUs have that product; shapes and types are checked on tensors without memory."""
    a, b = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((3, 5), (5, 4)))
    total = torch.empty(3, 4, device="meta")
    with Operations() as operations:
        parallel.add_product(total, a, b)
    assert operations.seen == [("aten.addmm", 12)]
    exact = torch.ones(3, 4)
    parallel.add_product(exact, torch.ones(3, 5).bfloat16(), torch.ones(5, 4).bfloat16())
    assert torch.equal(exact, torch.full((3, 4), 6.0))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"optimizer": "sgd"}])
def test_kernels_of_a_step_do_not_grow_with_the_number_of_parameters(options, monkeypatch):
    """Each bucket had an optimizer of its own, and each master was scaled and counted by itself."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 100)
    kernels, counts = [], []
    for layers in (4, 16):
        run = build(layers=layers, sgd_momentum=0.9, clip_grad=1e-6, **options)
        run.optimizer.begin_step(1, 1)
        for group in run.optimizer.groups:
            for gradient in group.own_gradients():
                gradient.fill_(1e-3)
        run.optimizer.step(1e-3, torch.tensor(1.0))
        for group in run.optimizer.groups:
            for gradient in group.own_gradients():
                gradient.fill_(1e-3)
        with Operations() as operations:
            assert not run.optimizer.step(1e-3, torch.tensor(1.0)).skipped
        # torch's SGD on a CPU takes its tensors one by one.
        inside = ("aten.mul_", "aten.add_", "aten.add") if options.get("optimizer") == "sgd" else ()
        kernels.append([name for name, _ in operations.seen if name not in inside])
        counts.append(len(run.optimizer.buckets))
    assert counts[1] > 2 * counts[0] > 20
    assert kernels[0] == kernels[1]
    assert len(kernels[0]) < 60


def test_a_stage_without_parameters_steps_too():
    nothing = torch.nn.ModuleList()
    options = configuration.Training(steps=1)
    optimizer = zero.Optimizer(nothing, ParamFactory(Mesh()), options, configuration.Layout(dp=1))
    optimizer.begin_step(2, 1)
    result = optimizer.step(1e-3, torch.tensor(4.0))
    assert (result.grad_norm, result.loss, result.skipped) == (0.0, 2.0, False)


def test_the_bit_hash_sees_order_and_sign():
    x = torch.tensor([0.0, 1.0, 2.0])
    swapped, negative = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([-0.0, 1.0, 2.0])
    hashes = {
        replica_check.bit_hash(t, 0).item()
        for t in (x, swapped, negative, x.double(), x.bfloat16())
    }
    assert len(hashes) == 5


def test_an_optimizer_is_freed_with_its_run():
    """Its buffers are most of the memory: nothing may hold them after the run is deleted."""
    run = build()
    trainer.step(run, data.Synthetic(61, 16, 1), 0, 1e-3)
    buffers = [weakref.ref(bucket.weights) for bucket in run.optimizer.buckets]
    assert buffers
    del run
    gc.collect()
    assert all(buffer() is None for buffer in buffers)
