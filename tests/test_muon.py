"""Muon: if this failed, its update would depend on the layout, or not be Muon's.

On one process: the iteration against the SVD, plain torch and torch.optim.Muon; the exchange of
matrices between the ranks of simulated groups. On ranks: drawn layouts against one rank.
"""

import itertools
import random
import threading
from dataclasses import replace

import golden_worker
import pytest
import torch
from muon_layouts import KINDS, MODEL, MODES, ONE_STEP, drawn_jobs, largest_differences
from ranks import results_of

import trainer
from base.errors import UserError
from config import validation
from config.schema import Layout, Training
from config.spelling import preset
from costs import hardware, muon_terms
from costs.job import Job
from distributed.collectives import Group
from optim import matrix_owners, muon
from optim.matrix_owners import MatrixOwners, Placed, Section
from parallel import Matrices, ParamSpec

SHAPES = [(24, 24), (12, 40), (40, 12), (1, 7), (64, 8)]


def drawn_matrix(rows, columns, dtype=torch.float64, seed=0):
    return torch.randn(rows, columns, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# ---- The iteration -------------------------------------------------------------------------------


def plain_iteration(matrix):
    """Keller Jordan's published loop, in the type of the matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / max(matrix.norm().item(), 1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_iteration_is_that_of_plain_torch(shape):
    matrix = drawn_matrix(*shape)
    torch.testing.assert_close(
        muon.newton_schulz(matrix[None])[0], plain_iteration(matrix), rtol=1e-12, atol=1e-12
    )
    batch = torch.stack([matrix, drawn_matrix(*shape, seed=1)])
    torch.testing.assert_close(
        muon.newton_schulz(batch)[1], plain_iteration(batch[1]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_has_the_singular_vectors_of_the_matrix(shape):
    """U p(S) V^T, where p is the polynomial on each singular value, near 1 by its bounds."""
    matrix = drawn_matrix(*shape)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    values = s / s.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    found = muon.newton_schulz(matrix[None])[0]
    torch.testing.assert_close(found, u @ torch.diag(values) @ v, rtol=1e-11, atol=1e-11)
    large = s / s.norm() > 0.01
    assert ((values[large] > 0.65) & (values[large] < 1.2)).all()
    polar = u @ v
    if large.all():
        assert (found - polar).norm() < 0.35 * polar.norm()


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_updates_are_those_of_torch_in_its_own_type(shape, rule):
    """bf16: torch.optim.Muon on a whole matrix; both take five steps with momentum and decay."""
    start = drawn_matrix(*shape, torch.float32)
    other = torch.nn.Parameter(start.clone())
    theirs = torch.optim.Muon(
        [other], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=rule, eps=1e-7
    )
    training = Training(muon_dtype="bf16", muon_scale=rule)
    master = start.clone().flatten()
    ours = muon.Muon([master], training, 0.1, owners_of([(shape, Matrices())]))
    for step in range(5):
        gradient = drawn_matrix(*shape, torch.float32, seed=10 + step)
        other.grad = gradient.clone()
        theirs.step()
        ours.update([gradient.flatten().clone()], 0.02)
    moved = (other.detach() - start).norm()
    assert (other.detach() - master.view(shape)).norm() <= 0.02 * moved


@pytest.mark.parametrize(
    ("given", "precision", "on_gpu", "dtype"),
    [
        ("auto", "bf16", True, "bf16"),
        ("auto", "fp16", True, "bf16"),
        ("auto", "fp32", True, "master"),  # who asks for fp32 gets it everywhere
        ("auto", "fp64", True, "master"),
        ("auto", "bf16", False, "master"),  # CPUs multiply bf16 more slowly
        ("master", "bf16", True, "master"),
        ("bf16", "fp32", False, "bf16"),
    ],
)
def test_the_iteration_is_in_bf16_where_gpus_win_by_it(given, precision, on_gpu, dtype):
    training = Training(optimizer="muon", muon_dtype=given, precision=precision)
    assert training.newton_schulz_dtype(on_gpu) == dtype
    if on_gpu:
        job = Job(preset("1b3"), Layout(dp=8), training, hardware.load("h100-80"))
        exact = job._replace(training=replace(training, muon_dtype="master"))
        planned = muon_terms.newton_schulz_seconds(job)
        ratio = muon_terms.newton_schulz_seconds(exact) / planned
        assert (ratio > 5) == (dtype == "bf16")
        return
    master = drawn_matrix(4, 6, torch.float32).flatten()
    rule = muon.Muon([master], training, 0.1, owners_of([((4, 6), Matrices())]))
    name = "bfloat16" if dtype == "bf16" else "float32"
    assert f"Newton-Schulz in {name}," in rule.kernel


def test_decay_is_applied_once():
    """With a gradient of zero a step leaves (1 - lr decay) of the weights."""
    training = Training(optimizer="muon")
    master = drawn_matrix(4, 6).flatten()
    before = master.clone()
    rule = muon.Muon([master], training, 0.5, owners_of([((4, 6), Matrices())]))
    rule.update([torch.zeros(24, dtype=torch.float64)], 0.1)
    torch.testing.assert_close(master, before * 0.95, rtol=1e-14, atol=0)


def test_momentum_that_was_read_and_written_gives_the_same_bits():
    """As by a checkpoint, in two parts; the kind that Muon lacks is zeros."""
    training, shape = Training(optimizer="muon"), (30, 20)
    masters = [drawn_matrix(*shape).flatten()]
    rule = muon.Muon(masters, training, 0.1, owners_of([(shape, Matrices())]))
    rule.update([drawn_matrix(*shape, seed=1).flatten()], 0.1)
    copies = [masters[0].clone()]
    fresh = muon.Muon(copies, training, 0.1, owners_of([(shape, Matrices())]))
    for kind in ("exp_avg", "exp_avg_sq"):
        for a, b in ((0, 256), (256, 600)):
            fresh.write(kind, 0, a, rule.read(kind, 0, a, b).clone())
    assert not rule.read("exp_avg_sq", 0, 0, 600).any()
    for each in (rule, fresh):
        each.update([drawn_matrix(*shape, seed=2).flatten()], 0.1)
    assert torch.equal(masters[0], copies[0])


def test_scales():
    assert muon.scale("original", 400, 100) == 2.0
    assert muon.scale("original", 100, 400) == 1.0
    assert muon.scale("match_rms_adamw", 100, 400) == pytest.approx(4.0)
    with pytest.raises(UserError, match="muon_scale"):
        golden_worker.options({"optimizer": "muon", "muon_scale": "none"})


# ---- Which matrices there are --------------------------------------------------------------------


def test_a_parameter_divides_into_its_matrices():
    """Two key/value heads with three queries each, of size 4, from 5 inputs."""
    qkv = Matrices(parts=(("q", 3), ("k", 1), ("v", 1)), dim=1, heads=(0, 1))
    shape = (2, 5, 4, 5)
    sizes = {mode: [size(box) for _, box in qkv.boxes(shape, mode)] for mode in MODES}
    assert sizes["joint"] == [2 * 5 * 4 * 5]
    assert sizes["split"] == [2 * 3 * 20, 2 * 20, 2 * 20]
    assert sizes["head"] == [20] * 10
    assert [name for name, _ in qkv.boxes(shape, "split")] == ["q", "k", "v"]
    gated = Matrices(each=(0, 1))  # experts, gate and up
    assert all(
        [size(box) for _, box in gated.boxes((3, 2, 8, 5), mode)] == [40] * 6 for mode in MODES
    )
    latent = Matrices(parts=(("latent", 3), ("key", 2)), is_projection=True)
    counts = {mode: len(latent.boxes((5, 4), mode)) for mode in (*MODES, "projection")}
    assert counts == {"joint": 1, "split": 2, "head": 2, "projection": 1}
    assert qkv.boxes(shape, "projection") == qkv.boxes(shape, "split")
    with pytest.raises(ValueError, match="do not add up to 5"):
        Matrices(parts=(("q", 3), ("k", 1)), dim=1).boxes(shape, "split")


def size(box):
    return torch.Size([stop - start for start, stop in box]).numel()


def check_planned(case, run):
    """The matrices of a run are those that the planner prices, with their FLOPs."""
    found = sorted(
        shape
        for update_set in run.optimizer.update_sets
        if isinstance(update_set.rule, muon.Muon)
        for shape in (matrix.shape for matrix in update_set.rule.owners.matrices)
    )
    model_mode = case.get("muon_qkv", "projection")
    model = golden_worker.options(case).model
    planned = [
        (rows, columns)
        for count, rows, columns in muon_terms.matrices_of_block(model, model_mode)
        for _ in range(count * model.layers)
    ]
    assert found == sorted(planned)
    for rows, columns in found:
        assert muon.operations(rows, columns) == muon_terms.newton_schulz_flops(rows, columns)


def test_every_matrix_of_a_model_is_updated_by_its_rule():
    """Attention's and the MLPs' matrices by Muon; all others, routers too, by AdamW."""
    case = {"optimizer": "muon", "experts": 4, "shared_ffn_hidden": 16, "shared_gate": True}
    case |= {"activation": "swiglu", "kv_heads": 4, "ffn_hidden": 24}
    run = trainer.build(validation.check(golden_worker.options(case), 1))
    by_muon = {
        s.spec.name.split(".", 2)[2]
        for g in run.optimizer.groups
        for s in g.shards
        if g.key.family == "muon"
    }
    assert by_muon == {
        *("attention.qkv.weight", "attention.out.weight", "mlp.experts.up.weight"),
        *("mlp.experts.down.weight", "mlp.shared.up.weight", "mlp.shared.down.weight"),
    }
    check_planned(case, run)


@pytest.mark.parametrize("mode", [*MODES, "projection"])
@pytest.mark.parametrize("kind", ["latent", "grouped"])
def test_the_planner_prices_the_matrices_of_a_model(kind, mode):
    case = MODEL | KINDS[kind] | {"muon_qkv": mode}
    check_planned(case, trainer.build(validation.check(golden_worker.options(case), 1)))


def test_adamw_has_a_rate_of_its_own():
    """The norms move by AdamW's rate: with a hundredth of it they move a hundredth as far."""
    moved = {}
    for rate in (1e-3, 1e-5):
        case = {"optimizer": "muon", "muon_adamw_lr": rate, "steps": 1, "precision": "fp64"}
        run = trainer.build(validation.check(golden_worker.options(case | {"lr": 2e-3}), 1))
        before = {name: p.detach().clone() for name, p in run.stages.named_parameters()}
        trainer.step(run, golden_worker.data.build(run_config(case)).train, 0, 2e-3)
        for name, p in run.stages.named_parameters():
            moved.setdefault(name, []).append((p.detach() - before[name]).norm().item())
        run.reader.close()
    for name, (large, small) in moved.items():
        if "norm" in name and name.endswith("weight"):
            assert large == pytest.approx(100 * small, rel=1e-6), name
        if name.endswith("qkv.weight"):
            assert large == pytest.approx(small, rel=1e-12), name


def run_config(case):
    return validation.check(golden_worker.options(case), 1)


# ---- The exchange, on simulated ranks ------------------------------------------------------------


def owners_of(parameters, mode="split"):
    """The owners of whole parameters on one rank: pairs of a shape and its Matrices."""
    placed, total = [], 0
    for number, (shape, matrices) in enumerate(parameters):
        spec = ParamSpec(f"p{number}", shape, None, 0, shape[0], True, matrices=matrices)
        placed.append(Placed(spec, shape, total))
        total += torch.Size(shape).numel()
    section = Section(placed, total, False)
    return MatrixOwners([section], Group(), 1, mode, muon.operations, 10**6)


class Wires:
    """An all-to-all between threads: every member leaves its messages, then takes those for it."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=60)
        self.messages = {}


class ThreadGroup:
    """A rank of a group whose members are threads, as MatrixOwners uses groups."""

    def __init__(self, wires, rank, size):
        self.wires, self.rank, self.size = wires, rank, size
        self.at_once = self
        self.exchanges = 0

    def all_to_all(self, output, source, rows):
        came, went = rows
        self.exchanges += 1
        for to, part in enumerate(source.split(went)):
            self.wires.messages[self.rank, to] = part.clone()
        self.wires.barrier.wait()
        parts = [self.wires.messages[other, self.rank] for other in range(self.size)]
        assert [part.numel() for part in parts] == list(came)
        output.copy_(torch.cat(parts))
        self.wires.barrier.wait()
        return self

    def wait(self):
        pass


PARAMETERS = {
    "qkv": ((4, 5, 3, 7), 0, Matrices(parts=(("q", 3), ("k", 1), ("v", 1)), dim=1, heads=(0, 1))),
    "out": ((7, 12), 1, Matrices()),
    "gated": ((2, 8, 7), 1, Matrices(each=(0,))),
    "down": ((7, 8), 1, Matrices()),
    "latent": ((9, 7), None, Matrices(parts=(("latent", 6), ("key", 3)))),  # not cut by tp
    "up": ((4, 5, 6), 0, Matrices(parts=(("key", 2), ("value", 3)), dim=1, heads=(0,))),
    "padded": ((5, 6), 0, Matrices()),  # five rows, padded to a multiple of the tensor ranks
}


def simulated(mode, replicas, tensor_ranks, zero, seed, owners_class=MatrixOwners, most=10**6):
    """Whole parameters after an update by `muon.Muon`'s function, as each rank ends up with them;
    and as they are if every matrix is updated by itself. Sections begin anywhere.
    most: elements of an owner in a round.
    """
    chance = random.Random(seed)
    names = chance.sample(list(PARAMETERS), 5)
    whole = {
        name: torch.randn(
            PARAMETERS[name][0],
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed + n),
        )
        for n, name in enumerate(names)
    }
    training = Training(optimizer="muon")
    expected = {}
    for name, tensor in whole.items():
        expected[name] = tensor.clone()
        for _, box in PARAMETERS[name][2].boxes(tensor.shape, mode):
            index = tuple(slice(*ends) for ends in box)
            matrix = tensor[index].reshape(-1, tensor.shape[-1])
            factor = 0.2 * max(matrix.shape) ** 0.5
            expected[name][index] = (plain_iteration(matrix) * factor).view(tensor[index].shape)
    world = replicas * tensor_ranks
    wires = Wires(world)
    found, failures, exchanges = {}, [], []

    def run(rank):
        replica, t = divmod(rank, tensor_ranks)
        placed, parts, total = [], [], 0
        for name in names:
            shape, dim, matrices = PARAMETERS[name]
            local, start, stop = list(shape), 0, shape[0]
            if dim is not None:
                local[dim] = -(-shape[dim] // tensor_ranks)
                start = min(t * local[dim], shape[dim])
                stop = min(start + local[dim], shape[dim])
            spec = ParamSpec(name, shape, dim, start, stop, True, matrices=matrices)
            tensor = torch.zeros(local, dtype=torch.float64)
            if dim is None:
                tensor.copy_(whole[name])
            else:
                tensor.narrow(dim, 0, stop - start).copy_(
                    whole[name].narrow(dim, start, stop - start)
                )
            placed.append(Placed(spec, tuple(local), total))
            parts.append(tensor.flatten())
            total += tensor.numel()
        length = -(-total // replicas)
        flat = torch.cat([*parts, torch.zeros(length * replicas - total, dtype=torch.float64)])
        sharded = zero > 0 and replicas > 1
        section = Section(placed, length if sharded else len(flat), sharded)
        mine = flat[replica * length : (replica + 1) * length] if sharded else flat
        mine = mine.clone()
        group = ThreadGroup(wires, rank, world)
        owners = owners_class([section], group, tensor_ranks, mode, muon.operations, most)
        rule = muon.Muon([torch.zeros_like(mine)], training, 0.0, owners)
        owners.update([mine], rule.orthogonalise)
        exchanges.append(group.exchanges)
        found[rank] = (mine, placed, section, owners.owner_of)

    def guarded(rank):
        try:
            run(rank)
        except BaseException as error:
            failures.append(error)
            wires.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    # An all-to-all each way in each round; all matrices are in one, unless rounds are small.
    assert set(exchanges) == {2} if most == 10**6 else min(exchanges) == max(exchanges) > 2
    assert all(owner_of == found[0][3] for *_, owner_of in found.values())
    largest = 0.0
    for t, r in itertools.product(range(tensor_ranks), range(replicas)):
        _, placed, section, _ = found[r * tensor_ranks + t]
        if section.sharded:
            flat = torch.cat([found[i * tensor_ranks + t][0] for i in range(replicas)])
        else:
            flat = found[r * tensor_ranks + t][0]
        for each in placed:
            spec = each.spec
            count = torch.Size(each.shape).numel()
            local = flat[each.offset : each.offset + count].view(each.shape)
            wanted = expected[spec.name]
            if spec.dim is not None:
                wanted = wanted.narrow(spec.dim, spec.start, spec.stop - spec.start)
                local = local.narrow(spec.dim, 0, spec.stop - spec.start)
            if wanted.numel():
                off = (local - wanted).abs().max().item()
                largest = max(largest, off) if off == off else float("nan")
    return largest


@pytest.mark.parametrize("mode", MODES)
def test_whole_matrices_meet_at_their_owners(mode):
    """Cut along rows and columns, copied, padded; sections that begin anywhere; ZeRO or not."""
    for seed in range(12):
        chance = random.Random(f"{mode}{seed}")
        replicas, tensor_ranks = chance.choice([1, 2, 3, 4]), chance.choice([1, 2, 3, 4])
        zero = chance.choice([0, 1])
        largest = simulated(mode, replicas, tensor_ranks, zero, seed)
        assert largest < 1e-12, (replicas, tensor_ranks, zero, seed)
        if replicas * tensor_ranks < 5:  # five parameters: an owner has several matrices
            largest = simulated(
                mode, replicas, tensor_ranks, zero, seed, most=chance.choice([1, 50])
            )
            assert largest < 1e-12, (replicas, tensor_ranks, zero, seed, "rounds")


def test_an_owner_has_few_elements_in_a_round():
    """At most as many as are asked for, or one matrix; in the order of the costs; each once."""
    chance = random.Random(2)
    for owners, most in itertools.product((1, 3, 8), (1, 40, 100)):
        sizes = [chance.choice([10, 20, 45]) for _ in range(50)]
        owner_of = matrix_owners.balanced([float(size) for size in sizes], owners)
        rounds = matrix_owners.in_rounds([float(s) for s in sizes], sizes, owner_of, most)
        assert sorted(itertools.chain(*rounds)) == list(range(50))
        for numbers, owner in itertools.product(rounds, range(owners)):
            own = [sizes[n] for n in numbers if owner_of[n] == owner]
            assert sum(own) <= most or len(own) == 1
        # A round is begun only by a matrix that did not fit into the one before.
        assert len(rounds) <= max(1, 2 * sum(sizes) / owners / most + 2) or most < max(sizes)


def test_the_pieces_of_a_run_are_its_elements():
    """Against an index tensor: any box of any tensor, any run of its elements."""
    chance = random.Random(3)
    for _ in range(300):
        shape = [chance.randint(1, 4) for _ in range(chance.randint(1, 4))]
        ends = [sorted(chance.sample(range(size + 1), 2)) for size in shape]
        box = tuple((a, b) for a, b in ends)
        numbers = torch.arange(torch.Size(shape).numel())
        wanted = numbers.view(shape)[tuple(slice(*e) for e in box)].reshape(-1)
        i, j = sorted(chance.choices(range(len(wanted) + 1), k=2))
        pieces = matrix_owners.pieces_of(box, shape, (i, j))
        found = [n for start, stop in pieces for n in range(start, stop)]
        assert found == wanted[i:j].tolist(), (shape, box, i, j)


def test_owners_have_equal_work():
    """Graham's bound: no owner has more than the mean and the largest matrix; ties by number."""
    chance = random.Random(1)
    for owners in (1, 2, 7, 16):
        costs = [float(chance.choice([1, 1, 4, 9])) for _ in range(40)]
        found = matrix_owners.balanced(costs, owners)
        loads = [sum(c for c, o in zip(costs, found) if o == owner) for owner in range(owners)]
        assert max(loads) <= sum(costs) / owners + max(costs)
        assert found == matrix_owners.balanced(costs, owners)
    assert matrix_owners.balanced([1.0] * 8, 4) == [0, 1, 2, 3, 0, 1, 2, 3]


# ---- Mistakes of other programs, made on purpose -------------------------------------------------


class LocalScale(muon.Muon):
    """The scale comes from the shape of a tensor rank's shard: here half of the columns."""

    def orthogonalise(self, matrices):
        super().orthogonalise(matrices)
        for matrix in matrices:
            rows, columns = matrix.shape
            whole, shard = (muon.scale("match_rms_adamw", rows, n) for n in (columns, columns / 2))
            matrix.mul_(shard / whole)


class DecayTwice(muon.Muon):
    """The weights decay before the update and in it."""

    def update(self, gradients, lr):
        for master in self.masters:
            master.mul_(1 - lr * self.weight_decay)
        super().update(gradients, lr)


def test_a_scale_of_the_shard_is_found(monkeypatch):
    monkeypatch.setattr(muon, "Muon", LocalScale)
    assert simulated("split", 1, 2, 0, 3) > 1e-3


def test_q_k_v_as_one_matrix_are_found(monkeypatch):
    boxes = Matrices.boxes
    real = simulated("split", 1, 2, 0, 3)

    class Joined(MatrixOwners):
        def __init__(self, sections, group, tensor_ranks, mode, cost, most):
            super().__init__(sections, group, tensor_ranks, "joint", cost, most)

    assert boxes is Matrices.boxes
    assert real < 1e-12
    assert simulated("split", 1, 2, 0, 3, Joined) > 1e-3


def test_a_stale_number_of_heads_is_found():
    """The matrices are cut as if a tensor rank had the heads of the whole model."""

    class Stale(MatrixOwners):
        def _held(self, placed, rank):
            return super()._held(placed, self.group.rank)  # this rank's rows for every rank

    try:
        off = simulated("head", 1, 2, 0, 3, Stale)
    except (RuntimeError, AssertionError, IndexError, KeyError, threading.BrokenBarrierError):
        return  # shapes that do not fit together
    assert not off < 1e-3


def test_decay_twice_is_found(monkeypatch):
    monkeypatch.setattr(muon, "Muon", DecayTwice)
    with pytest.raises(AssertionError):
        test_decay_is_applied_once()


# ---- Real ranks ----------------------------------------------------------------------------------


def test_drawn_layouts_equal_one_rank(tmp_path):
    """Twelve layouts of two ranks in fp64: each kind of model with joint, split and head."""
    losses, weights = largest_differences(drawn_jobs(12, "fp64", 1, ranks=(2,), steps=3), tmp_path)
    assert losses <= 1e-12
    assert weights <= 1e-12


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), ("fp32", 1e-6)])
def test_the_first_update_is_that_of_one_rank(tmp_path, precision, bound):
    """tp 2 against tp 1, where gradients agree to rounding: the updates do too.

    The iteration multiplies a small singular value by up to 3.4445^5 = 485, and so a gradient's
    rounding there: in fp32 differences of 3e-7 in gradients become 1e-5 in updates.
    """
    case = ONE_STEP | {"tp": 2, "zero": 0, "precision": precision, "work": "compared"}
    jobs = [case | {"muon_qkv": mode} for mode in MODES]
    for found in results_of("tests/muon_worker.py", 2, jobs, tmp_path):
        assert found["gradients"] <= bound
        assert found["updates"] <= (bound if precision == "fp64" else 100 * bound), found


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), ("fp32", 1e-6)])
def test_drawn_layouts_of_four_ranks_equal_one_rank(tmp_path, precision, bound):
    """Of three models; `check.py --random N --optimizer muon` draws others."""
    jobs = drawn_jobs(12, precision, 2, ranks=(4,), steps=3)
    first = 0 if precision == "fp64" else 3  # every fourth has another kind and another mode
    losses, weights = largest_differences(jobs[first::4], tmp_path)
    assert losses <= bound
    assert weights <= bound


def test_zero_3_is_refused():
    with pytest.raises(UserError, match=r"--zero 3 .*muon.*use one of these"):
        validation.check(golden_worker.options({"optimizer": "muon", "zero": 3}), 2)


def test_options_of_muon_need_muon():
    from config.command_line import parse

    words = ["--data", "synthetic", "--model", "bloom-176b", "--steps", "1"]
    with pytest.raises(UserError, match="needs --optimizer muon"):
        parse([*words, "--set", "muon_qkv=head"])
