"""If this failed, a command that the planner prints for Megatron-LM or torchtitan would be refused.

tests/data/*_options*.json have the options of releases: how many values each takes, of which type,
and its choices. As many commands were also given to the parsers of the programs themselves:
benchmarks/results/programs.md.
"""

import dataclasses
import itertools
import json
import random
import re
import shlex
import subprocess
import sys

import pytest
from ranks import ROOT

import plan
from base.errors import UserError
from config import schema
from config.schema import Layout
from config.spelling import preset
from costs import hardware
from tools.planner import bridge_words, megatron_words, programs, releases, torchtitan_words
from tools.planner.programs import PROGRAMS

DRAWN = 100  # commands of each program
MODELS = {
    "megatron": ("llama-3-8b", "llama-3-70b", "gpt3-175b", "qwen3-8b", "qwen2.5-7b")
    + ("mixtral-8x7b", "qwen3-30b-a3b", "gpt2-1.5b", "megatron-39b", "moonlight-16b-a3b"),
    "bridge": ("llama-3-8b", "llama-3-70b", "gpt3-175b", "qwen3-8b", "qwen2.5-7b")
    + ("mixtral-8x7b", "qwen3-30b-a3b", "gpt2-1.5b", "megatron-39b"),
    "torchtitan": ("llama-3-8b", "llama-3-70b", "llama-3.1-405b", "qwen3-8b", "qwen3-32b")
    + ("llama-2-7b", "qwen3-30b-a3b", "llama-3.2-1b"),
}
GPUS = (8, 16, 32, 64, 96, 128)


RELEASES = [f"{name}@{version}" for name in PROGRAMS for version in releases.versions(name)]


def options_of(name: str) -> dict[str, dict]:
    """The options of a release of a program, NAME or NAME@VERSION."""
    program = programs.of(name)
    file = f"{program.name}_options_{program.version}.json"
    return json.loads((ROOT / "tests" / "data" / file).read_text())["options"]


def drawn(full: str, number: int = DRAWN) -> list[list[str]]:
    """Commands of random layouts that fit, for random models, batches and GPUs; the same ones."""
    found: list[list[str]] = []
    chance = random.Random(full)
    name = full.partition("@")[0]
    for _ in range(200):
        model, gpus = chance.choice(MODELS[name]), chance.choice(GPUS)
        machine = chance.choice(("h100", "a100-80", "b200"))
        batch = chance.choice((128, 512, 1024, 2048))
        words = f"layouts --for {full} --model {model} --gpu {machine} --gpus {gpus} --top 8"
        words += f" --global-batch-size {batch}"
        if machine != "a100-80" and chance.random() < 0.3:
            words += " --fp8"
        options, rest = plan.parser().parse_known_args(words.split())
        question = plan.question_of(options, rest)
        program = question.program
        lines = question.rank(most=8).ranked
        chance.shuffle(lines)
        for line in lines[:4]:
            command = program.words(question.config, line.layout, gpus, bool(options.fp8))
            found.append(command)
        if len(found) >= number:
            return found[:number]
    raise AssertionError(f"only {len(found)} commands")


# Words of torchtitan's newer releases that are a choice of their own.
SUBCOMMANDS = [f"activation_checkpoint:{name}" for name in ("none", "selective", "full")]


KINDS = {"int": r"-?\d+", "float": r"-?[\d.]+(e-?\d+)?", "bool": "true|false"}
KINDS |= {"str": r"[\w-]+|'[^']+'", "list": r"\[[01,]+\]"}


def wrong_overrides(words: list[str], options: dict[str, dict]) -> list[str]:
    """What of Megatron Bridge's overrides, key=value, the pinned version does not take."""
    wrong = []
    for word in words:
        key, _, value = word.partition("=")
        if key not in options:
            wrong.append(word)
            continue
        own = options[key]
        kinds = own.get("types", ["str"])
        if value == "null":
            right = bool(own.get("null"))
        elif "choices" in own:
            right = value in own["choices"]
        else:
            right = any(re.fullmatch(KINDS[kind], value) for kind in kinds)
        wrong += [] if right else [word]
    return wrong


