"""What check.py runs: if this failed, a fault in a branch that no layout runs would be no fault."""

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys

import pytest
import torch
from ranks import ROOT

import parallel
from base.errors import UserError
from config import command_line, validation
from config.examples import examples, needed
from config.schema import Layout, all_options
from corpora.tasks import ScoringRequest
from distributed.context import start as start_context
from distributed.launch import Launch
from optim.precision import DTYPES
from tools.checker import inference
from tools.checker.compare import Reference
from tools.checker.corpora import write_corpora
from tools.checker.engine import INFERRED, inferring, of_one_rank
from tools.checker.layouts import AXES, cover, name_of, not_covered, ranks_of
from tools.checker.recorder import AFTER
from tools.checker.runs import CheckedRun, Worker
from tools.checker.shrink import shrink, unsaid
from tools.checker.thresholds import wide_types
from tools.checker.variants import CheckPlan, plan_of

GPT = "--layers 12 --hidden 768 --heads 12 --vocab-size 50257 --steps 10"
LLAMA = f"{GPT} --kv-heads 4 --positions rotary --activation swiglu"
FEW_HEADS = f"{GPT} --kv-heads 2"


def plan(tmp_path, words: str, ranks: int = 4, **named) -> CheckPlan:
    """The plan of a check of a run, as check.py makes it."""
    user = command_line.parse(words.split())
    small, _ = shrink(user, tmp_path)
    return plan_of(small, user, ranks, **named)


# ---- Types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (GPT, {"fp16", "gradients in bf16"}),
        (f"{GPT} --precision bf16", {"bf16", "gradients in bf16"}),
        (f"{GPT} --precision fp16", {"fp16"}),
        (f"{GPT} --precision fp32", set()),
        (
            f"{GPT} --precision fp32 --optimizer muon --set muon_dtype=bf16",
            {"fp16", "gradients in bf16"},
        ),
        (f"{GPT} --precision fp64 --compile", {"compile"}),
    ],
    ids=["auto", "bf16", "fp16", "fp32", "muon in bf16", "compile"],
)
def test_a_run_that_may_have_other_types_is_checked_in_them(tmp_path, words, names):
    others = {each.name: each for each in plan(tmp_path, words).others if not each.sizes}
    assert set(others) == names
    for name in names - {"compile"}:
        settings = {(x.zero, x.dp) for x in others[name].layouts}
        assert {(1, 2), (2, 2), (3, 2)} <= settings or "muon" in words, name


def test_sums_of_16_bits_have_more_bits_than_weights_and_both_are_wide(tmp_path):
    """Also where the run itself asks for fp32, which then is not changed."""
    user = command_line.parse(f"{GPT} --precision fp16".split())
    small, _ = shrink(user, tmp_path)
    (fp16, *_) = plan_of(small, user, 4).others
    with wide_types(fp16.config):
        assert parallel.exact_dtype(DTYPES["fp16"]) == torch.float64
        assert DTYPES["fp16"] == DTYPES["bf16"] == torch.float32
    assert DTYPES["fp16"] == torch.float16
    assert parallel.exact_dtype(torch.float16) == torch.float32
    with wide_types(small):
        assert DTYPES["fp16"] == torch.float16


def test_a_16_bit_run_is_one_ranks_in_fp64_but_for_the_rounding_of_fp32(tmp_path):
    """Its masters differ from its weights, and its gradients are recorded without their scale."""
    user = command_line.parse(f"{GPT} --precision fp16".split())
    small, _ = shrink(user, tmp_path)
    write_corpora(small)
    context = start_context(Launch("python"), small.run)
    one = Worker(looks_alone=False)(context, CheckedRun(small))
    reference = Reference(one.pieces, one.aliases)
    (fp16, *_) = plan_of(small, user, 4).others
    answer = Worker({"": reference})(context, CheckedRun(fp16.config))
    offs = answer.seen.offs
    of_types = reference.in_precision(fp16.config)
    assert 1e-9 < max(offs.values()) < of_types.tolerance
    assert len(offs) > 1000
    drawn = [key for key in offs if key[0] == 0]
    assert {kind for _, kind, _ in drawn} >= {"exp_avg", AFTER}
    # Masters that begin at weights of 16 bits are a millionth off, and not a thousandth.
    assert [key for key in drawn if of_types.differs(key, offs[key])] == []
    assert [key for key in drawn if not of_types.differs(key, 1e-8)] == []


