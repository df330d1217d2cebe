"""Mixtures of experts: if this failed, a layout would change what a model with experts learns.

Random layouts on 2, 4 and 8 ranks equal the run on one rank in fp64, replicas are equal to the bit,
and a run goes on under another ep. test_families.py compares with transformers.
"""

import functools
import json
import os
from pathlib import Path

import golden_worker
import numpy as np
import pytest
import torch
from compare import assert_close, assert_within
from ranks import fork_one, fork_ranks, fork_rehearsal, results_of
from small_corpora import write_chats, write_corpora
from test_golden import check_lines, distance, lines_of, reference

import data
import parallel
import trainer
from base.errors import UserError
from config import schema, validation
from corpora.token_files import IndexedDatasetWriter
from distributed.collectives import Group
from distributed.mesh import Mesh
from distributed.token_exchange import Arrive, Depart, Flight, orders_of_arrived
from layers.experts import (
    ExpertMLP,
    HeldExperts,
    Router,
    ends_on_device,
    has_grouped_product,
    product_by_expert,
    product_in_one_kernel,
    weight_gradients,
)
from model import ACTIVATIONS
from optim.balance import Penalty
from parallel import ParamFactory
from tools.emulator.matching import RunTraces, mismatches
from tools.emulator.recording import Event

SHAPE = {
    "precision": "fp64",
    "positions": "rotary",
    "norm": "rmsnorm",
    "bias": False,
    "kv_heads": 4,
    "layers": 4,
    "steps": 3,
}


def test_layouts_of_four_ranks_equal_the_single_rank_run(tmp_path):
    """The drawn layouts of the next test take a minute; these find most mistakes in seconds."""
    check_lines("experts", tmp_path)


@pytest.mark.slow
def test_every_layout_of_experts_equals_the_single_rank_run(tmp_path):
    check_lines("experts_drawn", tmp_path)


@pytest.mark.slow
def test_every_option_with_experts_equals_the_single_rank_run(tmp_path):
    write_corpora(tmp_path)
    write_chats(tmp_path)
    check_lines("experts_options", tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [("adamw", "--tp 2 --ep 4", "--pp 2 --ep 2"), ("adafactor", "--ep 4", "--pp 2 --ep 2")],
)
@pytest.mark.slow
def test_a_run_is_resumed_under_another_ep(optimizer, before, after, tmp_path):
    """The rows after a checkpoint are those of the run that went on; biases and loads are in it."""
    model = "--layers 4 --hidden 32 --heads 4 --seq-length 16 --vocab-size 61 --no-bias --experts 8"
    model += " --experts-per-token 2 --router sigmoid --balance bias --balance-rate 0.05"
    run = f"train.py {model} --precision fp64 --steps 4 --global-batch-size 8 --data synthetic"
    run += f" --lr-schedule constant --optimizer {optimizer} --save-every 2 --out"
    whole, then = tmp_path / "whole", tmp_path / "then"
    resumed = f"{after} --resume {whole}/checkpoints/step_00000002"
    for out, words in ((whole, before), (then, resumed)):
        done = fork_ranks(4, *run.split(), str(out), *words.split())
        assert done.status == 0, done.err
    assert min(steps_of(then)) == 3
    for iteration in (3, 4):
        ours, theirs = steps_of(whole)[iteration], steps_of(then)[iteration]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["expert_loads"] == theirs["expert_loads"]
        assert len(ours["expert_loads"]) == 4
        assert max(ours["expert_loads"]) > 1
        assert ours["largest_expert_share"] == max(ours["expert_loads"]) / 8


