"""If this failed, a command that the planner prints for Megatron-LM or torchtitan would be refused.

tests/data/*_options.json have the options of a pinned version: how many values each takes, of which
type, and its choices. The same 200 commands were also given to the parsers of both programs
themselves: benchmarks/results/programs.md.
"""

import json
import random
import re
import shlex

import pytest
from ranks import ROOT

import plan
from config.errors import UserError
from config.schema import Layout
from config.spelling import preset
from planner import hardware, megatron_words, programs, torchtitan_words
from planner.programs import PROGRAMS

DRAWN = 100  # commands of each program
MODELS = {
    "megatron": ("llama-3-8b", "llama-3-70b", "gpt3-175b", "qwen3-8b", "qwen2.5-7b")
    + ("mixtral-8x7b", "qwen3-30b-a3b", "gpt2-1.5b", "megatron-39b", "moonlight-16b-a3b"),
    "torchtitan": ("llama-3-8b", "llama-3-70b", "llama-3.1-405b", "qwen3-8b", "qwen3-32b")
    + ("llama-2-7b", "qwen3-30b-a3b", "llama-3.2-1b"),
}
GPUS = (8, 16, 32, 64, 96, 128)


def options_of(name: str) -> dict[str, dict]:
    """The options of a program's pinned version."""
    return json.loads((ROOT / "tests" / "data" / f"{name}_options.json").read_text())["options"]


def drawn(name: str, number: int = DRAWN) -> list[list[str]]:
    """Commands of random layouts that fit, for random models, batches and GPUs; the same ones."""
    found: list[list[str]] = []
    chance = random.Random(name)
    for _ in range(200):
        model, gpus = chance.choice(MODELS[name]), chance.choice(GPUS)
        machine = chance.choice(("h100", "a100-80", "b200"))
        batch = chance.choice((128, 512, 1024, 2048))
        words = f"layouts --for {name} --model {model} --gpu {machine} --gpus {gpus} --top 8"
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


def wrong_in(command: list[str], options: dict[str, dict]) -> list[str]:
    """What of a command's words the pinned version does not take."""
    wrong, words = [], iter(command)
    kinds = {"int": int, "float": float}
    for word in words:
        if not word.startswith("--"):
            if word not in ("pretrain_gpt.py", "-m", "torchtitan.train"):
                wrong.append(word)
            continue
        if word not in options:
            wrong.append(word)
            continue
        own = options[word]
        if own.get("takes", 1) == 0 or own.get("type") == "bool":
            continue
        value = next(words, "--")
        try:
            kinds.get(own.get("type", "str").partition(" ")[0], str)(value)
        except ValueError:
            wrong.append(f"{word} {value}")
        if value.startswith("--") or ("choices" in own and value not in own["choices"]):
            wrong.append(f"{word} {value}")
    return wrong


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_word_of_a_hundred_commands_is_an_option_of_the_pinned_version(name):
    options = options_of(name)
    commands = drawn(name)
    assert {shlex.join(c): wrong_in(c, options) for c in commands if wrong_in(c, options)} == {}
    # the draw has pipelines, recomputation and experts
    texts = [shlex.join(command) for command in commands]
    assert len(set(texts)) > DRAWN * 0.8
    for word in ("pipeline", "recompute" if name == "megatron" else "activation_checkpoint", "fp8"):
        assert any(word in text or "float8" in text for text in texts), word


def test_a_wrong_word_value_or_choice_would_be_seen():
    options = options_of("megatron")
    assert wrong_in(["--no-such-thing"], options)
    assert wrong_in(["--num-layers", "many"], options)
    assert wrong_in(["--transformer-impl", "mine"], options)
    assert not wrong_in(["--num-layers", "4", "--swiglu", "--transformer-impl", "local"], options)


def test_the_versions_are_those_of_the_tables():
    for name, words in (("megatron", megatron_words), ("torchtitan", torchtitan_words)):
        table = json.loads((ROOT / "tests" / "data" / f"{name}_options.json").read_text())
        assert table["source"]["tag"] == words.VERSION == PROGRAMS[name].version


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
