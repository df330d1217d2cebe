"""Options: if this failed, flags, files and presets would mean something else than they say."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace

import pytest
from ranks import ROOT

from architecture.shape import ModelShape
from base import errors
from base.cli import VERSION, whole_number
from base.errors import UserError
from config.command_line import parse, parse_request, to_words
from config.schema import GROUPS, Config
from config.spelling import preset
from config.timeline import Timeline
from config.validation import check, is_met

BASE = "--layers 4 --hidden 64 --heads 4 --global-batch-size 8 --steps 3"


def configure(words: str, ranks: int = 1) -> Config:
    return check(parse(words.split()), ranks)


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "gpt2-124m"\n[layout]\ntp = 2\nmicro-batch-size = 4\n')
    config = parse(["--config", str(path), "--tp", "4", "--layers", "6"])
    assert (config.layout.tp, config.layout.micro_batch_size) == (4, 4)
    assert (config.model.layers, config.model.hidden) == (6, 768)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("laers = 3\n", "unknown key 'laers'; did you mean 'layers'?"),
        ("layers = 'many'\n", "--layers takes a whole number, not 'many'"),
        ("layers = \n", "is not TOML"),
    ],
)
def test_a_wrong_file_gets_its_sentence(tmp_path, text, sentence):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        parse(["--config", str(path)])
    assert sentence in str(caught.value)


# What tests/data/refused_options.txt has, since its values are texts or bound to another option;
# tests/test_declared_options.py tries the others with values that their declarations say.
BY_HAND = {"rotary_scaling", "rotary_blocks", "window_blocks", "window_rotary_scaling", "split"}
BY_HAND |= {"cache", "after_save", "record_routing", "pin_routing", "decay_tokens", "max_positions"}


def test_an_option_that_needs_another_says_nothing_at_its_default():
    for field in (field for group in GROUPS.values() for field in fields(group)):
        if needs := field.metadata["needs"]:
            is_met(configure(BASE), needs)  # an error if it names no option
    same = "--set sgd_momentum=0.9 max_positions=32 async_save=true loss_scale=0"
    assert configure(f"{BASE} {same} --positions alibi --seq-length 32").model.max_positions == 32


def test_what_a_file_has_beside_a_model_is_a_note_not_a_mistake(tmp_path):
    old = {"config": {"model": {"layers": 2, "hidden": 32, "heads": 4, "positions": "alibi"}}}
    old["config"]["model"] |= {"rotary_scaling": "linear:2", "max_positions": 9}
    (tmp_path / "run.json").write_text(json.dumps(old))
    request = parse_request(["--resume", str(tmp_path), "--steps", "3"])
    assert check(request.config, 1).model.rotary_scaling == "linear:2"
    note = "rotary_scaling linear:2 of the model changes nothing with --positions alibi"
    assert request.notes == (note,)
    assert parse_request(["--model", "llama-2-7b", "--steps", "3"]).notes == ()
    (note,) = parse_request(["--model", "llama-3-8b", "--positions", "alibi"]).notes
    assert note.startswith("rotary_base 500000 of the model changes nothing")


EXPERTS = "--layers 2 --hidden 64 --heads 4 --steps 3 --experts 8"


def test_a_number_of_experts_alone_is_a_model_that_trains():
    """Two experts for each token, as in Mixtral and in Megatron-LM, and no biases."""
    model = check(configure(EXPERTS), 1).model
    assert (model.experts_per_token, model.bias, model.qkv_bias) == (2, False, False)
    assert check(configure("--model gpt2-124m --steps 3 --experts 4"), 1).model.mlps == (4, 2)
    dense = configure(BASE).model
    assert (dense.experts_per_token, dense.bias, dense.qkv_bias) == (1, True, True)
    one = configure("--model mixtral-8x7b --experts 1 --steps 3").model
    assert (one.bias, one.experts_per_token) == (False, 1)  # the biases do not come back
    # Megatron-LM's experts have biases.
    assert check(configure(EXPERTS.replace("--experts", "--num-experts")), 1).model.bias


def test_names_that_mean_something_else_beside_other_options_are_noted_or_refused():
    base = "--num-layers 2 --hidden-size 2048 --num-attention-heads 4 --train-iters 3"
    request = parse_request(f"{base} --swiglu".split())
    assert request.config.model.ffn_hidden == 5504
    assert any("MLP has 5440 columns" in note for note in request.notes)
    request = parse_request(f"{base} --swiglu --ffn-hidden-size 5440".split())
    assert not any("columns" in note for note in request.notes)
    with pytest.raises(UserError, match="is a LayerNorm in Megatron-LM without --normalization"):
        parse_request(f"{base} --qk-layernorm".split())
    preset_with_rmsnorm = "--model llama-3-8b --train-iters 3 --qk-layernorm"
    assert parse_request(preset_with_rmsnorm.split()).config.model.qk_norm == "head"
    request = parse_request(f"{base} --qk-layernorm --normalization RMSNorm".split())
    assert request.config.model.qk_norm == "head"
    recompute = "--recompute-granularity full --recompute-method"
    request = parse_request(f"{base} {recompute} block --recompute-num-layers 1".split())
    assert request.config.layout.recompute_layers == 1
    with pytest.raises(UserError, match="leave it out: without --recompute-num-layers all blocks"):
        parse_request(f"{base} {recompute} uniform --recompute-num-layers 1".split())
    for name in ("--squared-relu", "--quick-geglu"):
        with pytest.raises(UserError, match=f"{name}: there is no"):
            parse_request(f"{base} {name}".split())


@pytest.mark.parametrize("change", [{}, {"experts_per_token": 1, "router_normalised": False}])
def test_a_run_with_experts_resumes_with_what_its_run_json_says(change, tmp_path):
    model = asdict(configure(EXPERTS).model) | change
    (tmp_path / "run.json").write_text(json.dumps({"config": {"model": model}}))
    resumed = configure(f"--resume {tmp_path} --steps 3").model
    assert asdict(resumed) == model


def test_the_words_of_a_model_leave_out_what_follows_from_others():
    for words in (EXPERTS, f"{BASE} --no-bias", f"{BASE} --kv-heads 2 --ffn-hidden 90", BASE):
        config = configure(words)
        short = to_words(config.model)
        assert configure(f"{' '.join(short)} --steps 3").model == config.model
        assert not {"--set", "--bias", "--experts-per-token"} & set(short)


KEYS = {
    "norm_eps": 1e-3,
    "head_size": 24,
    "qkv_bias": True,
    "rotary_scaling": "llama3:8:1:4:8192",
    "rotary_fraction": 0.5,
    "router_groups": 2,
    "expert_interval": 2,
}


def test_keys_without_flags_come_from_a_run_file_or_from_set_and_go_into_words(tmp_path):
    """A preset with one key changed; a key of --set overrides the file's."""
    for n, text in enumerate(
        (
            '[model]\nmodel = "gpt2-124m"\nnorm_eps = 0.001\n[training]\nsteps = 3\n',
            'model = "gpt2-124m"\nnorm-eps = 0.001\n[training]\nsteps = 3\n',
        )
    ):
        (tmp_path / f"{n}.toml").write_text(text)
        model = configure(f"--config {tmp_path}/{n}.toml").model
        assert model == replace(preset("gpt2-124m"), norm_eps=1e-3)
        model = configure(f"--config {tmp_path}/{n}.toml --set norm_eps=2e-3").model
        assert model.norm_eps == 2e-3
    lines = [f"{key} = {json.dumps(value)}" for key, value in KEYS.items()]
    (tmp_path / "keys.toml").write_text("\n".join(["[model]", *lines]))
    base = f"{BASE} --positions rotary --experts 4"
    written = configure(f"{base} --config {tmp_path}/keys.toml")
    assert {key: getattr(written.model, key) for key in KEYS} == KEYS
    assert check(written, 1).model == written.model
    words = to_words(written.model)
    assert words.index("--set") == len(words) - len(KEYS) - 1
    assert configure(f"{' '.join(words)} --steps 3").model == written.model
    given = parse_request(f"{base} {' '.join(words[words.index('--set') :])}".split()).given
    assert given >= KEYS.keys()