def steps_of(out: Path) -> dict[int, dict]:
    """Return the rows of the steps of a run, by iteration."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {row["iteration"]: row for row in rows if "loss" in row}


def routed_comparison(
    ranks: int, every: list[dict], folder: Path, timeout: float = 900
) -> list[dict]:
    """How layouts with experts differ from one rank, a row for each case.

    Each layout is run twice. In fp64 it records the experts of every token, as one rank does; in
    fp32 it takes those that one rank recorded. fp64, fp32: as `distance`. elsewhere: (token, block)
    pairs of `tokens` that go to other experts; unwritten: those that one rank did not record.
    """
    cases: list[dict] = []
    expected: list[dict] = []
    for number, exact in enumerate(every):
        pinned = exact | {"precision": "fp32"}
        one, many, fp32 = (f"{folder}/{number}_{name}.npy" for name in ("one", "many", "fp32"))
        expected.append(reference(exact | {"record_routing": one}))
        cases.append(exact | {"record_routing": many})
        expected.append(reference(pinned | {"record_routing": fp32}))
        cases.append(pinned | {"pin_routing": fp32})
    results = results_of("tests/golden_worker.py", ranks, cases, folder, timeout)
    differences = [distance(*both) for both in zip(results, expected, strict=True)]
    rows = []
    for number, case in enumerate(every):
        one, many = (np.load(f"{folder}/{number}_{name}.npy") for name in ("one", "many"))
        row = {"case": case, "tokens": int(np.prod(one.shape[:-1]))}
        row |= {"fp64": differences[2 * number], "fp32": differences[2 * number + 1]}
        row["elsewhere"] = int((one != many).any(-1).sum())
        model = golden_worker.options(case).model
        sparse = [n for n in range(model.layers) if model.has_experts(n)]
        row["unwritten"] = int((one[:, sparse] == 0).any(-1).sum())
        rows.append(row)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_choices_are_the_same_in_every_layout_and_can_be_pinned(ranks, tmp_path):
    """In fp64 each layout writes the bytes that one rank writes. In fp32, where a rounding could
    change a choice, layouts that take one rank's choices end where that rank does.
    """
    for row in routed_comparison(ranks, lines_of("routing")[ranks], tmp_path):
        assert_within(row["fp64"], 1e-12, row["case"])
        assert_within(row["fp32"], 1e-6, row["case"])
        assert row["elsewhere"] == 0, row["case"]
        assert row["unwritten"] == 0


@pytest.mark.usefixtures("ends")
def test_choices_of_another_run_that_do_not_fit_are_refused(tmp_path):
    path = str(tmp_path / "routing.npy")
    run_of_one_rank(record_routing=path, steps=2)
    with pytest.raises(UserError, match=r"has \(16, 4, 16, 2\).*but this run has \(24, 4, 16, 2\)"):
        run_of_one_rank(pin_routing=path, steps=3)
    with pytest.raises(UserError, match=r"has expert 3, but this run has experts\(2\)"):
        run_of_one_rank(pin_routing=path, steps=2, experts=2)
    table = np.load(path)
    np.save(path, table[..., :2])  # as older versions wrote it, without checksums
    run_of_one_rank(pin_routing=path, steps=2)
    for change, reason in {
        (0, 0, 3, 1): "the experts of sample 0 in block 0 do not have their checksum",
        (1, 2, 5, 2): "the experts of sample 1 in block 2 do not have their checksum",
    }.items():
        flipped = table.copy()
        flipped[change] ^= 1
        np.save(path, flipped)
        with pytest.raises(UserError, match=reason):
            run_of_one_rank(pin_routing=path, steps=2)
    swapped = table.copy()
    swapped[0, 0, [3, 4]] = table[0, 0, [4, 3]]  # two tokens, each with its checksum
    np.save(path, swapped)
    with pytest.raises(UserError, match="do not have their checksum"):
        run_of_one_rank(pin_routing=path, steps=2)
    for experts in ([2, 2], [3, 1]):  # the same one twice; descending
        older = table[..., :2].copy()
        older[0, 0, 3] = experts
        np.save(path, older)
        with pytest.raises(UserError, match=r"is damaged: the experts of a token .* do not ascend"):
            run_of_one_rank(pin_routing=path, steps=2)
    for shape in ((10**18, 4, 16, 3), (2**63, 4, 16, 3), (-1, 4, 16, 3), (16, 4, 16, 4)):
        with open(path, "wb") as file:
            header = {"descr": "<u2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.write(table.tobytes())
        with pytest.raises(UserError, match="is no file of --record-routing: its header says"):
            run_of_one_rank(pin_routing=path, steps=2)
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"is no file of --record-routing: .*not a regular file"):
        run_of_one_rank(pin_routing=path, steps=2)
    os.unlink(path)
    Path(path).write_text("no array")
    with pytest.raises(UserError, match="is no file of --record-routing"):
        run_of_one_rank(pin_routing=path, steps=2)


def test_a_resumed_run_lengthens_its_file_by_what_is_left(tmp_path):
    """2 steps of 8 samples, and 2 of 32: 80 samples, not those of 4 steps of either."""
    model = "--layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab-size 61 --no-bias --experts 4"
    words = ["train.py", *model.split(), "--steps", "4", "--device", "cpu", "--no-watchdog"]
    words += ["--record-routing", str(tmp_path / "r.npy"), "--out", str(tmp_path / "run")]
    first = fork_one(*words, "--global-batch-size", "8", "--stop-at-samples", "16")
    assert first.status == 75, first.err
    assert len(np.load(tmp_path / "r.npy")) == 32
    then = fork_one(*words, "--global-batch-size", "32", "--resume", "auto")
    assert then.status == 0, then.err
    found = np.load(tmp_path / "r.npy")
    assert len(found) == 16 + 2 * 32
    assert found.all(), "each sample has its experts"


# ------------------------------------------------------------------------------------------------
# The router and its balance
# ------------------------------------------------------------------------------------------------


def model_with(**values) -> schema.ModelShape:
    shape = {"layers": 1, "hidden": 16, "heads": 2, "experts": 8, "experts_per_token": 2}
    return schema.ModelShape(**shape | {"bias": False, "activation": "swiglu"} | values)


def router_of(model: schema.ModelShape) -> Router:
    return Router(ParamFactory(Mesh(), torch.float64), "router", model)


def test_a_bias_changes_the_choice_and_not_the_weights():
    router = router_of(model_with(router="sigmoid", router_normalised=False))
    x = torch.randn(20, 16, dtype=torch.float64)
    router.bias[3] = 10.0
    experts, weights, counts = router(x, 0, 1, [])
    assert (experts == 3).any(-1).all()
    scores = (x @ router.weight.t()).sigmoid()
    assert_close(weights, scores.gather(-1, experts), 1e-12)
    assert counts.tolist() == torch.bincount(experts.flatten(), minlength=8).tolist()


def test_groups_limit_the_choice():
    router = router_of(model_with(router_groups=4, router_groups_per_token=1))
    experts, _, _ = router(torch.randn(50, 16, dtype=torch.float64), 0, 1, [])
    assert (experts[:, 0] // 2 == experts[:, 1] // 2).all()


def test_the_choice_that_was_kept_is_taken_again():
    router = router_of(model_with())
    kept = [torch.tensor([[0, 7]] * 5)]
    experts, _, _ = router(torch.randn(5, 16, dtype=torch.float64), 0, 1, kept)
    assert experts.tolist() == kept[0].tolist()


def penalty_of(model: schema.ModelShape, kind: str, x: torch.Tensor) -> torch.Tensor:
    """The gradient that a balance of rate 1 gives the router's weight, for one sample."""
    router = router_of(model)
    router.balance = Penalty(kind, 1.0, 0.0, 1.0)
    _, weights, _ = router(x, 0, 1, [])
    (weights * 0).sum().backward()
    return router.weight.grad


