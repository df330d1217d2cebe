"""docs/from_notes.md: if this failed, it would print answers that the planner no longer gives."""

import re
import shlex
from pathlib import Path

import pytest
from ranks import ROOT

import plan
from config import validation
from config.command_line import parse

PAGE = (ROOT / "docs" / "from_notes.md").read_text()
# A command, and the indented lines below it that it printed.
BLOCKS = re.findall(r"^    \$ (python .*)\n((?:    (?!\$).+\n)*)", PAGE, re.MULTILINE)
PLANS = [(command, printed) for command, printed in BLOCKS if command.startswith("python plan.py ")]
RUNS = [command for command, _ in BLOCKS if command.startswith("python train.py ")]
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
TOLERANCE = 0.15


def same(printed: str, line: str) -> bool:
    """Whether a line is the page's line with numbers that are off by at most TOLERANCE; `...` ends
    a line of which the page has the begin.
    """
    is_begin = printed.endswith("...")
    printed = printed.removesuffix("...")
    words, wanted = NUMBER.split(line), NUMBER.split(printed)
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(t)] for t in (line, printed)]
    if is_begin and len(words) >= len(wanted):
        words = [*words[: len(wanted) - 1], words[len(wanted) - 1][: len(wanted[-1])]]
        numbers[0] = numbers[0][: len(numbers[1])]
    if [" ".join(word.split()) for word in words] != [" ".join(word.split()) for word in wanted]:
        return False
    return all(abs(a - b) <= TOLERANCE * abs(b) + 0.05 for a, b in zip(*numbers, strict=True))


@pytest.mark.parametrize(("command", "printed"), PLANS, ids=[command for command, _ in PLANS])
def test_the_planner_answers_as_the_page_says(command, printed):
    lines = plan.ask(shlex.split(command)[2:]).text.splitlines()
    assert printed, command
    below = iter(lines)  # each line is looked for below the one before: in the page's order
    for wanted in printed.splitlines():
        assert any(same(wanted.strip(), line.strip()) for line in below), (wanted, lines)


@pytest.mark.parametrize("command", RUNS)
def test_the_options_of_the_page_are_a_run(command):
    validation.check(parse(shlex.split(command)[2:]), 1)


def test_the_page_has_an_answer_for_every_command_and_its_programs_exist():
    assert len(PLANS) >= 12
    assert len(RUNS) >= 4
    named = set(re.findall(r"`(?:bash |python )?((?:scripts/)?\w+\.(?:py|sh))", PAGE))
    assert {"scripts/bench_allreduce.sh", "scripts/growing_jobs.py", "tune.py"} <= named
    assert [name for name in named if not Path(ROOT, name).exists()] == []


def test_a_wrong_number_or_word_would_be_seen():
    assert same(
        "6.7 B parameters on 4 x v100-32: ...", "6.9 B parameters on 4 x v100-32: 42 layers"
    )
    assert not same("6.7 B parameters", "8.9 B parameters")
    assert not same("6.7 B parameters", "6.7 B layers")
