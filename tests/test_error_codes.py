"""Codes of errors: if this failed, a program could not tell what kind of mistake it has made."""

import json
import re
import sys

import pytest
from ranks import ROOT, start

from base import errors
from base.errors import NodeError, UserError
from corpora.sample_order import TooFewTokens

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type)]
KINDS = [kind for kind in CLASSES if issubclass(kind, UserError)]
# A mistake of each program that has --json, and of each kind that needs no GPU and no second node.
MISTAKES = [
    ("plan.py layouts --model gpt2-124m --gpus 8 --lr x", "option", 2),
    ("plan.py nothing", "option", 2),
    ("plan.py layouts --model nosuch --gpus 8", "model", 2),
    ("plan.py layouts --config nosuch.toml --gpus 8", "file", 2),
    ("plan.py days --model 176b --gpus 8 --gpu v100-16 --tokens 1e9", "layout", 2),
    ("plan.py gap {empty}", "run", 2),
    ("runs.py list {empty}", "run", 2),
    ("runs.py diff {empty} {empty}", "run", 2),
    ("runs.py against {empty} {empty}", "run", 2),
    ("runs.py nothing", "option", 2),
    ("check.py --layers 2", "option", 2),
    ("check.py --ranks 99", "option", 2),
    ("check.py --program {empty}/nothing.py", "file", 2),
    ("check.py --program {program}", "program", 2),
    ("rehearse.py --gpus 3 --tp 2 --model gpt2-124m", "layout", 2),
    ("tune.py --launch mpirun", "option", 2),
]


def test_each_class_has_a_code_of_its_own_which_is_in_the_docs():
    codes = [kind.__dict__["code"] for kind in KINDS]
    assert len(set(codes)) == len(codes)
    text = (ROOT / "docs/faults.md").read_text().partition("## Codes of errors")[2]
    table = re.findall(r"^\| `(\w+)` \|", text.partition("\n## ")[0], re.MULTILINE)
    assert sorted(table) == sorted([*codes, "internal"])
    assert TooFewTokens.code == "corpus"


def test_an_error_with_another_sentence_keeps_its_kind_and_its_facts():
    mistake = NodeError("a", ["n2"], "audit", [3]).said("b")
    assert (str(mistake), mistake.nodes, mistake.kind, mistake.ranks) == ("b", ["n2"], "audit", [3])
    assert (mistake.code, mistake.status) == ("node", 2)


@pytest.mark.parametrize(("words", "code", "status"), MISTAKES)
def test_a_program_answers_a_mistake_with_its_code(words, code, status, tmp_path):
    program = tmp_path / "no_build.py"
    program.write_text("steps = 2\n")
    (tmp_path / "empty").mkdir()
    words = words.format(empty=tmp_path / "empty", program=program)
    name, *rest = words.split()
    as_json = ["--json", str(tmp_path / "out.json")] if name == "rehearse.py" else ["--json"]
    done = start([sys.executable, name, *rest, *as_json])
    answer = json.loads(done.out)
    assert (done.status, answer["status"], answer["code"]) == (status, status, code), done.err
    assert done.err.endswith(f"error: {answer['error']}\n"), "people read the sentence as before"
    assert answer.get("verdict") == ("none" if name == "check.py" else None)
    without = start([sys.executable, name, *rest])
    assert (without.status, without.out, without.err) == (done.status, "", done.err)