def test_the_sequence_loss_is_that_of_its_paper():
    """arXiv 2412.19437, equations 17 to 20, times the tokens of the sample."""
    model = model_with(router="sigmoid", router_normalised=True)
    x = torch.randn(30, 16, dtype=torch.float64)
    router = router_of(model)
    scores = (x @ router.weight.t()).sigmoid()
    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)
    often = chosen.mean(0) * 8 / 2
    share = (scores / scores.sum(-1, keepdim=True)).mean(0)
    (30 * (often.detach() * share).sum()).backward()
    assert_close(penalty_of(model, "sequence", x), router.weight.grad, 1e-12)


def test_an_even_load_of_the_last_step_has_no_global_loss():
    """The shares of a token sum to 1, so that equal loads leave no gradient."""
    gradient = penalty_of(model_with(), "global", torch.randn(9, 16, dtype=torch.float64))
    assert gradient.abs().max() < 1e-12


def router_gradient(folder: Path, every: int, **losses) -> torch.Tensor:
    """The gradient of a mean loss for a router, if one of `every` labels counts; 0: no mask."""
    random = np.random.default_rng(0)
    with (
        IndexedDatasetWriter(f"{folder}/text", 61) as tokens,
        IndexedDatasetWriter(f"{folder}/text.targets", 2) as answers,
    ):
        for _ in range(40):
            tokens.add_document(random.integers(61, size=32))
            answers.add_document(np.arange(32) % max(every, 1) == 0)
    text = {"data": [f"{folder}/text"], "answers_only": every > 0, "split": "1", "cache": "none"}
    experts = {"experts": 4, "experts_per_token": 2, "activation": "swiglu", "init_std": 0.3}
    case = SHAPE | text | experts | losses | {"layers": 1, "seq_length": 32, "zero": 0}
    config = validation.check(golden_worker.options(case), 1)
    state, samples = trainer.build(config), data.build(config).train
    found = []

    def note(loss: float, norm: float, squares: torch.Tensor, factor: float) -> bool:
        (router,) = (r.weight for r in state.optimizer.balance.routers.values())
        found.append(router.main_grad * factor)
        return True

    state.optimizer.accepts = note
    trainer.step(state, samples, 0, 1e-3)
    state.reader.close()
    return found[0]


