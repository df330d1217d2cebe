"""--compile changes no result, and compiles before the first step; what it needs, and the memory of
the loss that it fuses.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import golden_worker
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from ranks import ROOT
from test_golden import POSITIONS, assert_equal_runs, lines_of, reference, run_cases
from test_peaks import PeakBytes

import data
import parallel
import trainer
from architecture.shape import ModelShape
from base.errors import UserError
from config import validation
from config.command_line import parse
from config.run_options import Training
from distributed import preflight
from distributed.launch import Launch
from distributed.mesh import Mesh
from layers import attention, loss
from layers.attention import Attention, attention_kernel
from layers.loss import cross_entropy
from parallel import ParamFactory, ParamSpec
from pipeline import Pipeline

LEARNED, ALIBI, ROTARY = POSITIONS["learned"], POSITIONS["alibi"], POSITIONS["rotary"]
SMALL = {"layers": 4, "steps": 3, "precision": "fp64", "micro_batch_size": 1}
CASES = lines_of("compile")[4]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """The result of each case, from one start of four ranks."""
    return run_cases(4, CASES, tmp_path_factory.mktemp("compile"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_layout_equals_the_single_rank_that_compiles_nothing(compiled, number):
    """After a warm-up, whose gradients must leave no trace; the steps compile nothing more."""
    case, result = CASES[number], compiled[number]
    assert_equal_runs(case, result, reference(case))
    built, warm, after = result["graphs"]
    assert built == 0 < warm == after, result["graphs"]


@pytest.mark.parametrize(
    ("device", "words", "told"),
    [("cuda", [], True), ("cuda", ["--compile"], False), ("cpu", [], False)],
)
def test_a_run_on_a_gpu_is_told_of_compile(monkeypatch, capsys, device, words, told):
    monkeypatch.setattr(preflight.placement, "placement_warnings", lambda *of_ranks: [])
    context = SimpleNamespace(
        size=1, rank=0, device=torch.device(device), places=[], nodes=["a"], job_nodes=None
    )
    preflight.introduce(parse(["--model", "gpt2-124m", *words]), context, "")
    assert ("--compile made steps" in capsys.readouterr().out) == told


def train(*words: str, **environment: str) -> subprocess.CompletedProcess:
    tiny = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 31 --steps 2 --device cpu"
    command = [sys.executable, *words, *tiny.split(), "--compile"]
    environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_a_run_says_what_is_compiled_before_its_first_step(tmp_path):
    done = train("train.py", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (compiled,) = [i for i, line in enumerate(lines) if line.startswith("compiled: norms")]
    (warm,) = [i for i, line in enumerate(lines) if line.startswith("warmed up by")]
    steps = [i for i, line in enumerate(lines) if line.startswith((" step", " iteration"))]
    assert compiled < warm < min(steps)
    assert len(steps) == 2
    kernels = json.loads((tmp_path / "run.json").read_text())["kernels"]
    assert "torch.compile" in kernels["compiled"]


def test_the_passes_that_compile_are_of_samples_that_are_trained_on(tmp_path, monkeypatch):
    """Samples that are skipped may have ended the earlier run: they are not even read."""
    read, sample = [], data.Synthetic.sample
    monkeypatch.setattr(
        data.Synthetic, "sample", lambda self, k: [read.append(k), sample(self, k)][1]
    )
    for module in (parallel, loss):
        monkeypatch.setattr(module, "compile_kernel", lambda function, _=False: function)
    monkeypatch.setattr(preflight, "check_compiler", lambda *_: None)
    words = (
        "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 31 --steps 5 --device cpu "
    )
    words += f"--global-batch-size 2 --compile --skip-samples 0:3 6:8 --out {tmp_path}"
    trainer.main(validation.check(parse(words.split()), 1), Launch("python"))
    lines = (tmp_path / "log.txt").read_text().splitlines()
    (warm,) = [i for i, line in enumerate(lines) if line.startswith("warmed up by")]
    steps = [i for i, line in enumerate(lines) if line.startswith((" step", " iteration"))]
    assert ["skipped by" in lines[i] for i in steps] == [True, True, False, True, False]
    assert steps[1] < warm < steps[2]
    assert {4, 5, 8, 9} <= set(read)  # and some that were read ahead
    assert not {0, 1, 2, 3, 6, 7} & set(read)


def test_stages_on_gpus_load_their_kernels_before_the_first_step(tmp_path, monkeypatch):
    """In the passes of one micro-batch, whose messages no kernel that is loaded can hold up."""
    words = "--layers 2 --hidden 16 --heads 2 --seq-length 8 --vocab-size 31 --steps 2 --device cpu"
    words += f" --global-batch-size 4 --micro-batch-size 1 --no-watchdog --out {tmp_path}"
    config = validation.check(parse(words.split()), 1)
    two_stages = validation.check(parse([*words.split(), "--pp", "2"]), 2)
    assert preflight.warms_up(two_stages, "cuda")
    assert not preflight.warms_up(two_stages, "cpu")
    assert not preflight.warms_up(config, "cuda")
    passes, train = [], Pipeline.train

    def counted(pipeline, batches, micro_batches, loss_weight):
        passes.append(micro_batches)
        return train(pipeline, batches, micro_batches, loss_weight)

    monkeypatch.setattr(Pipeline, "train", counted)
    monkeypatch.setattr(preflight, "warms_up", lambda config, device: True)
    trainer.main(config, Launch("python"))
    assert passes == [1, 4, 4]
    assert "warmed up by the passes of a micro-batch in " in (tmp_path / "log.txt").read_text()


def test_a_missing_compiler_is_one_sentence(tmp_path):
    done = train("train.py", "--out", str(tmp_path), CXX="none-such-g++")
    assert done.returncode == 2
    assert "--compile needs a compiler" in done.stderr
    assert "has no none-such-g++: install g++ there" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_is_compiled_on_gpus_says_what_is_missing_at_the_start(masked, monkeypatch):
    """flex_attention, without --compile: by the kernel that the start prints, on a fake GPU."""
    shape = {"layers": 1, "hidden": 32, "heads": 2, "seq_length": 16}
    device, positions = torch.device("cuda"), "learned" if masked else "alibi"
    factory = ParamFactory(Mesh(), torch.bfloat16, device, Training(seed=1), False, None)
    kernel = attention_kernel(ModelShape(**shape, positions=positions), factory, 1, masked)
    monkeypatch.delenv("CC", raising=False)
    tools = {"gcc": "/usr/bin/gcc"}
    monkeypatch.setattr(preflight.shutil, "which", tools.get)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    of = "masks" if masked else "ALiBi"
    sentence = f"torch flex_attention, of {of} needs triton on GPUs, and n2 has none: pip install"
    with pytest.raises(UserError, match=sentence):
        preflight.check_compiler({"attention": kernel}, "cuda", "n2")
    tools.clear()
    with pytest.raises(UserError, match=f"of {of} needs a compiler, and n2 has no gcc: install"):
        preflight.check_compiler({"attention": kernel}, "cuda", "n2")
    plain = {"attention": "torch scaled_dot_product_attention, math"}
    preflight.check_compiler(plain, "cuda", "n2")


def test_a_rehearsal_runs_uncompiled_and_says_so():
    done = train("rehearse.py", "--gpus", "2", "--tp", "2", "--device", "auto")
    assert done.returncode == 0, done.stderr
    assert "note: --compile: what it fuses is rehearsed as it is" in done.stderr
    assert "note: --device cpu: rehearsed on fake GPUs" in done.stderr


# ---- The loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_holds_no_copy_of_the_logits(dtype):
    """Neither in fp32, nor of the gradient; the result is torch's on the whole in fp32."""
    torch.manual_seed(0)
    words, labels = 4096, torch.randint(4000, (512, 1))
    labels[7] = -1  # no target
    logits = (5 * torch.randn(512, 1, words)).to(dtype)
    exact = logits.float()[..., :4000].requires_grad_()
    flat = exact.flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(*flat, reduction="none", ignore_index=-1)
    (0.25 * expected).sum().backward()
    spec = ParamSpec("w", (4000, 1), 0, 0, 4000, True)
    leaf = logits.clone().requires_grad_()
    taken = leaf * 1  # the logits of a head: not a leaf, so its memory may be taken
    with PeakBytes() as counted:
        losses = cross_entropy(taken, labels, Mesh().tp, spec)
        (gradient,) = torch.autograd.grad((0.25 * losses).sum(), taken)
    views = [x.untyped_storage().data_ptr() for x in (gradient, taken)]
    assert views[0] == views[1]
    # The logits themselves may be counted once, as a view of what there was.
    fresh = counted.peak - logits.nbytes
    assert 0 < fresh < 0.25 * 4 * logits.numel(), fresh
    assert_close(losses.flatten(), expected.detach(), 1e-6, scale=expected.max().item())
    # To round a gradient to 16 bits changes it by up to a quarter of this bound.
    tolerance = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5
    assert_close(gradient[..., :4000].float(), exact.grad, tolerance, scale=0.25)
    assert not gradient[..., 4000:].any()
    assert not gradient[7].any()