def wrong_in(command: list[str], options: dict[str, dict]) -> list[str]:
    """What of a command's words the pinned version does not take."""
    if command[: len(bridge_words.RECIPE)] == bridge_words.RECIPE:
        return wrong_overrides(command[len(bridge_words.RECIPE) :], options)
    wrong, words = [], iter(command)
    kinds = {"int": int, "float": float}
    for word in words:
        if not word.startswith("--"):
            if word not in ("pretrain_gpt.py", "-m", "torchtitan.train", *SUBCOMMANDS):
                wrong.append(word)
            continue
        if word not in options:
            wrong.append(word)
            continue
        own = options[word]
        if own.get("takes", 1) == 0 or own.get("type") == "bool":
            continue
        takes = own.get("takes", 1)
        for value in [next(words, "--") for _ in range(takes if isinstance(takes, int) else 1)]:
            try:
                kinds.get(own.get("type", "str").partition(" ")[0], str)(value)
            except ValueError:
                wrong.append(f"{word} {value}")
            if value.startswith("--") or ("choices" in own and value not in own["choices"]):
                wrong.append(f"{word} {value}")
    return wrong


@pytest.mark.parametrize("name", RELEASES)
def test_every_word_of_a_hundred_commands_is_an_option_of_the_release(name):
    options = options_of(name)
    commands = drawn(name)
    assert {shlex.join(c): wrong_in(c, options) for c in commands if wrong_in(c, options)} == {}
    # the draw has pipelines, recomputation and experts
    texts = [shlex.join(command) for command in commands]
    assert len(set(texts)) > DRAWN * 0.8
    recompute = "activation_checkpoint" if name.startswith("torchtitan") else "recompute"
    for word in ("pipeline", recompute, "fp8"):
        said = word != "fp8" or name not in ("torchtitan@0.3.0", "torchtitan@main")
        assert any(word in text or "float8" in text for text in texts) == said, word


def test_every_option_of_megatron_is_said_to_bridge_with_its_value():
    """A value that Megatron-LM's command says and Bridge's does not would be the recipe's own."""
    words = "layouts --for bridge --model llama-3-8b --gpu h100 --gpus 32 --global-batch-size 256"
    changes = {
        "--weight-decay 0.03": "scheduler.end_weight_decay=0.03",
        "--lr 0.002": "optimizer.lr=0.002",
        "--adam-beta2 0.98": "optimizer.adam_beta2=0.98",
        "--seed 7": "rng.seed=7",
        "--steps 70": "train.train_iters=70",
        "--train-samples 51200": "train.train_iters=null",
        "--lr-warmup-samples 2560 --steps 100": "scheduler.lr_warmup_samples=2560",
        "--norm layernorm": "model.normalization=LayerNorm",
        "--tied": "model.vocab_size=128256",
        "--precision fp16": "mixed_precision=fp16_mixed",
        "--tp 4 --sequence-parallel": "model.sequence_parallel=true",
        "--zero 0": "optimizer.use_distributed_optimizer=false",
        "--fp8": "mixed_precision=bf16_with_fp8_delayed_scaling_mixed",
        "--tp 2 --recompute full --recompute-layers 2": "model.recompute_num_layers=2",
    }
    options = options_of("bridge")
    for change, override in changes.items():
        answer = plan.ask(f"{words} {change} --top 2".split())
        assert override in answer.data["command"], change
        assert wrong_in(answer.data["command"], options) == []
        keys = [word.partition("=")[0] for word in answer.data["command"] if "=" in word]
        assert len(keys) == len(set(keys))
    tied = plan.ask(f"{words} --tied --top 2".split()).data["command"]
    assert not any("share_embeddings" in word for word in tied)


def test_a_wrong_word_value_or_choice_would_be_seen():
    options = options_of("megatron")
    assert wrong_in(["--no-such-thing"], options)
    assert wrong_in(["--num-layers", "many"], options)
    assert wrong_in(["--transformer-impl", "mine"], options)
    recipe = bridge_words.RECIPE
    for word in ("model.layers=2", "model.num_layers=two", "scheduler.lr_decay_style=steps"):
        assert wrong_in([*recipe, word], options_of("bridge")) == [word]
    assert not wrong_in(["--num-layers", "4", "--swiglu", "--transformer-impl", "local"], options)


def test_the_versions_are_those_of_the_tables():
    for name in RELEASES:
        program = programs.of(name)
        file = f"{program.name}_options_{program.version}.json"
        table = json.loads((ROOT / "tests" / "data" / file).read_text())
        assert table["source"]["release"] == program.version