# ---- Sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [GPT, LLAMA, f"{GPT} --experts 8"], ids=["gpt", "llama", "moe"])
def test_every_size_of_an_axis_runs_and_pairs_of_sizes_that_fit(tmp_path, words):
    every = plan(tmp_path, words).every
    for axis in AXES:
        sizes = {1, 2, 4} if axis == "tp" and words == LLAMA else {1, 2, 3, 4}
        assert {getattr(layout, axis) for layout in every} >= sizes, axis
    if "experts" not in words:
        assert any(layout.tp == 4 and layout.sequence_parallel for layout in every)


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("mixer", ["gated_delta_net", "kda", "mamba2"])
def test_four_tensor_ranks_divide_the_heads_of_a_mixer(tmp_path, mixer, kv_heads):
    """With fewer key/value heads it has fewer key heads there, which ranks then have in common."""
    words = f"{LLAMA} --kv-heads {kv_heads} --set mixer={mixer} mixer_blocks=3:1"
    made = plan(
        tmp_path, f"{words} mixer_value_heads=16 mixer_key_heads={16 if mixer == 'kda' else 8}"
    )
    pairs = [(made.small, made.layouts)] + [(each.config, each.layouts) for each in made.others]
    models = [config.model for config, layouts in pairs if any(x.tp == 4 for x in layouts)]
    assert models
    if mixer != "kda" and kv_heads == 4:
        assert any(model.mixer_key_heads < 4 for model in models)


@pytest.mark.parametrize("words", [GPT, LLAMA, FEW_HEADS], ids=["gpt", "llama", "two heads"])
def test_a_group_of_three_or_four_ranks_gathers_keys(tmp_path, words):
    """It has as many ranks as cp does not share with the KV heads of a rank."""
    made = plan(tmp_path, words)
    pairs = [(made.small, made.layouts)] + [(each.config, each.layouts) for each in made.others]
    groups = {
        layout.cp // torch.tensor(layout.cp).gcd(torch.tensor(config.model.kv_heads)).item()
        for config, layouts in pairs
        for layout in layouts
        if layout.tp == 1
    }
    assert groups & {3, 4}


def test_a_segment_of_four_ranks_is_shorter_than_a_convolution_looks_back(tmp_path):
    made = plan(tmp_path, f"{LLAMA} --set mixer=gated_delta_net mixer_blocks=3:1")
    model = made.small.model
    segment = model.seq_length // (2 * max(layout.cp for layout in made.layouts))
    assert 0 < segment < model.mixer_kernel - 1


def test_tensor_ranks_that_do_not_divide_the_tokens_are_in_some_layout(tmp_path):
    made = plan(tmp_path, f"{GPT} --experts 8")
    rests = {
        each.config.model.seq_length * layout.micro_batch_size % layout.tp
        for each in made.others
        for layout in each.layouts
        if not layout.sequence_parallel
    }
    assert rests - {0}


def test_the_samples_of_an_evaluation_are_divided_by_no_layout(tmp_path):
    made = plan(tmp_path, GPT)
    (name,) = made.small.data.eval_data
    samples = int(name.rpartition(":")[2])
    at_once = {layout.micro_batch_size * (layout.dp or 1) for layout in made.every}
    assert [n for n in at_once if n > 1 and samples % n == 0] == []


@pytest.mark.parametrize(
    ("ranks", "text"), [(2, "tp 2 with cp 2"), (4, "tp 3 with cp 2"), (8, "tp 3 with cp 3")]
)
def test_what_so_many_ranks_leave_out_is_said(tmp_path, ranks, text):
    config, _ = shrink(command_line.parse(GPT.split()), tmp_path)
    chosen = cover(config, min(ranks, 4))
    said = not_covered(chosen, ranks)
    assert said.startswith(f"not covered with {ranks} ranks: ")
    assert text in said
    assert ("three axes" in said) == (ranks < 8)


