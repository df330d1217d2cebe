"""check.py: if this failed, a person would change a layer and believe a wrong verdict on it."""

import dataclasses
import re
import shlex
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import ROOT, fork_one, fork_ranks, start

import check
import parallel
from base.errors import UserError
from benchmarks.faults.check_faults import asked, copy_of_code, judged
from config import command_line, validation
from config.command_line import parse
from config.schema import EMA, Layout
from distributed.context import start as start_context
from distributed.launch import Launch
from distributed.mesh import Mesh
from layers import attention_masks
from tools.checker.alone import findings
from tools.checker.causes import explanations, operations, shared, title
from tools.checker.compare import Reference, SeenPieces, first_difference
from tools.checker.corpora import write_corpora
from tools.checker.drawn import drawn, new_choices
from tools.checker.layouts import AXES, VALUES, cover, name_of, ranks_of, read, some, to_resume
from tools.checker.recorder import Piece
from tools.checker.runs import CheckedRun, Worker
from tools.checker.session import Session
from tools.checker.shrink import shrink, unsaid
from tools.checker.thresholds import SMALL

GPT = "--layers 12 --hidden 768 --heads 12 --vocab-size 50257 --steps 10"
MOE = f"{GPT} --experts 64 --experts-per-token 8 --balance sequence"


def small(tmp_path: Path, words: str):
    config, lines = shrink(command_line.parse(words.split()), tmp_path)
    write_corpora(config)
    return config, lines


# ---- The small run -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (GPT, {"positions": "learned", "tied": True, "experts": 1}),
        (f"{GPT} --kv-heads 4 --positions rotary --no-tied", {"tied": False, "bias": True}),
        (f"{GPT} --set window=128 window_blocks=5:1 sinks=true", {"sinks": True, "window": 5}),
        (f"{MOE} --set router_groups=8 router_groups_per_token=4", {"router_groups": 4}),
    ],
    ids=["gpt2", "grouped", "windows", "experts"],
)
def test_the_small_run_takes_the_same_paths(tmp_path, words, kept):
    config, lines = small(tmp_path, words)
    model = validation.check(config, 1).model
    assert {name: getattr(model, name) for name in kept} == kept
    assert (model.layers, model.vocab_size) == (4, 61)
    assert model.hidden <= 96
    assert "layers 12 -> 4" in lines[0]


def test_grouped_queries_stay_grouped_and_windows_alternate(tmp_path):
    model = small(tmp_path, f"{GPT} --kv-heads 4 --set window=128 window_blocks=5:1")[0].model
    assert model.heads == 2 * model.kv_heads
    assert {model.attention_of(block).window for block in range(4)} == {0, 5}


def test_what_cannot_stay_is_said(tmp_path):
    words = f"{GPT} --optimizer adamw8bit --data a b --skip-samples 3:5"
    config, lines = small(tmp_path, words)
    assert (config.training.optimizer, config.training.precision) == ("adamw", "fp64")
    text = "\n".join(lines)
    for word in (
        "adamw8bit has no fp64",
        "random documents in the place of a, b",
        "--skip-samples",
    ):
        assert word in text


def test_given_options_that_the_small_run_has_not_are_named(tmp_path):
    words = f"{GPT} --tp 2 --save-every 3 --lr 1e-5 --heads 12 --weight-decay 0.3"
    request = command_line.parse_request(words.split())
    config, lines = shrink(request.config, tmp_path)
    assert list(unsaid(request.config, config, request.given, lines)) == [
        "steps 10 -> 3, lr 1e-05 -> 0.001",
        "without --save-every",
    ]


@pytest.mark.parametrize("number", range(60))
def test_drawn_runs_become_small_runs(tmp_path, number):
    config, _ = small(tmp_path, " ".join(drawn(f"7/{number}")))
    validation.check(config, 1)


# ---- Layouts -------------------------------------------------------------------------------------