def test_without_a_version_a_command_is_for_the_newest_that_is_known():
    for name in PROGRAMS:
        program = programs.of(name)
        assert program.version == releases.newest(name)
        assert f"for {name} {program.version} of 20" in program.release
        if len(releases.versions(name)) == 1:
            continue
        assert f"{name}@" in program.release
        older = programs.of(f"{name}@{releases.versions(name)[-1]}")
        assert f"the newest on 2026-11-29 was {program.version}" in older.release
    with pytest.raises(UserError, match=r"'torchtitan@0.1.0': there are torchtitan@0.3.0, "):
        programs.of("torchtitan@0.1.0")
    assert programs.of("megatron@core_v0.16.1").version == "0.16.1"


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_newer_release_than_the_newest_known_would_be_seen(name):
    """Where the package index answers; the command of a release that is not read may be refused."""
    command = [sys.executable, "-m", "pip", "index", "versions", releases.package(name)]
    newer = "3.12" if name == "torchtitan" else "3.13"
    command += ["--python-version", newer, "--only-binary", ":all:", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("no package index that answers")
    found = re.search(r"Available versions: ([0-9.]+)", done.stdout)
    if done.returncode or not found:
        pytest.skip("no package index that answers")
    newest = releases.newest(name)
    # Releases of bridge are tags and containers; the index has fewer of them.
    known, out = (tuple(map(int, version.split("."))) for version in (newest, found[1]))
    assert out <= known, f"{name} {found[1]} is out, commands are for {newest}"


def test_the_stages_of_a_command_are_the_blocks_that_were_planned():
    """Megatron-LM's notation, repeated groups written out."""

    def written_out(text: str) -> list[int]:
        while found := re.search(r"\(([^()]*)\)\*(\d+)", text):
            text = text.replace(found[0], found[1] * int(found[2]), 1)
        text = re.sub(r"t\*(\d+)", lambda match: "t" * int(match[1]), text)
        return [stage.count("t") for stage in text.split("|")]

    chance = random.Random(1)
    for _ in range(200):
        blocks = [chance.randint(0, 3) for _ in range(chance.randint(2, 24))]
        text = megatron_words.stages_text(blocks)
        assert written_out(text) == blocks
        assert text.startswith("E")
        assert text.endswith("L")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--for megatron --zero 3", "--zero 3: megatron has 1, 0"),
        ("--for megatron --schedule zb-h1", "--schedule zb-h1: megatron has 1f1b, interleaved"),
        ("--for megatrn", "megatron"),
        ("--fp8", "--for PROGRAM"),
        ("--for torchtitan --gpu a100-80 --fp8", "no fp8"),
        ("--for bridge --zero 3", "--zero 3: bridge has 1, 0"),
        ("--for bridge@0.2.0", "'bridge@0.2.0': there are bridge@0.6.0"),
        ("--for bridge --positions alibi", "bridge has no ALiBi"),
        ("--for bridge --model moonlight-16b-a3b", "bridge has no multi-head latent attention"),
        ("--for bridge --rampup-batch-size 64 64 10000", "bridge has no --rampup-batch-size"),
        ("--for bridge --precision fp32", "bridge has no --precision fp32"),
        ("--for bridge --block parallel", "bridge has no --block parallel"),
        ("--for megatron --sbatch FILE", "--sbatch writes batch files for train.py"),
    ],
)
def test_what_a_program_does_not_have_is_a_sentence(words, sentence, tmp_path):
    words = words.replace("FILE", str(tmp_path / "job"))
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        plan.ask(f"layouts --model llama-3-8b --gpus 8 {words}".split())


def test_models_that_a_program_cannot_run_are_refused_with_what_is_missing():
    for question in ("layouts", "largest", "stages"):
        with pytest.raises(UserError, match="megatron has no ALiBi"):
            plan.ask(f"{question} --for megatron --model bloom-176b --nodes 48".split())