def test_sizes_that_a_run_refuses_are_said(tmp_path):
    config, _ = shrink(command_line.parse(FEW_HEADS.split()), tmp_path)
    said = not_covered(cover(config, 4), 4)
    assert "tp 3" in said
    assert "tp 4" not in said


# ---- Layouts that are named ----------------------------------------------------------------------


def test_a_named_layout_is_that_of_every_run_that_can_have_it_and_is_resumed(tmp_path):
    made = plan(tmp_path, GPT, named=["dp 2 zero 2", "tp 4"])
    assert [name_of(layout) for layout in made.layouts] == ["dp 2 zero 2"]
    of_others = {each.name: [name_of(x) for x in each.layouts] for each in made.others}
    assert of_others.pop("4 kv-heads") == ["dp 2 zero 2", "tp 4"]
    assert set(map(tuple, of_others.values())) == {("dp 2 zero 2",)}
    resume, of_fp16 = made.resumes()
    assert of_fp16.variant.name == "fp16"
    assert resume.saved_by == resume.going_on[0] == made.layouts[0]


def test_a_layout_that_no_run_can_have_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"tp\(5\) does not divide heads\(6\)"):
        plan(tmp_path, GPT, named=["tp 2", "tp 5"])


@pytest.mark.parametrize("count", [1, 8])
def test_few_layouts_are_saved_in_parts_too(tmp_path, count):
    """A tensor that several ranks have is written in parts, so some ranks have the same one."""
    made = plan(tmp_path, GPT, count=count)
    assert len(made.layouts) == count
    resume = made.resumes()[0]
    assert (resume.saved_by.tp, resume.saved_by.dp) == (2, 2)
    assert all(len(each.layouts) == 1 for each in made.others)
    assert max(map(ranks_of, resume.going_on)) <= 4


# ---- Texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [GPT, f"{GPT} --experts 8"], ids=["gpt", "moe"])
def test_texts_are_decoded_with_each_size_of_an_axis_and_each_place_of_the_last_stage(
    tmp_path, words
):
    layouts = plan(tmp_path, words).layouts
    found = inferring(layouts)
    assert found[:INFERRED] == layouts[:INFERRED]
    for axis in (*AXES, "ep"):
        sizes = [{getattr(layout, axis) for layout in some} for some in (found, layouts)]
        assert sizes[0] == sizes[1], axis
    assert {"interleaved", "zb-v"} <= {layout.schedule for layout in found}
    assert len(found) < len(layouts) / 3


def test_a_text_whose_score_is_not_how_it_was_decoded_is_wrong(tmp_path, monkeypatch):
    user = command_line.parse(f"{GPT} --set window=128".split())
    small, _ = shrink(user, tmp_path)
    write_corpora(small)
    context = start_context(Launch("python"), small.run)
    job = CheckedRun(small, infers=True)
    right = Worker(looks_alone=False)(context, job)
    names = {piece.key[2] for piece in right.pieces if piece.key[1] == "number"}
    assert {inference.LOGITS, inference.SCORES, inference.MISSES} <= names
    found = []
    monkeypatch.setattr(inference, "findings", lambda state: found.append(state) or [])
    Worker()(context, job)
    (state,) = found
    monkeypatch.undo()
    assert list(inference.findings(state)) == []
    score = inference._scored
    monkeypatch.setattr(inference, "_scored", lambda *given: (score(*given)[0] * 1.001, None))
    (sentence,) = inference.findings(state)
    assert sentence.startswith("a text of 9 tokens is decoded with log-probability")


def test_every_token_is_scored_after_each_context():
    requests = inference._requests(7, 1)
    assert len(requests) == 7 * len(inference.CONTEXTS)
    assert all(isinstance(each, ScoringRequest) for each in requests)
    assert {each.ids[-1] for each in requests} == set(range(7))


# ---- Every option --------------------------------------------------------------------------------


# Options whose declarations have no example, as a command line has them.
BY_HAND = """
    --rampup-batch-size 4 4 24 | --batch-schedule 0:4 96:12 | --data a b | --data 0.7 a 0.3 b
    --data a --split 90,5,5 | --eval-data x=a y=b | --eval-data a=b:3 | --skip-samples 3:5
    --data a --cache c | --out o | --wandb w | --partition 3,3,3,3 | --set recompute_blocks=2
    --positions rotary --set rotary_scaling=linear:2 | --positions rotary --set rotary_blocks=1:1
    --set window=8 window_blocks=5:1 | --on-spike skip | --eod-token 3 --mask-eod-loss
"""