def settings(layout: Layout) -> set:
    found = {(axis, getattr(layout, axis)) for axis in ("tp", "pp", "cp", "dp")}
    found = {(axis, size) for axis, size in found if size > 1}
    values = {(name, getattr(layout, name)) for name in VALUES}
    return found | {(n, v) for n, v in values if v is not None and v != VALUES[n][0]}


@pytest.mark.parametrize("words", [GPT, MOE], ids=["dense", "experts"])
def test_the_layouts_cover_every_pair(tmp_path, words):
    config, _ = small(tmp_path, words)
    chosen = cover(config, 4)
    assert len(chosen) == len(set(map(name_of, chosen))) < 80
    assert max(map(ranks_of, chosen)) == 4
    covered = {frozenset(pair) for x in chosen for pair in combinations(settings(x), 2)}
    for layout in some(config, 4, 100, "others"):
        missing = [p for p in combinations(settings(layout), 2) if frozenset(p) not in covered]
        assert missing == [], name_of(layout)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("words", [GPT, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("most", [2, 4])
def test_a_saved_state_is_loaded_in_every_way(tmp_path, words, optimizer, most):
    """Else a momentum that tensor ranks do not load would be in no layout."""
    config, _ = small(tmp_path, f"{words} --optimizer {optimizer}")
    saved_by, going_on = to_resume(config, most)
    assert ranks_of(saved_by) == most
    assert len(going_on) < 6
    assert all(ranks_of(layout) <= most for layout in going_on)
    for axis in AXES:
        assert any(getattr(layout, axis) > 1 for layout in going_on), axis
    assert any(layout.zero > 1 for layout in going_on)
    assert any((layout.ep or 1) > 1 for layout in going_on) == (config.model.experts > 1)


def test_a_layout_is_read_as_it_is_written(tmp_path):
    config, _ = small(tmp_path, GPT)
    for layout in cover(config, 4):
        assert read(name_of(layout), config) == layout
    assert read("--tp 2 --pp 2", config) == read("tp 2 pp 2", config)
    with pytest.raises(UserError, match=r"tp\(5\) does not divide heads\(6\)"):
        read("tp 5", config)


# ---- The comparison ------------------------------------------------------------------------------


def piece(values, step=1, name="blocks.0.attention.out", kind="output", rows=None, samples=None):
    place = (
        np.arange(values.shape[0]) if rows is None else rows,
        np.arange(values.shape[1]) if samples is None else samples,
    )
    return Piece((step, kind, name), place, values)


WHOLE = np.random.default_rng(0).normal(size=(8, 4, 6))
ONE = Reference([piece(np.arange(32.0).reshape(8, 4), name="tokens"), piece(WHOLE)], {})


def difference_of(layout: Layout, pieces_of_ranks):
    """What is found of the pieces of each rank, given with its place on the axes."""
    seen = []
    for rank, (place, pieces) in enumerate(pieces_of_ranks):
        mesh = Mesh()
        mesh.rank, mesh.place = rank, {"pp": 0, "dp": 0, "cp": 0, "tp": 0} | place
        seen.append(SeenPieces.by(ONE, pieces, layout.tp, mesh))
    return first_difference(ONE, seen)


def test_equal_parts_are_equal():
    layout = Layout(tp=2, dp=1)
    cut = [({"tp": n}, [piece(WHOLE[..., 3 * n : 3 * n + 3])]) for n in range(2)]
    assert difference_of(layout, cut) is None
    assert difference_of(layout, [({}, [piece(WHOLE * (1 + 1e-12))])]) is None


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([WHOLE * 0.3, WHOLE * 0.7], "the sum over tp were missing"),
        ([2 * WHOLE, 2 * WHOLE], "the sum over tp were taken twice"),
        ([WHOLE / 2, WHOLE / 2], "the sum over tp were missing"),
        ([WHOLE + np.ones(6), WHOLE + np.ones(6)], "a bias were added on several ranks"),
        ([WHOLE[[1, 0, 2, 3, 4, 5, 6, 7]]] * 2, "position 0 has the values of position 1"),
        ([WHOLE * 0, WHOLE * 0], "all of it is 0"),
        ([WHOLE * np.nan, WHOLE], "not finite"),
    ],
    ids=["missing", "doubled", "halved", "bias", "order", "zero", "nan"],
)
def test_values_are_explained(parts, words):
    layout = Layout(tp=2, dp=1)
    found = difference_of(layout, [({"tp": n}, [piece(x)]) for n, x in enumerate(parts)])
    assert found is not None
    assert found.key == (1, "output", "blocks.0.attention.out")
    assert words in " ".join(explanations(ONE, found, layout))