# For each option that Megatron-LM's command says: what of the run below changes the command, or is
# refused. A new option of the model or of training needs a line, or is left out of SAYS.
DENSE = "--layers 8 --hidden 1024 --heads 8 --vocab-size 32000 --norm rmsnorm --positions rotary"
DENSE += " --activation swiglu --no-bias --no-tied"
LATENT = f"{DENSE} --set kv_lora_rank=64 qk_nope_head_dim=64 qk_rope_head_dim=32 v_head_dim=64"
SPARSE = f"{DENSE} --experts 16 --experts-per-token 2 --router sigmoid --balance sequence"
GROUPED = f"{SPARSE} --set router_groups=4 router_groups_per_token=1"
WSD = f"{DENSE} --lr-schedule wsd --lr-wsd-decay-samples 4096"
CHANGES = {
    DENSE: [
        *("--layers 12", "--hidden 2048", "--heads 16", "--kv-heads 4", "--ffn-hidden 4096"),
        *(
            "--seq-length 2048",
            "--positions learned --set max_positions=4096",
            "--vocab-size 50000",
            "--bias",
        ),
        *("--positions learned", "--norm layernorm", "--set norm_plus_one=true", "--tied"),
        *("--activation gelu", "--activation relu", "--activation geglu", "--experts 4"),
        *("--activation clamped_swiglu --set swiglu_alpha=1", "--set norm_eps=1e-6"),
        *("--activation clamped_swiglu --set swiglu_limit=6", "--set embedding_norm=true"),
        *("--set embedding_scaled=true", "--set rotary_base=20000", "--set rotary_base=10000.5"),
        *("--set rotary_fraction=0.5", "--set rotary_scaling=llama3:8:1:4:8192"),
        *("--set rotary_scaling=linear:2", "--set rotary_blocks=1:1", "--set window=256"),
        *("--set window=256 window_blocks=1:1", "--set window=256 window_rotary_base=5"),
        *("--set window=256 window_rotary_scaling=linear:2", "--set sinks=true"),
        *("--set attention_softcap=50", "--set logit_softcap=30", "--set query_scalar=256"),
        *("--set head_size=64", "--set qkv_bias=true", "--set qk_norm=head"),
        *("--set qk_norm=full", "--block post-norm", "--block parallel"),
        *("--set qk_norm=head --norm layernorm", "--bias --set qkv_bias=false"),
        *("--global-batch-size 512", "--batch-tokens 1048576", "--steps 7"),
        *("--train-samples 10240", "--rampup-batch-size 256 256 10240", "--precision fp16"),
        *("--optimizer sgd", "--optimizer sgd --sgd-momentum 0.8", "--optimizer muon", "--lr 1e-5"),
        *("--min-lr 1e-6", "--lr-schedule constant", "--lr-warmup-samples 2048", "--seed 7"),
        *("--lr-decay-samples 20480", "--weight-decay 0.2", "--adam-beta1 0.8"),
        *("--adam-beta2 0.99", "--adam-eps 1e-6", "--precision fp16 --loss-scale 1024"),
        *("--clip-grad 2", "--init-std 0.01", "--z-loss 1e-4"),
    ],
    LATENT: [
        *("--set kv_lora_rank=32", "--set q_lora_rank=32", "--set qk_nope_head_dim=32"),
        *("--set qk_rope_head_dim=16", "--set v_head_dim=32"),
    ],
    SPARSE: [
        *("--experts-per-token 4", "--expert-ffn-hidden 512", "--set first_dense_layers=1"),
        *("--set expert_interval=2", "--router softmax", "--set router_scale=2"),
        *("--router softmax --set router_normalised=false", "--set router_bias=true"),
        *("--set shared_ffn_hidden=512", "--set shared_ffn_hidden=512 shared_gate=true"),
        *("--balance global", "--balance bias", "--balance none", "--balance-rate 0.02"),
        *("--router-z-loss 0.01", "--balance bias --router softmax"),
    ],
    GROUPED: ["--set router_groups=2", "--set router_groups_per_token=2"],
    WSD: ["--lr-wsd-decay-samples 2048", "--lr-wsd-decay-style 1-sqrt"],
}


def command_of(words: str) -> list[str] | str:
    """Megatron-LM's command for a run on four ranks, or why it has none."""
    layout = Layout(tp=2, pp=2, dp=2, sequence_parallel=True, pad_vocab_multiple=128)
    keys = dict(word.split("=") for word in words.split() if "=" in word)  # the last one holds
    plain = [word for word in words.split() if "=" not in word and word != "--set"]
    sets = ["--set", *map("=".join, keys.items())] if keys else []
    try:
        options, rest = plan.parser().parse_known_args(
            ["layouts", "--for", "megatron", "--gpu", "h100", *plain, *sets]
        )
        run = plan.question_of(options, rest).config
    except UserError as refused:
        return str(refused)
    return megatron_words.words(run, layout, 8)


@pytest.mark.parametrize("base", CHANGES, ids=["dense", "latent", "sparse", "grouped", "wsd"])
def test_every_option_that_is_said_changes_the_command_or_is_refused(base):
    usual = command_of(base)
    assert isinstance(usual, list), usual
    assert wrong_in(usual, options_of("megatron")) == []
    seen = {shlex.join(usual)}
    for change in CHANGES[base]:
        found = command_of(f"{base} {change}")
        if isinstance(found, str):
            assert "megatron has no" in found, (change, found)
            continue
        assert shlex.join(found) not in seen, change
        assert wrong_in(found, options_of("megatron")) == [], change


