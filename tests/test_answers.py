"""Answers as data: if this failed, a program that reads plan.py --json would find a field that no
page explains, or a number whose unit nobody can tell from its name.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import fields

import pytest
from ranks import ROOT
from test_gap import row_of_one_rank
from test_ladder import SIZES, write_target
from test_ladder import write_run as write_rung
from test_plan_runs import RUNS, write_run

import plan
from config.schema import Layout
from scripts import library

OPTIONS = {field.name for field in fields(Layout)}  # of a layout, beside the fields of its answer
OPAQUE = ("model", "layout", "measured", "traceEvents")  # options, a table of its own, a trace
# By unit, what a name or that of the object around it has; None: of a count, which has no unit.
WORDS = {
    "s": "seconds",
    "h": "hours",
    "kWh": "kwh",
    "nats": "nats",
    "days": "days",
    "FLOP": "flops",
    "bytes": "bytes",
    "money": "cost",
    "factor": "factor",
    "TFLOP/s": "tflops",
    "fraction": "fraction",
    "bytes/s": "bytes_per_second",
    "tokens/s": "tokens_per_second",
    "its unit": "value",
    "count": None,
}
LINES = {
    "layouts": "layouts --model gpt2-124m --gpu h100 --nodes 2 --global-batch-size 32 --tp 1",
    "stages": "stages --model mixtral-8x7b --gpu h100 --nodes 8 --ep 8 --pp 2",
    "budget": "budget --gpu h100 --gpu-hours 100 --gpus 8",
    "shapes": "shapes --size 350M --gpu a100-80 --gpus 8 --vocab-size 50257",
    "largest": "largest --gpu v100-32 --gpus 1",
    "smallest": "smallest --model llama-2-7b --gpu h100",
    "rampup": "rampup --rampup-batch-size 192 16 9765625 --tp 4 --pp 12 --nodes 48",
    "timeline": "timeline --model gpt2-1.5b --pp 4 --global-batch-size 64",
    "model": "model --model mixtral-8x7b",
    "constants": "constants",
}
DAYS = "--model gpt2-124m --gpu v100-32 --global-batch-size 64 --tokens 1e9"


def table() -> dict[str, dict[str, str]]:
    """By question, the unit of each field of docs/answers.md."""
    found: dict[str, dict[str, str]] = {}
    for names, unit, asked in re.findall(
        r"^\| (`.*`) \| (.+?) \| .+ \| (.+) \|$", (ROOT / "docs/answers.md").read_text(), re.M
    ):
        for question in asked.split(", "):
            for name in re.findall(r"`([^`]+)`", names):
                assert found.setdefault(question, {}).setdefault(name, unit) == unit
    return found


def named(data, units: dict[str, str]) -> Iterator[tuple[str, object]]:
    """Yield each field of an answer, as the table names it, and its value."""
    if isinstance(data, list | tuple):
        for each in data:
            yield from named(each, units)
    if not isinstance(data, dict):
        return
    for name, value in data.items():
        if name in OPTIONS - units.keys():
            continue
        has_names = f"{name}.*" in units
        yield f"{name}.*" if has_names else name, value
        for inner in () if name in OPAQUE else value.values() if has_names else [value]:
            yield from named(inner, units)


def numbers(value) -> list:
    """The numbers of a field: itself, or those of a list."""
    if isinstance(value, list | tuple):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def check(question: str, answers: list) -> None:
    """The fields of a question's answers are those of its rows, with their units."""
    units = table()[question]
    found = [field for data in answers for field in named(data, units)]
    names = {name for name, _ in found} - {"traceEvents", "displayTimeUnit"}
    assert (names - units.keys(), units.keys() - names) == (set(), set())
    for name, value in found:
        unit = units.get(name, "-")
        inner = value.values() if name.endswith(".*") else [value]
        if unit == "-":
            assert not numbers(list(inner)), name
        elif WORDS[unit] is not None:
            assert WORDS[unit] in name, (name, unit)


def ask(line: str):
    """The data of an answer, as --json prints it."""
    return json.loads(json.dumps(library.plan(line)))


@pytest.mark.parametrize("question", [name for name in LINES if name not in ("layouts", "rampup")])
def test_the_fields_of_a_question_are_those_of_the_table(question):
    check(question, [ask(LINES[question])])


def test_the_fields_of_layouts_are_those_of_the_table():
    risky = ask(f"{LINES['layouts']} --risk 1e-9")
    found = ask(f"{LINES['layouts']} --measured 'tp 1 pp 1 mbs 1 = 9 s'")
    check("layouts", [found, risky])
    check("measured", [found["measured"]])


def test_the_fields_of_days_are_those_of_the_table(tmp_path):
    file = tmp_path / "phases.toml"
    rows = "[[phase]]\nfrom_tokens = {}\nglobal_batch_size = {}\n"
    file.write_text(rows.format(0, 64) + rows.format(100_000_000, 128))
    check("days", [ask(f"days {DAYS} --nodes 4 --phases {file}"), ask(f"days {DAYS} --days 2")])


def test_the_fields_of_a_ramp_up_are_those_of_the_table(tmp_path):
    check("rampup", [ask(LINES["rampup"])])
    line = "rampup --model gpt2-1.5b --gpu v100-32 --rampup-batch-size 32 32 1000 --nodes-by-batch"
    line += f" 32:1 64:2 --global-batch-size 64 --train-samples 2000 --jobs {tmp_path}/jobs.json"
    check("rampup jobs", [ask(line)])


def test_the_fields_of_two_layouts_are_those_of_the_table():
    shared = "--model 176b --nodes 48"
    check("compare", [ask(f"compare '--tp 4 --pp 12' '--tp 8 --pp 6' {shared}")])


def test_the_fields_of_runs_are_those_of_the_table(tmp_path):
    words = "--layers 2 --hidden 64 --heads 4 --seq-length 32 --vocab-size 128"
    run = write_run(tmp_path / "gap", f"{words} --global-batch-size 1", 1, "CPU", [0.1])
    facts = json.loads((tmp_path / "gap" / "run.json").read_text())
    facts["cluster"]["places"] = [{"device": "cpu"}]
    (tmp_path / "gap" / "run.json").write_text(json.dumps(facts))
    (tmp_path / "gap" / "times.jsonl").write_text(json.dumps(row_of_one_rank()) + "\n")
    check("gap", [ask(f"gap {run}")])
    rungs = [write_rung(tmp_path / name, *size, noise=1e-3) for name, size in SIZES.items()]
    runs = " ".join(map(str, rungs))
    check("ladder", [ask(f"ladder {runs} --for-run {write_target(tmp_path)}")])
    words, gpus = RUNS[0]
    one = write_run(tmp_path / "one", f"{words} --precision bf16", gpus, "NVIDIA H100", [1.0] * 7)
    check("calibrate", [ask(f"calibrate {one} --gpu h100")])


def test_every_question_is_in_the_table():
    of_runs = {"gap", "ladder", "calibrate", "constants"}
    parts = {"rampup jobs", "measured"}
    assert table().keys() == {*plan.QUESTIONS, *of_runs, *parts}
