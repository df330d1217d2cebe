"""tools/supervisor/fewer.py: if this failed, a job would not go on on fewer nodes."""

import json
import subprocess
from dataclasses import replace

import pytest

from base.errors import UserError
from config.command_line import parse
from config.schema import Layout
from distributed.launch import SlurmJob
from tools.supervisor import fewer
from tools.supervisor.command import Command
from tools.supervisor.decisions import Decision, Journal, SupervisorAction
from tools.supervisor.evidence import Evidence
from tools.supervisor.fewer import Fewer, Options

SHAPE = "--layers 4 --hidden 64 --heads 4 --seq-length 32 --vocab-size 128 --global-batch-size 24"
TRAINED = "--steps 9 --precision fp32 --lr 1e-3 --adam-beta2 0.9 --out OUT --resume auto"
PROGRAM = ("srun", "python", "train.py")


def asked(words: str, nodes: int = 3, tasks: int = 2, gpu: str = "cpu", **options) -> Fewer:
    names = tuple(f"n{number}" for number in range(nodes))
    job = SlurmJob("7.0", names, tasks)
    command = Command((*PROGRAM, *words.split()), "OUT", job, names, nodes)
    allowed = {"calibration": None, "max_slowdown": 3.0} | options
    return Fewer(command, parse(words.split()), Options(gpu, **allowed))


def test_the_options_but_for_the_layout_stay(tmp_path):
    """Options of a file and defaults stay too; the layout's flags replace the whole layout."""
    file = tmp_path / "run.toml"
    file.write_text("tp = 2\n[training]\nseed = 5\n[layout]\nzero = 2\nmicro_batch_size = 4\n")
    words = f"{SHAPE} {TRAINED} --pp 3 --dp 1 --partition 1,2,1 --config {file}"
    found = asked(words)
    best = found.best(2)
    assert best.nodes == 2
    assert "a step" in best.reason
    assert best.reason.endswith(
        "; rehearsed: all operations of the ranks that were run match, and it fits"
    )
    before, after = parse(words.split()), parse(found.options_with(best.flags))
    assert replace(before, layout=Layout()) == replace(after, layout=Layout())
    assert after.layout.tp * after.layout.pp in (1, 2, 4)
    assert (after.layout.partition, after.layout.dp) == ("balanced", None)
    started = found.command.on(["n0", "n2"], found.options_with(best.flags))
    assert started[:5] == ["srun", "--nodes=2", "--ntasks=4", "--nodelist=n0,n2", "--overlap"]
    assert started[5:7] == ["python", "train.py"]
    assert parse(started[7:]) == after


def test_what_the_planner_does_not_choose_stays_as_given(monkeypatch):
    monkeypatch.setattr(Fewer, "_rehearse", lambda self, found: (True, "not asked"))
    words = f"{SHAPE} {TRAINED} --schedule gpipe --pp 3 --set pad_vocab_multiple=64"
    found = asked(words)
    layout = parse(found.options_with(found.best(2).flags)).layout
    assert (layout.schedule, layout.pad_vocab_multiple) == ("gpipe", 64)


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ("--tp 4", {}, r"does not price the layout as given: tp\(4\) \* pp\(1\) \* dp\(\?\) does"),
        (
            "",
            {"max_slowdown": 0.1},
            r"on 2 nodes a step 0\.\d+ times as long, as predicted on cpu: above --max",
        ),
        ("--cp 3 --seq-length 36", {}, "finds no layout on 2 nodes"),
    ],
)
def test_why_there_is_no_layout(given, options, sentence):
    with pytest.raises(UserError, match=sentence):
        asked(f"{SHAPE} {TRAINED} {given}", **options).best(2)


def test_a_mistake_is_found_when_the_supervisor_starts():
    with pytest.raises(UserError, match="no machine is called 'cpuu'; did you mean 'cpu'"):
        asked(f"{SHAPE} {TRAINED}", gpu="cpuu")
    with pytest.raises(UserError, match=r"heads\(3\) does not divide hidden\(64\)"):
        asked(f"{SHAPE} {TRAINED} --heads 3")


def test_what_the_rehearsal_rejects_is_not_started(monkeypatch):
    """The next layout is tried; without an answer the run decides."""
    found, said = asked(f"{SHAPE} {TRAINED}"), []

    def rehearsed(words):
        said.append(words)
        finding = "rank 1 waits" if len(said) == 1 else ""
        with open(words[words.index("--json") + 1], "w") as file:
            json.dump({"finding": finding}, file)
        return ""

    monkeypatch.setattr(fewer, "_run_rehearsal", rehearsed)
    first = found.best(2)
    assert len(said) == 2
    assert said[0] != said[1]
    assert said[1][:4] == ["--gpus", str(2 * first.nodes), "--nodes", str(first.nodes)]
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nKeyError: 3\n")
    monkeypatch.undo()
    monkeypatch.setattr(fewer.subprocess, "run", lambda *words, **options: failed)
    assert found.best(2).reason.endswith("; not rehearsed: KeyError: 3")


def test_of_7_nodes_those_are_used_that_divide_the_batch(monkeypatch):
    """On 8 nodes of 8 GPUs, one of which is gone."""
    monkeypatch.setattr(Fewer, "_rehearse", lambda self, found: (True, "not asked"))
    words = f"--model 1b3 --micro-batch-size 2 --global-batch-size 768 {TRAINED} --precision bf16"
    found = asked(words, 8, 8, "a100-80", max_slowdown=2)
    best = found.best(7)
    assert best.nodes < 7
    layout = parse(found.options_with(best.flags)).layout
    assert 768 * layout.tp * layout.pp % (8 * best.nodes) == 0


def test_the_journal_knows_the_layout_of_this_start(tmp_path, capsys):
    """A supervisor that was killed goes on with it; another start of the job has all nodes."""
    gone = Evidence(137, "dead", ("n2",), silent=("n2",))
    culprit = Evidence(137, "dead", ("n1",), (0,))
    journal = Journal(str(tmp_path), "7.0")
    journal.add(gone, Decision(SupervisorAction.RESTART, "", ("n2",), used=2, flags=("--tp", "2")))
    journal.add(culprit, Decision(SupervisorAction.RESTART, "", ("n1",), used=1))
    again = Journal(str(tmp_path), "7.0")
    assert (again.layout(), again.left_out(), again.silent()) == ((1, ()), {"n1", "n2"}, {"n2"})
    again.add(Evidence(75, back=("n2",)), Decision(SupervisorAction.RETURN, "", back=("n2",)))
    again = Journal(str(tmp_path), "7.0")
    assert (again.layout(), again.left_out(), again.silent()) == ((0, ()), {"n1"}, set())
    assert again.has_left_out
    other = Journal(str(tmp_path), "7.1")
    assert (other.layout(), other.left_out(), other.has_left_out) == ((0, ()), set(), False)