@pytest.mark.parametrize("case", [LEARNED, LEARNED | {"kv_heads": 2}, ROTARY | {"qk_norm": "head"}])
def test_a_split_without_rotary_positions_compiles_its_backward_pass_alone(case, monkeypatch):
    """The forward pass makes views; one function writes their gradients into one tensor."""
    model = golden_worker.options(SMALL | case).model
    built = [
        Attention(
            ParamFactory(Mesh(), compile=compile), "a", model, 0.02, False, model.attention_of(0)
        )
        for compile in (False, True)
    ]
    called = []
    monkeypatch.setattr(parallel, "COMPILED_FROM", 0)
    monkeypatch.setattr(
        parallel, "compile_kernel", lambda function: called.append(function) or function
    )
    qkv = torch.randn(5, 2, model.qkv_width, requires_grad=True)
    found = []
    for each in built:
        parts = each.split(qkv, each.queries, each.d, None)
        weighted = sum((part * torch.arange(part.numel()).view(part.shape)).sum() for part in parts)
        found.append((parts, *torch.autograd.grad(weighted, qkv)))
    assert called == [attention._join_heads]
    assert torch.equal(found[0][1], found[1][1])
    for expected, part in zip(found[0][0], found[1][0]):
        assert torch.equal(expected, part)
    # With one query head for each key head, all three are views of the matrix's output.
    views = 3 if model.kv_heads == model.heads else 2
    same = [part.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for part in parts]
    assert sum(same) == views


def test_the_gradient_of_a_bias_is_summed_by_one_compiled_function(monkeypatch):
    """It is added in the precision of the sum, not in that of the gradients."""
    called = []
    monkeypatch.setattr(parallel, "COMPILED_FROM", 6000)
    monkeypatch.setattr(
        parallel, "compile_kernel", lambda function: called.append(function) or function
    )
    layer = parallel.ColumnLinear(
        ParamFactory(Mesh(), torch.bfloat16, compile=True), "l", 8, (2, 3), 1, True
    ).to(torch.bfloat16)
    for p in (layer.weight, layer.bias):
        p.main_grad = torch.zeros(p.shape)
        p.gradient_added = lambda p: None
    grad = torch.full((1000, 1, 6), 1 + 2**-7).bfloat16()
    layer(torch.randn(999, 1, 8).bfloat16().requires_grad_()).backward(grad[1:])
    assert not called  # too small to be worth it
    layer.bias.main_grad.zero_()
    layer(torch.randn(1000, 1, 8).bfloat16().requires_grad_()).backward(grad)
    assert called == [parallel._add_sum]
    assert torch.equal(layer.bias.main_grad, torch.full((2, 3), 1000 * (1 + 2**-7)))