def test_every_option_that_is_said_has_a_line():
    text = " ".join([*CHANGES, *itertools.chain.from_iterable(CHANGES.values())])
    groups = (schema.ModelShape, schema.Training)
    names = {field.name for group in groups for field in dataclasses.fields(group)}
    # Of the model's options only those that it writes; another one is refused by itself.
    names -= {field.name for field in dataclasses.fields(schema.ModelShape)} - megatron_words.MODEL
    words = {word.partition("=")[0].lstrip("-").removeprefix("no-") for word in text.split()}
    missing = {name.replace("_", "-") for name in names & megatron_words.SAYS} - {
        word.replace("_", "-") for word in words
    }
    assert not missing, f"lines in CHANGES for {missing}, or take them out of megatron_words.SAYS"


def test_an_option_of_the_model_that_megatrons_words_do_not_know_is_refused(monkeypatch):
    """As one that is new: it would else be lost on the way."""
    dense = next(iter(CHANGES))
    monkeypatch.setattr(megatron_words, "MODEL", megatron_words.MODEL - {"rotary_fraction"})
    assert isinstance(command_of(dense), list)
    found = command_of(f"{dense} --set rotary_fraction=0.5")
    assert "megatron has no rotary_fraction 0.5 by this command" in found


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_what_a_command_does_not_say_is_named(name, capsys):
    words = f"layouts --for {name} --model llama-3-8b --gpu h100 --gpus 8 --save-every 10 --ema 0.9"
    plan.ask(words.split())
    assert f"note: not in {name}'s command: ema, save-every\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        ("--model llama-3-8b --set window=512", "window"),
        ("--model qwen2.5-7b", "biases"),
        ("--model llama-3-8b --set mixer=gated_delta_net mixer_blocks=1:1", "mixer gated_delta"),
        ("--model llama-3-8b --set attention_gate=true", "attention_gate"),
        ("--model llama-3-8b --set residual_multiplier=0.5", "residual_multiplier"),
        ("--model llama-3-8b --set embedding_multiplier=2", "embedding_multiplier"),
        ("--model llama-3-8b --set logit_divisor=2", "logit_divisor"),
        ("--model llama-3-8b --set query_scalar=64", "query_scalar(64)"),
        ("--model llama-3-8b --optimizer muon", "--optimizer muon"),
        ("--model llama-3-8b --precision fp16", "--precision fp16"),
    ],
)
def test_what_no_flavor_of_torchtitan_has_is_refused(words, lacks):
    with pytest.raises(UserError, match=f"torchtitan.*{re.escape(lacks)}"):
        plan.ask(f"layouts --for torchtitan --gpu h100 --gpus 8 {words}".split())


def test_torchtitans_rate_is_that_of_the_run():
    shape = "--model llama-3-8b --gpu h100 --gpus 8 --global-batch-size 64 --steps 100 --lr 1e-3"
    words = f"{shape} --lr-schedule wsd --lr-wsd-decay-samples 640 --lr-wsd-decay-style 1-sqrt"
    words += " --lr-warmup-samples 128 --min-lr 1e-4 --adam-beta2 0.9 --seed 3"
    options, rest = plan.parser().parse_known_args(f"layouts --for torchtitan {words}".split())
    run = plan.question_of(options, rest).config
    command = torchtitan_words.words(run, Layout(dp=8, zero=3), 8, version="0.2.2")
    found = dict(itertools.pairwise(command))
    assert float(found["--lr_scheduler.decay_ratio"]) == 0.1
    assert float(found["--lr_scheduler.min_lr_factor"]) == pytest.approx(0.1)
    assert found["--lr_scheduler.warmup_steps"] == "2"
    assert found["--lr_scheduler.decay_type"] == "sqrt"
    assert found["--optimizer.beta2"] == "0.9"
    assert found["--debug.seed"] == "3"
    assert wrong_in(command, options_of("torchtitan@0.2.2")) == []
    # 0.3.0 has no option for the optimizer: the answer says what its config function must have.
    newer = torchtitan_words.words(run, Layout(dp=8, zero=3), 8)
    assert not any(word.startswith("--optimizer") for word in newer)
    (note,) = (n for n in torchtitan_words.notes(run, Layout(dp=8)) if "default_adamw" in n)
    assert "llama3_8b must have optimizer=default_adamw(lr=0.001, betas=(0.9, 0.9)" in note