@pytest.mark.parametrize("losses", [{"balance": "sequence"}, {"router_z_loss": 0.1}])
def test_auxiliary_losses_do_not_depend_on_how_many_labels_count(losses, tmp_path):
    """They are means over all tokens, and the language loss is a mean over the labels that count.
    With a label of 16 they would else have 16 times their factor.
    """
    auxiliary = [
        router_gradient(tmp_path, every, balance_rate=0.1, **losses)
        - router_gradient(tmp_path, every)
        for every in (0, 1, 4, 16)
    ]
    largest = float(auxiliary[0].abs().max())
    assert largest > 1e-4
    for gradient in auxiliary[1:]:
        assert_close(gradient, auxiliary[0], 1e-12, scale=largest)


def run_of_one_rank(**options) -> trainer.TrainState:
    case = SHAPE | {"experts": 4, "experts_per_token": 2, "activation": "swiglu"} | options
    config = validation.check(golden_worker.options(case), 1)
    states = []
    golden_worker.run(config, prepare=lambda state, samples: states.append(state))
    return states[0]


def test_a_bias_rises_for_experts_with_few_rows():
    state = run_of_one_rank(balance="bias", balance_rate=0.5, steps=1)
    for router in state.optimizer.balance.routers.values():
        expected = 0.5 * torch.sign(1 - router.load)
        assert router.bias.tolist() == expected.tolist()
        assert router.bias.any()


# ------------------------------------------------------------------------------------------------
# The experts
# ------------------------------------------------------------------------------------------------


def test_experts_without_rows_have_a_gradient_of_zero():
    model = model_with(experts_per_token=1, activation="gelu")
    factory = ParamFactory(Mesh(), torch.float64)
    mlp = ExpertMLP(factory, "mlp", model, 0.02, torch.nn.functional.gelu)
    kept = [torch.full((6, 1), 5)]
    x = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    mlp(x, kept).sum().backward()
    used = [bool(part.any()) for part in mlp.held_experts.up.grad]
    assert used == [i == 5 for i in range(8)]


def test_compiled_experts_take_any_number_of_rows(monkeypatch):
    """By one graph: torch.compile ends with an error at the ninth graph of a function."""
    compiled = functools.partial(torch.compile, fullgraph=True, backend="eager")

    def compile_kernel(function, dynamic=False):
        return compiled(function, dynamic=dynamic)

    monkeypatch.setattr(parallel, "compile_kernel", compile_kernel)
    torch.compiler.reset()
    factory = ParamFactory(Mesh(), torch.float64, compile=True)
    model = model_with(experts_per_token=1)
    held = HeldExperts(factory, "mlp", model, 0.02, ACTIVATIONS["swiglu"])
    first = None
    for rows in (7, 2, 12, 1, 0, 3):
        x = torch.randn(rows, 16, dtype=torch.float64)
        y = held(x, [rows, *[0] * 7])
        assert y.shape == x.shape
        if rows:
            inner = ACTIVATIONS["swiglu"](x @ held.up[0].view(-1, 16).t())
            assert_close(y, inner @ held.down[0].view(16, -1).t(), 1e-12)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        first = first or graphs
        assert graphs == first, f"{rows} rows are compiled again"