def values() -> list[tuple[str, list[str]]]:
    """Each option with each of its examples, as words of a command line that has what it needs."""
    found = []
    for name, field in all_options().items():
        for value in examples(field):
            with contextlib.suppress(UserError):  # an option that needs files of another run
                options = needed(field) | {name: value}
                words = [word for each in options.items() for word in as_words(*each)]
                found.append((f"{name} {value}", words))
    lines = BY_HAND.replace("\n", "|").split("|")
    return found + [(line.strip(), line.split()) for line in lines if line.strip()]


def as_words(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if all_options()[name].metadata["file_only"]:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return ["--set", f"{name}={text}"]
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{flag}"]
    texts = value if isinstance(value, tuple | list) else str(value).split()
    return [f"--{flag}", *map(str, texts)]


def taken(words: list[str], folder) -> tuple | None:
    """The small run of these options and what is said of them; None if the run is refused."""
    given = {word for word in words if word.startswith("--")}
    base = GPT.split()
    for flag in ("--layers", "--hidden", "--heads", "--vocab-size", "--steps"):
        replaced = {flag, "--train-samples"} if flag == "--steps" else {flag}
        if given & replaced:
            place = base.index(flag)
            del base[place : place + 2]
    try:
        request = command_line.parse_request([*base, *words])
        user = dataclasses.replace(request.config, layout=Layout())  # as check.py does
        small, lines = shrink(user, folder)
        validation.check(dataclasses.replace(small, layout=Layout(dp=1)), 1)
    except UserError:
        return None
    return small, [*lines, *unsaid(user, small, request.given, lines)]


def test_every_value_of_every_option_has_a_small_run_and_words(tmp_path):
    """A tuple of numbers was joined as text: --rampup-batch-size ended in a traceback."""
    names = set()
    for name, words in values():
        found = taken(words, tmp_path)
        if found is None:
            continue
        _, said = found
        assert all(isinstance(line, str) for line in said), name
        names.add(name.split()[0])
    assert len(names) > 100
    assert names >= {"--rampup-batch-size", "--batch-schedule", "--data", "--eval-data"}


@pytest.mark.long
@pytest.mark.slow
def test_every_option_runs_small(tmp_path):
    """On one rank, with what is decoded and scored after the steps.

    Half of the values leave the small run as another value does; it runs once.
    """
    context, ran = None, set()
    gc.freeze()  # collections look at what a run has left, and at nothing that was there before
    for name, words in values():
        found = taken(words, tmp_path)
        if found is None or repr(found[0]) in ran:
            continue
        small, _ = found
        ran.add(repr(small))
        try:
            write_corpora(small)
        except UserError:  # a vocabulary of fewer tokens than a corpus has: a sentence
            continue
        context = context or start_context(Launch("python"), small.run)
        small = dataclasses.replace(small, layout=of_one_rank(small))
        answer = Worker(looks_alone=False)(context, CheckedRun(small, infers=True))
        gc.collect()  # a model and its recorder refer to each other: 30 MB a run
        assert all(loss == loss for loss in answer.losses), name
    gc.unfreeze()
    assert len(ran) > 150


# ---- The program ---------------------------------------------------------------------------------


def test_an_error_of_the_program_is_no_verdict():
    program = (
        "import runpy, sys; sys.argv = ['check.py', '--layout', 'tp 2']\n"
        "import tools.checker.shrink as module\n"
        "def fails(*_): raise TypeError('of the tool')\n"
        "module.shrink = fails\n"
        "runpy.run_path('check.py', run_name='__main__')\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert "TypeError: of the tool" in done.stderr


@pytest.mark.slow
def test_an_interrupted_check_says_what_was_equal():
    words = [sys.executable, "check.py"]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        for line in process.stdout:
            if line.startswith("equal"):
                os.kill(process.pid, signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    *_, verdict, resume = rest.splitlines()
    assert verdict.startswith("equal: ")
    assert "not run" in verdict
    assert resume == "not checked: a resume"