def test_torchtitans_main_counts_in_tokens():
    """The same run: a step's tokens, those of a micro-batch of a rank, and micro-batches."""
    words = (
        "layouts --model llama-3-8b --gpu h100 --gpus 32 --global-batch-size 64 --seq-length 4096"
    )
    run = plan.question_of(*plan.parser().parse_known_args(words.split())).config
    layout = Layout(tp=2, pp=4, dp=4, micro_batch_size=2, zero=1)
    said = {}
    for version in ("0.3.0", "main"):
        command = torchtitan_words.words(run, layout, 32, version=version)
        said[version] = dict(itertools.pairwise(command))
        assert wrong_in(command, options_of(f"torchtitan@{version}")) == []
    old, new = said["0.3.0"], said["main"]
    tokens = int(new["--training.num_tokens_per_train_step"])
    assert tokens == int(old["--training.global_batch_size"]) * 4096
    micro = int(new["--training.num_tokens_per_microbatch_per_dp_rank"])
    assert micro == int(old["--parallelism.pipeline_parallel_microbatch_size"]) * 4096
    count = int(new["--parallelism.num_pp_microbatches"])
    assert count * micro == int(old["--training.local_batch_size"]) * 4096
    assert count * micro * layout.dp == tokens


def test_a_config_function_that_a_release_has_not_is_said():
    """Also what one has that was not asked for: llama3_405b is in fp8."""
    for model, fp8, words in (
        ("qwen3-8b", False, "no config function of qwen3 8B: NEW_CONFIG is yours"),
        ("llama-3.1-405b", False, "llama3_405b has a Float8LinearConverter.Config: take it out"),
        ("llama-3-8b", True, "llama3_8b must have a Float8LinearConverter.Config"),
    ):
        run = plan.question_of(*plan.parser().parse_known_args(["layouts", "--model", model]))
        notes = torchtitan_words.notes(run.config, Layout(dp=8), fp8)
        assert any(words in note for note in notes), (model, notes)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_wsd_decay_that_is_not_given_is_the_last_tenth(name):
    words = f"layouts --for {name} --model llama-3-8b --gpus 8 --global-batch-size 64 --steps 100"
    options, rest = plan.parser().parse_known_args([*words.split(), "--lr-schedule", "wsd"])
    run = plan.question_of(options, rest).config
    command = programs.of(name).words(run, Layout(dp=8, zero=1), 8, False)
    found = dict(itertools.pairwise(command))
    if name == "megatron":
        assert (found["--train-samples"], found["--lr-wsd-decay-samples"]) == ("6400", "640")
    elif name == "bridge":
        assert {"train.train_samples=6400", "scheduler.lr_wsd_decay_samples=640"} <= {*command}
    else:
        assert float(found["--lr_scheduler.decay_ratio"]) == 0.1


def test_other_questions_answer_for_a_program_too():
    gpu = "--gpu h100 --model llama-3-8b"
    days = plan.ask(f"days --for megatron {gpu} --gpus 64 --tokens 1e12".split())
    own = plan.ask(f"days {gpu} --gpus 64 --tokens 1e12".split())
    assert days.data["days"] != own.data["days"]
    largest = plan.ask(["largest", "--for", "torchtitan", "--gpu", "h100", "--gpus", "8"])
    assert largest.data["parameters"] > 1e9
    assert "stage" in plan.ask(f"stages --for megatron {gpu} --gpus 8 --tp 2 --pp 2".split()).text


def test_a_programs_terms_are_those_of_the_rows_that_were_measured():
    """The engine of --for is the one whose rows are held out in benchmarks/results."""
    model = preset("llama-3-8b")
    for name, field, value in (
        ("megatron", "overlap_messages", True),
        ("torchtitan", "loss_bytes_per_logit", 12),
    ):
        machine = programs.of(name).on(hardware.load("h100"), model)
        assert getattr(machine.software, field) == value


def test_torchtitans_flavors_are_found_by_their_sizes():
    assert torchtitan_words.flavor(preset("llama-3-8b")) == ("llama3", "8B")
    assert torchtitan_words.flavor(preset("qwen3-32b")) == ("qwen3", "32B")
    assert torchtitan_words.flavor(preset("llama-2-7b")) is None
    run = plan.question_of(*plan.parser().parse_known_args(["layouts", "--model", "llama-2-7b"]))
    assert "NEW_FLAVOR" in " ".join(torchtitan_words.notes(run.config, Layout(dp=8)))