@pytest.mark.parametrize(
    "counts",
    [
        [[2, 1, 0], [1, 0, 3], [0, 0, 0]],
        [[2, 1], [1, 0]],
        [[0], [3], [2]],
        [[0, 4, 0, 1]],
        [[0, 0], [0, 0]],
        [[5, 7, 1], [2, 2, 9]],
    ],
)
def test_rows_are_sorted_by_expert_where_they_are(counts):
    """By expert, then by the rank that sent them; the second order undoes the first."""
    came = [
        (rank, e) for rank, row in enumerate(counts) for e, n in enumerate(row) for _ in range(n)
    ]
    order, back = orders_of_arrived(counts, torch.device("cpu"))
    assert [came[i] for i in order.tolist()] == sorted(came, key=lambda pair: pair[::-1])
    assert torch.equal(order[back], torch.arange(len(came)))
    assert torch.equal(back[order], torch.arange(len(came)))
    assert orders_of_arrived(counts, torch.device("meta"))[0].shape == (len(came),)


def test_other_work_runs_while_rows_and_their_gradients_travel():
    """The shared expert is computed in the forward pass, and its gradient in the backward pass."""
    happened = []

    class Noted(Flight):
        def start(self, *arguments):
            happened.append("start")
            return super().start(*arguments)

        def end(self):
            happened.append("end")
            return super().end()

    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            happened.append("shared")
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            happened.append("shared's gradient")
            return 2 * grad

    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    flight = Noted(Group(), [4], [4])
    (coming,) = Depart.apply([flight], 3 * x)
    shared = Shared.apply(x)
    (rows,) = Arrive.apply([flight], coming)
    (rows.square().sum() + shared.sum()).backward()
    assert happened == ["start", "shared", "end", "start", "shared's gradient", "end"]
    assert_close(x.grad, 18 * x.detach() + 2, 1e-14)