BY_KEY = {
    "kv_heads=2": "--kv-heads 2",
    "hidden=64 heads=8": "--hidden 64 --heads 8",
    "train_samples=2k": "--train-samples 2k",
    "lr=1e-3 min_lr=0": "--lr 1e-3 --min-lr 0",
    "bias=false norm_eps=1e-6": "--no-bias --set norm_eps=1e-6",
    "reset-attention=true eod_token=0": "--reset-attention --eod-token 0",
    "optimizer=muon muon_qkv=head": "--optimizer muon --set muon_qkv=head",
    "rampup_batch_size=[2,2,16]": "--rampup-batch-size 2 2 16",
    "batch_tokens=1Ki seq_length=64": "--batch-tokens 1Ki --seq-length 64",
    "model=gpt2-124m": "--model gpt2-124m",
    "precision=auto": "--precision auto",
    "out=runs/a": "--out runs/a",
}


@pytest.mark.parametrize("keys", BY_KEY)
def test_set_gives_any_option_by_its_key(keys):
    base = ["--layers", "1", "--hidden", "32", "--heads", "4", "--steps", "2"]
    names = {word.partition("=")[0] for word in keys.split()}
    if "hidden" in names:
        base = [*base[:2], *base[6:]]
    if "train_samples" in names:
        base = base[:-2]
    found = parse_request([*base, "--set", *keys.split()])
    expected = parse_request([*base, *BY_KEY[keys].split()])
    assert (found.config, found.given) == (expected.config, expected.given)