def test_an_order_is_told_from_equal_tokens_of_other_samples():
    """Rows of an embedding are equal where tokens are: sample 0 ends with the first token of 1."""
    rng = np.random.default_rng(3)
    whole = rng.normal(size=(4, 2, 6))
    whole[3, 0] = whole[0, 1]  # position 3 of sample 0 has the token of position 0 of sample 1
    one = Reference([piece(whole)], {})
    moved = whole[[3, 1, 2, 0]]
    mesh = Mesh()
    mesh.rank, mesh.place = 0, {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    found = first_difference(one, [SeenPieces.by(one, [piece(moved)], 1, mesh)])
    assert found is not None
    text = " ".join(explanations(one, found, Layout(tp=4, dp=1)))
    assert "position 0 has the values of position 3: as if tp's order" in text


@pytest.mark.parametrize("factor", [1 + 1e-7, 1 - 1e-7, 1 + 3e-8])
def test_a_factor_that_is_printed_as_1_explains_nothing(factor):
    parts = [({"tp": n}, [piece(WHOLE * factor)]) for n in range(2)]
    found = difference_of(Layout(tp=2, dp=1), parts)
    assert found is not None
    assert "times one rank's" not in " ".join(explanations(ONE, found, Layout(tp=2, dp=1)))


@pytest.mark.parametrize(
    ("share", "words"), [(1, "not cleared"), (0.02, "times 0.02, as if clipped")]
)
def test_what_is_left_of_the_step_before_is_explained(share, words):
    before = np.random.default_rng(1).normal(size=WHOLE.shape)
    both = Reference([piece(before, step=1), piece(WHOLE, step=2)], {})
    mesh = Mesh()
    mesh.rank, mesh.place = 0, {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    found = first_difference(
        both, [SeenPieces.by(both, [piece(WHOLE + share * before, step=2)], 1, mesh)]
    )
    assert found is not None
    assert words in " ".join(explanations(both, found, Layout(dp=1)))


def test_a_number_that_is_not_finite_differs():
    found = difference_of(Layout(dp=1), [({}, [piece(np.full_like(WHOLE, np.inf))])])
    assert found is not None
    assert found.off == np.inf


def test_what_differing_layouts_share():
    tp, cp, both = Layout(tp=2, dp=1), Layout(cp=2, dp=1), Layout(tp=2, cp=2, dp=1)
    plain = Layout(dp=2)
    assert "tp above 1 differs, and no other" in shared([tp, both], [cp, plain])
    assert "tp above 1 and cp above 1" in shared([both], [tp, cp, plain])
    zero = dataclasses.replace(plain, zero=2)
    assert "ZeRO 2" in shared([zero], [plain, tp, cp])


# ---- One rank ------------------------------------------------------------------------------------


def one_rank(tmp_path, words: str) -> list[str]:
    """What one rank says about itself, in this process."""
    config, _ = small(tmp_path, words)
    return list(findings(config, start_context(Launch("python"), config.run)))


DOCUMENTS = f"{GPT} --positions rotary --eod-token 0 --reset-attention --mask-eod-loss"


RIGHT = {
    "causal": GPT,
    "documents": DOCUMENTS,
    "windows": f"{GPT} --set window=128 sinks=true",
    "experts": MOE,
    "prefix": f"{GPT} --objective prefix",
    "z-loss": f"{GPT} --z-loss 0.01",
}


@pytest.mark.parametrize("words", RIGHT.values(), ids=RIGHT)
def test_one_rank_is_right(tmp_path, words):
    assert one_rank(tmp_path, words) == []


def test_one_rank_that_sees_the_next_token_is_wrong(tmp_path, monkeypatch):
    attend = F.scaled_dot_product_attention

    def wrong(q, k, v, is_causal=False, **named):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
        return attend(q, k, v, attn_mask=mask, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    (sentence,) = one_rank(tmp_path, GPT)
    assert re.search(r"token \d+ of a sample depends on token \d+, which it may not see", sentence)


def test_documents_that_see_one_another_are_wrong(tmp_path, monkeypatch):
    whole = attention_masks.range_mask
    monkeypatch.setattr(
        attention_masks, "range_mask", lambda a, b, *of: whole(torch.zeros_like(a), b, *of)
    )
    assert "which it may not see" in one_rank(tmp_path, DOCUMENTS)[0]


@pytest.mark.slow
def test_a_gradient_that_is_no_derivative_is_named(tmp_path, monkeypatch):
    right = parallel.GradSink.add

    def twice(sink, x, grad):
        right(sink, x, 2 * grad if sink.weight.spec.name.endswith("mlp.up.weight") else grad)

    monkeypatch.setattr(parallel.GradSink, "add", twice)
    (sentence,) = one_rank(tmp_path, GPT)
    assert "8 of" in sentence
    assert "that of blocks.3.mlp.up.weight is 2 times the loss's" in sentence or (
        "that of blocks.0.mlp.up.weight is 2 times the loss's" in sentence
    )


def test_z_losses_beside_losses_are_compared_as_two_numbers_of_each_token(tmp_path):
    """A head whose output (2, s, b) had no record left out what is behind it."""
    config, _ = small(tmp_path, f"{GPT} --z-loss 0.01")
    alone = dataclasses.replace(config, layout=dataclasses.replace(config.layout, dp=1))
    answer = Worker(looks_alone=False)(
        start_context(Launch("python"), config.run), CheckedRun(alone)
    )
    shapes = {piece.values.shape for piece in answer.pieces if piece.key[1:] == ("output", "head")}
    assert shapes == {(24, config.layout.micro_batch_size, 2)}


# ---- Modules that run several times --------------------------------------------------------------

RUNS_BLOCK = "                x, y = block(x, y, mask, rotary, cache, tokens)\n"
ADDS_BLOCK = "            self.blocks.append(block)\n"
LOSSES = "        losses = self.head(x, batch.labels)\n"
SPEC = "        self.spec = self.weight.spec\n"
# Edits of model.py: what is there once, and what stands before or after it.
TWICE = {
    "a block runs twice": [
        (RUNS_BLOCK, RUNS_BLOCK * 2),
        (
            ADDS_BLOCK,
            "            for linear in (*block.attention.children(), *block.mlp.children()):\n"
            "                for p in linear.parameters():\n"
            "                    p.passes = 2\n" + ADDS_BLOCK,
        ),
    ],
    "two blocks share an MLP": [
        (
            ADDS_BLOCK,
            "            if n % 2:\n"
            "                block.mlp = self.blocks[n - 1].mlp\n"
            "                for p in block.mlp.parameters():\n"
            "                    p.passes = 2\n" + ADDS_BLOCK,
        )
    ],
    "the head runs twice": [
        (LOSSES, f"{LOSSES}        losses = losses + self.head(x, batch.labels_after(1))\n"),
        (SPEC, f"{SPEC}        self.weight.passes = 2\n"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWICE)
def test_a_module_that_runs_twice_in_a_pass_is_compared_call_by_call(name, tmp_path):
    copy_of_code(tmp_path)
    model = tmp_path / "model.py"
    for old, new in TWICE[name]:
        assert model.read_text().count(old) == 1
        model.write_text(model.read_text().replace(old, new))
    shape = "--layers 4 --hidden 16 --heads 4 --seq-length 8 --vocab-size 61 --no-tied"
    layouts = ["--layout", "tp 2 pp 2 partition 2,2 schedule zb-h1"]
    words = [sys.executable, "check.py", *shape.split(), *layouts]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_operations_of_a_second_call_are_those_of_the_first():
    for name in ("head", "blocks.0.mlp.up", "blocks.0.attention.out"):
        first, second = (1, "output", name), (1, "output", f"{name} (call 2)")
        of_both = Reference([piece(WHOLE, 1, name), piece(WHOLE, 1, second[2])], {})
        layout = Layout(tp=2, dp=1)
        assert operations(of_both, second, layout) == operations(of_both, first, layout)
        assert title(second) == f"{title(first).partition(':')[0]} (call 2)"


def test_the_gradient_of_a_tensor_that_attention_uses_names_attention():
    """A linear layer multiplies its matrix with its input; others are used in some other way."""
    names = ("blocks.0.attention.out", "blocks.0.attention.out.weight", "blocks.0.attention.sinks")
    one = Reference([piece(WHOLE, 1, names[0])], {})
    words = [operations(one, (1, "gradient", name), Layout(tp=2, dp=1)) for name in names[1:]]
    assert words[0].startswith("the product with the layer's input, the sum over micro-batches")
    assert words[1].startswith("the backward of attention: positions, mask and softmax, the sum")


def test_the_operations_of_an_average_of_weights_are_those_of_the_update_and_its_own():
    found = operations(Reference([], {}), (1, EMA, "head.weight"), Layout(dp=1))
    assert "learning rate" in found
    assert "the average of --ema" in found


def test_thresholds_are_where_they_are_said_to_be():
    """A constant that has moved would leave its path unchecked."""
    for (module, name), value in SMALL.items():
        there = getattr(module, name)
        assert (there["cpu"] if isinstance(there, dict) else there) > (
            value["cpu"] if isinstance(value, dict) else value
        )


# ---- The program ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--layout", "tp 5"], "tp(5) does not divide heads(6)"),
        (["--minuts", "3"], "did you mean '--minutes'"),
        (["--ranks", "99"], "--ranks is from 1 to 16, not 99"),
        (["--heads", "4"], "the model has no --layers"),
        (["--config", "none.toml"], "cannot read --config none.toml"),
        (["--layout", "tp 2 --lr 3"], "options that are not of a layout: lr"),
        (["--layouts", "0"], "--layouts is at least 1, not 0"),
        (["--random", "-1"], "--random is at least 1, not -1"),
        (["--at-once", "0"], "--at-once is at least 1, not 0"),
        (["--minutes", "nan"], "--minutes is a number above 0, not nan"),
        (["--layout", "tp 2", "--layouts", "3"], "give one of --layout and --layouts"),
        (["--layout", "tp 2", "--ranks", "2"], "give one of --layout and --ranks"),
        (["--random", "2", "--layout", "tp 2"], "give one of --random and --layout"),
        (["--random", "2", "--all"], "give one of --random and --all"),
        (["--random", "2", "--cuda"], "give one of --random and --cuda"),
        (["--random", "2", "--tp=2", "--zero", "3"], "draws its layouts: give it no --tp, --zero"),
        (["--random", "2", "--config", "none.toml"], "none.toml"),
        (
            ["--random", "2", "--optimizer", "sgd", "--muon-adamw-lr", "1"],
            "--muon-adamw-lr 1 needs --optimizer muon",
        ),
    ],
    ids=[
        *("layout", "misspelt", "ranks", "model", "file", "no layout's", "no layouts"),
        *("fewer runs", "none at once", "minutes", "layout and layouts", "layout and ranks"),
        *(
            "random layout",
            "random all",
            "random cuda",
            "random layout option",
            "random file",
            "random apart",
        ),
    ],
)
def test_mistakes_are_one_sentence_before_torch(words, sentence):
    program = "import runpy, sys; sys.argv = ['check.py', *sys.argv[1:]]\n"
    program += "try: runpy.run_path('check.py', run_name='__main__')\n"
    program += "finally: print({'torch', 'numpy'} & set(sys.modules))"
    outcome = start([sys.executable, "-c", program, *words], 60)
    assert (outcome.status, outcome.out) == (2, "set()\n")
    assert sentence in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_right_layouts_are_equal():
    """Also what is saved in one layout and goes on in others."""
    outcome = fork_one("check.py", "--layouts", "10", "--ranks", "2", timeout=600)
    assert outcome.status == 0, outcome.out + outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].startswith("18 layouts of up to 2 ranks, each against one rank: 10 in fp64, 1 ")
    assert [line.split()[0] for line in lines].count("equal") == 18
    assert lines[-1].startswith("equal: 18 layouts compute what one rank does")


def test_a_choice_that_no_table_names_is_drawn():
    """Such as a new optimizer, whose writer need not know of the tables."""
    named = {"run": {"optimizer": [1, "adamw", "muon"], "lr_schedule": [0.5, "cosine"]}}
    assert new_choices(named, "optimizer") == ["adafactor", "sgd"]
    assert "constant" in new_choices(named, "lr_schedule")
    assert new_choices(named, "norm") == [], "it is in no table"


@pytest.mark.slow
def test_options_narrow_what_is_drawn():
    """Each drawn run has the given options, and of the others those that go with them."""
    words = ["--optimizer", "muon", "--set", "kv_lora_rank=12"]
    given = {"optimizer": "muon", "kv_lora_rank": 12}
    runs = [parse(drawn(f"narrow/{number}", words, given)) for number in range(6)]
    assert {(run.training.optimizer, run.model.kv_lora_rank) for run in runs} == {("muon", 12)}
    assert len({run.model.layers for run in runs}) > 1
    assert len({run.training.muon_qkv for run in runs}) > 1  # drawn with an optimizer that is given


def test_a_model_that_is_given_keeps_its_shape():
    run = parse(drawn("1/1", ["--model", "llama-3-8b"], {"model": "llama-3-8b"}))
    assert (run.model.layers, run.model.kv_heads) == (32, 8)


@pytest.mark.parametrize("words", ["--model gpt2-124m", "--model=gpt2-124m", "--layers 2"])
def test_an_option_of_train_py_is_no_mistyped_one_of_check_py(words):
    with pytest.raises(UserError, match=r"^--ranks is at least 1, not 0$"):
        check.main([*words.split(), "--ranks", "0"])


def test_a_mistyped_option_of_check_py_is_named():
    for word, meant in (("--layuots", "--layouts"), ("--modul=a.py:B", "--module")):
        with pytest.raises(UserError, match=rf"^unknown argument '{word}'; did you mean '{meant}'"):
            check.main([word])


@pytest.mark.parametrize(
    "words",
    [  # one key/value head on two ranks; a convolution that reaches no further than its kernel
        "--kv-heads 1 --positions rotary --set qk_norm=head --layout 'tp 2'",
        "--kv-heads 1 --positions rotary --set qk_norm=full --layout 'tp 2'",
        "--positions rotary --set mixer=short_conv mixer_kernel=1 mixer_blocks=1:2 window=8 "
        "--reset-attention --eod-token 3 --layout 'dp 2'",
        "--positions rotary --set mixer=short_conv mixer_kernel=3 --layout 'tp 2'",
    ],
)
def test_right_code_is_not_accused_by_what_only_parts_of_it_have(words):
    shape = ["--layers", "2", "--hidden", "96", "--heads", "6", "--seq-length", "64"]
    outcome = fork_one("check.py", *shape, "--vocab-size", "100", *shlex.split(words), timeout=600)
    assert outcome.status == 0, outcome.out + outcome.err


def test_random_runs_are_those_of_one_rank():
    outcome = fork_one("check.py", "--random", "2", "--seed", "11", timeout=1200)
    assert outcome.status == 0, outcome.out + outcome.err
    assert outcome.out.splitlines()[-1] == "2 runs, 4 layouts, 0 runs differ"


# A fault of benchmarks/faults/check_faults.toml by a part of its name, and the layout to run.
FAULTS = {
    "row-parallel matrix is left out": "tp 2",
    "rotary positions count from 0": "cp 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_named(name):
    import tomllib

    table = tomllib.loads((ROOT / "benchmarks/faults/check_faults.toml").read_text())
    (fault,) = [fault for fault in table["fault"] if name in fault["name"]]
    options = f"{fault.get('options', '')} --layout '{FAULTS[name]}'"
    (row,) = asked(table["runs"], fault | {"options": options})
    assert judged(fault, row) == (True, True, True), row["text"]


@pytest.mark.slow
def test_experts_on_several_nodes_are_checked_on_one():
    """With --ep 4 ranks are on two nodes by name, so a token is sent once to each."""
    summed = "AddUpWeighted.apply(rows, weights"
    fault = {"name": "a node's sum without the gradient of its weights"}
    fault |= {
        "file": "distributed/node_dispatch.py",
        "find": summed,
        "replace": f"{summed}.detach()",
    }
    fault |= {"options": f"{GPT_16} --experts 8 --experts-per-token 3 --layout 'dp 4 ep 4'"}
    fault |= {
        "tensor": r"gradient of the output of .*router",
        "operation": "backward of the experts",
    }
    (row,) = asked({}, fault)
    assert judged(fault, row) == (True, True, True), row["text"]


GPT_16 = "--layers 4 --hidden 16 --heads 4 --seq-length 8 --vocab-size 61 --steps 4"
ADAFACTOR = f"{GPT_16} --optimizer adafactor --lr 1e-2"
# Runs that showed a defect in an earlier version: options, and the layout.
FOUND = {
    # Adafactor's means of the embedding counted rows of padding.
    "padding": (ADAFACTOR, "dp 2 pad-vocab-multiple 48"),
    # The one of two replicas that owns no tied matrix ended in an exception.
    "no matrix": (ADAFACTOR, "pp 2 dp 2"),
    # The ranks waited for each other for ever.
    "blocking": (f"{GPT_16} --set blocking=true", "pp 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_defects_of_random_runs_are_mended(name):
    words, layout = FOUND[name]
    outcome = fork_one("check.py", *words.split(), "--layout", layout, timeout=600)
    assert outcome.status == 0, outcome.out + outcome.err


@pytest.mark.slow
def test_muon_is_saved_in_fp64_at_once():
    """State that Muon's matrices do not have was written in fp32 among tensors of fp64."""
    words = f"{GPT_16} --optimizer muon --save-every 1 --set async_save=false --layouts 2 --ranks 2"
    outcome = fork_one("check.py", *words.split(), timeout=600)
    assert outcome.status == 0, outcome.out + outcome.err


@pytest.mark.slow
def test_a_stage_without_blocks_ends_its_run(tmp_path):
    """The end of the run divided by the share of time of a stage that has no blocks."""
    words = f"train.py {GPT_16} --pp 3 --partition 0,0,4 --set check_speed_every=1 --out {tmp_path}"
    outcome = fork_ranks(3, *words.split())
    assert outcome.status == 0, outcome.err


def test_a_check_whose_time_is_over_before_a_layout_ran_has_no_verdict():
    """Else a program that reads the status would keep any change on a busy machine."""
    one = SimpleNamespace(alone=(), losses=[1.0])
    engine = SimpleNamespace(begin=lambda: one, reference=None, reference_of=None)
    late = Session(as_json=True, all_of_them=False, minutes=1e-9)
    with pytest.raises(UserError, match="no layout ran: one rank took 0 s; give more"):
        late.judge(engine, lambda may_begin: iter(["x"] * may_begin()), 3, {})