@pytest.mark.parametrize("counts", [[3, 0, 5, 0], [0, 0, 0, 9], [1, 1, 1, 1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_kernel_computes_what_a_product_for_each_expert_does(counts, dtype, transposed):
    """The kernel that GPUs take for many small experts, in torch's version for the CPU."""
    x = torch.randn(sum(counts), 16, dtype=dtype)
    weight = torch.randn(4, 16, 24, dtype=dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    expected = product_by_expert(x, weight, counts)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-6}[dtype]
    ends = ends_on_device(counts, x.device)
    assert_close(product_in_one_kernel(x, weight, ends), expected, tolerance)
    grad = torch.randn(sum(counts), 24, dtype=dtype)
    found = weight_gradients(x, grad, counts, ends)
    assert found.shape == (4, 24, 16)
    assert_close(found, weight_gradients(x, grad, counts, None), tolerance)
    for of_expert, rows in zip(found, counts):
        assert rows or not of_expert.any()


class OnGPU:
    """Rows on a GPU, as far as `has_grouped_product` looks at them."""

    is_cuda, dtype, device = True, torch.bfloat16, "cuda"

    def __len__(self):
        return 4096


@pytest.mark.parametrize(
    ("capability", "hip", "one_kernel"),
    [
        ((9, 0), None, True),  # H100
        ((10, 3), None, True),  # B300
        ((8, 0), None, False),  # A100: torch has a loop there, with a stop of the host
        ((12, 0), None, False),  # RTX 5090
        ((9, 0), "6.4", False),  # MI250X, which says the same as an H100
        ((9, 4), "6.4", False),  # MI300X
    ],
)
def test_one_kernel_serves_all_experts_where_torch_has_it(monkeypatch, capability, hip, one_kernel):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_grouped_product(OnGPU(), torch.empty(16, 2048, 1536, device="meta")) == one_kernel
    assert not has_grouped_product(OnGPU(), torch.empty(2, 2048, 1536, device="meta"))
    assert not has_grouped_product(OnGPU(), torch.empty(16, 4096, 2 * 4096, device="meta"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"experts_per_token": 9}, r"experts-per-token\(9\) is more than experts\(8\)"),
        ({"ep": 3}, r"ep\(3\) does not divide experts\(8\)"),
        ({"ep": 8}, r"ep\(8\) does not divide the ranks of a stage: dp\(4\) \* cp\(1\) \* tp"),
        ({"router_groups": 3}, r"router_groups\(3\) does not divide experts\(8\)"),
        ({"router_groups_per_token": 2}, "is more than router_groups"),
        ({"router_groups": 8}, r"experts-per-token\(2\) is more than there are in 1 groups of 1"),
        ({"experts_per_token": 1}, r"experts-per-token\(1\) with router_normalised: the weight"),
        ({"shared_gate": True}, "shared_gate is of the shared MLP: give shared_ffn_hidden"),
        ({"shared_ffn_hidden": 9, "tp": 2}, r"tp\(2\) does not divide shared_ffn_hidden\(9\)"),
        ({"experts": 1, "experts_per_token": 1, "ep": 2}, "--ep needs --experts N"),
        (
            {"expert_interval": 5},
            r"expert_interval\(5\) leave no block of layers\(4\) with experts",
        ),
        ({"first_dense_layers": 4}, r"first_dense_layers\(4\) and expert_interval\(1\) leave no"),
        ({"first_dense_layers": 1, "ffn_hidden": 90, "tp": 4}, r"does not divide ffn-hidden\(90\)"),
        ({"experts": 1}, "--experts-per-token needs --experts N, with N above 1"),
        ({"experts": 1, "experts_per_token": 1, "balance": "bias"}, "--balance needs --experts N"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(options, sentence):
    case = SHAPE | {"experts": 8, "experts_per_token": 2, "activation": "swiglu"} | options
    with pytest.raises(UserError, match=sentence):
        validation.check(golden_worker.options(case), 4)


# ------------------------------------------------------------------------------------------------
# The rehearsal
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rehearsal_of_experts_meets_and_shows_the_worst_memory(tmp_path):
    words = "--gpus 4 --tp 2 --ep 4 --sequence-parallel --experts 8 --experts-per-token 2 --no-bias"
    words += " --layers 2 --hidden 256 --heads 4 --vocab-size 512 --seq-length 1024"
    words += " --global-batch-size 8 --steps 1 --all-ranks"
    peaks = {}
    for routing in ("even", "one-rank"):
        path = tmp_path / f"{routing}.json"
        line = [*words.split(), "--routing", routing, "--json", str(path)]
        outcome = fork_rehearsal("rehearse.py", *line)
        assert outcome.status == 0, outcome.out + outcome.err
        answer = json.loads(path.read_text())
        assert not answer["finding"]
        peaks[routing] = answer["stages"][0]["peaks"]["forward"]
        assert abs(answer["stages"][0]["difference"]) < 0.1
    assert peaks["one-rank"] > 1.1 * peaks["even"], "the first rank has all rows"


def test_unequal_blocks_are_compared_pair_by_pair():
    """Rank 0 sends 3 rows to rank 1, which expects 3; then 2, which does not come from anyone."""
    one = Event("all_to_all", "experts", 1, 64, rows=((1, 2), (1, 3)))
    two = one._replace(rows=((3, 4), (2, 4)))
    rows = {"experts": [(0, 1)]}
    assert mismatches(RunTraces(rows, [[one], [two]])) == []
    wrong = two._replace(rows=((2, 4), (2, 4)))
    (sentence,) = mismatches(RunTraces(rows, [[one], [wrong]]))
    assert "0 sends 3 rows, 1 expects 2" in sentence
    assert mismatches(RunTraces(rows, [[one], [wrong]], frozenset([0]))) == []