def test_a_key_of_several_values_may_have_blanks_and_is_given_once():
    base = ["--layers", "1", "--hidden", "32", "--heads", "4", "--steps", "2"]
    found = parse([*base, "--set", "rampup_batch_size=2 2 16", "skip_samples=0:4 6:8"])
    assert found.training.rampup_batch_size == (2, 2, 16)
    assert found.data.skip_samples == ("0:4", "6:8")
    for words in (
        "--lr 1 --set lr=2",
        "--bias --set bias=false",
        "--num-query-groups 2 --set kv_heads=4",
    ):
        with pytest.raises(UserError, match="are one option: give one"):
            parse([*base, *words.split()])


def test_the_help_has_a_flag_for_each_option_but_for_the_keys_of_run_files(capsys):
    with pytest.raises(SystemExit):
        parse(["--help", "all"])
    text = capsys.readouterr().out
    flags = set(re.findall(r"--[a-z][\w-]+", text))
    for field in (field for group in GROUPS.values() for field in fields(group)):
        is_flag = "--" + field.name.replace("_", "-") in flags
        assert is_flag == (not field.metadata["file_only"]), field.name
        assert not field.metadata["file_only"] or field.name in text


# Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh with smaller sizes: its 34 options.
GPT3_175B = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--attention-backend auto --micro-batch-size 1 --global-batch-size 8 --rampup-batch-size 4 4 16
--train-iters 50 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .1
--lr-decay-iters 43 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
--data-path corpus --vocab-file v.json --merge-file m.txt --split 949,50,1 --log-interval 100
--save-interval 10 --eval-interval 10 --save OUT --load OUT --eval-iters 2 --tensorboard-dir tb
"""


def test_megatrons_example_is_understood_with_a_note_of_our_names():
    words = GPT3_175B.split()
    assert len({word for word in words if word.startswith("--")}) == 34
    request = parse_request(words)
    config = check(request.config, 1)
    ours = (
        "--layers 2 --hidden 64 --heads 4 --seq-length 32 --set max_positions=32 --init-std 0.006"
    )
    ours += (
        " --global-batch-size 8 --rampup-batch-size 4 4 16 --steps 50 --precision fp16 --lr 6e-5"
    )
    ours += " --min-lr 6e-6 --lr-warmup-samples 34 --lr-decay-samples 344 --split 949,50,1"
    ours += " --data corpus"
    ours += " --log-every 100 --save-every 10 --eval-every 10 --out OUT --resume auto --tensorboard"
    assert config == configure(f"{ours} --eval-samples 16")
    assert request.given >= {"lr_warmup_samples", "eval_samples", "resume"}
    names, *instead = request.notes
    for text in ("--num-layers is --layers,", "--load is --resume auto", "--fp16 is --precision f"):
        assert text in names
    assert [note.split()[0] for note in instead] == [
        "--attention-backend", "--vocab-file", "--merge-file", "--tensorboard-dir",
    ]  # fmt: skip
    underscores = [f"--{w[2:].replace('-', '_')}" if w.startswith("--") else w for w in words]
    assert parse(underscores) == request.config
    equals = ["--num_layers=2", "--hidden-size=64", "--num-attention-heads=4", "--train-iters=3"]
    assert parse(equals) == parse(f"{BASE} --layers 2 --global-batch-size 8".split())
    assert parse([*BASE.split(), "--context-parallel-size", "2"]).layout.cp == 2


def test_what_megatrons_names_mean_depends_on_the_batch_of_flag_or_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("global-batch-size = 16\ntrain-samples = 1000\n")
    words = f"--config {path} --model gpt2-124m --eval-iters 3 --lr-warmup-fraction 0.01".split()
    config = parse(words)
    assert (config.data.eval_samples, config.training.lr_warmup_samples) == (48, 10)
    words = ["--model", "gpt2-124m", "--steps", "5", "--eval-iters", "3"]
    assert parse(words).data.eval_samples == 24
    assert parse([*words, "--batch-schedule", "0:4", "1M:12"]).data.eval_samples == 36


def test_numbers_may_have_a_unit():
    words = f"{BASE} --lr-warmup-samples 2k --lr-decay-samples 1.5M --seq-length 1Ki --lr 3e-4"
    config = configure(words)
    assert config.training.lr_warmup_samples == 2000
    assert (config.training.lr_decay_samples, config.model.seq_length) == (1_500_000, 1024)
    assert [whole_number(each) for each in ("350B", "1e3", "4.35k", "-7", "9007199254740993")] == [
        350 * 10**9, 1000, 4350, -7, 9007199254740993,
    ]  # fmt: skip
    for text in ("1.5", "k", "2kk", "1e999", "nan", "inf", "0x10", "", "2kib"):
        with pytest.raises((ValueError, OverflowError)):
            whole_number(text)


def test_the_help_of_one_group_shows_its_options_alone():
    command = [sys.executable, "train.py", "--help", "data"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "\n  --split" in done.stdout
    assert "\n  --layers" not in done.stdout


def test_what_a_preset_derives_is_derived_again():
    config = parse(["--model", "gpt2-124m", "--hidden", "1024", "--heads", "16"])
    assert (config.model.ffn_hidden, config.model.kv_heads) == (4096, 16)
    config = parse(["--model", "gpt2-124m", "--ffn-hidden", "1000", "--hidden", "1024"])
    assert config.model.ffn_hidden == 1000


def test_the_padded_vocabulary_is_the_published_one():
    layout = configure(BASE + " --tp 4", 4).layout
    assert ModelShape(1, 64, 4, vocab_size=250680).padded_vocab(layout) == 250880
    assert ModelShape(1, 64, 4, vocab_size=50257).padded_vocab(layout) == 50688


# Neither --help nor an error waits for these imports, which take a tenth of a second each or more.
SLOW_MODULES = {"torch", "numpy", "mpi4py", "h5py", "rich", "matplotlib"}


def test_help_imports_nothing_slow():
    command = [sys.executable, "-X", "importtime", "train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--micro-batch-size" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "config.schema" in imported
    assert sorted(imported & SLOW_MODULES) == []


@pytest.mark.parametrize("program", ["train.py", "plan.py", "tune.py", "checkpoint.py"])
def test_every_program_prints_the_version(program):
    command = [sys.executable, program, "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"trine {VERSION}\n", "")


SHARDED = {"sequence_parallel": True, "overlap_param_gather": True}
NEITHER = {"sequence_parallel": False, "overlap_param_gather": False}


@pytest.mark.parametrize(
    ("words", "ranks", "on_gpu"),
    [
        ("--tp 2", 8, SHARDED),
        ("--tp 2 --zero 2", 8, SHARDED),
        ("--tp 1", 8, SHARDED | {"sequence_parallel": False}),
        ("--tp 4 --seq-length 30", 8, SHARDED | {"sequence_parallel": False}),
        ("--tp 2 --zero 0", 8, SHARDED | {"overlap_param_gather": False}),
        ("--tp 1 --zero 3", 8, NEITHER),
        ("--tp 8", 8, SHARDED | {"overlap_param_gather": False}),
        ("--tp 2 --no-sequence-parallel --set overlap_param_gather=false", 8, NEITHER),
    ],
)
def test_what_is_left_to_the_machine_is_on_where_it_is_right(words, ranks, on_gpu):
    """On a GPU, where the layout and the shape allow it; what a flag says stays."""
    shape = "--layers 1 --hidden 64 --heads 8 --steps 1 --seq-length 32 --global-batch-size 8"
    config = check(parse(f"{shape} {words}".split()), ranks)
    for gpu, expected in ((True, on_gpu), (False, NEITHER)):
        layout = config.layout.automatic(config.model.seq_length, gpu)
        assert {name: getattr(layout, name) for name in expected} == expected
    given = parse(
        f"{shape} --sequence-parallel --set overlap_param_gather=true --dp 2 --tp 2".split()
    )
    layout = given.layout.automatic(32, on_gpu=False)
    assert {name: getattr(layout, name) for name in SHARDED} == SHARDED


def test_control_characters_are_shown_as_escapes():
    assert errors.printable("Grüße, \U0001f468\u200d\U0001f469!\n\tmore") == (
        "Grüße, \U0001f468\u200d\U0001f469!\n\tmore"
    )
    assert errors.printable("\x1b]0;a\x07\r\x9b\u202e\ud800") == r"\x1b]0;a\x07\r\x9b\u202e\ud800"
    assert errors.printable("a\nb", keep="") == r"a\nb"


def test_an_error_shows_control_characters_of_files_as_escapes(capsys):
    with pytest.raises(SystemExit):
        errors.exit_with(UserError("the file says \x1b[2J"))
    assert capsys.readouterr().err == "error: the file says \\x1b[2J\n"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_the_run_files_are_runs(path):
    """Of configs/: each names its ranks in its first command, and train.py takes it with these."""
    text = path.read_text()
    nodes = re.search(r"srun -N (\d+) --ntasks-per-node (\d+)", text)
    places = nodes or re.search(r"mpirun -n (\d+)", text)
    ranks = math.prod(map(int, places.groups()))
    run = check(parse(["--config", str(path)]), ranks)
    tokens = Timeline(run).total_samples * run.model.seq_length
    said = re.search(r"# ([\d.]+) B tokens, ([\d,]+) steps", text)
    assert (f"{tokens / 1e9:.1f}", f"{Timeline(run).total_steps:,}") == said.groups()
