"""If this failed, a user's mistake would be a traceback, take long, or leave files behind."""

import ast
import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mistake_cases
import pytest
import ranks
from mistake_cases import CASES
from ranks import ROOT

from base import errors, paths
from base.errors import UserError
from base.paths import check_file
from config import command_line, run_paths, validation
from costs import memory
from distributed.placement import threads_asked_for
from scripts import plot_loss
from tools.report import picture

ENTRIES = ("train.py", "plan.py", "tune.py", "checkpoint.py", "sample.py")
SCRIPTS = ("scripts/prepare_data.py", "scripts/plot_loss.py")
MOST_PROCESSOR_SECONDS = 3.0


def test_every_mistake_is_one_sentence_and_creates_nothing(tmp_path):
    """The variable MISTAKES, if it is set, selects the cases whose words contain it."""
    cases = [case for case in CASES if os.environ.get("MISTAKES", "") in case.words]
    if not cases:
        pytest.skip(f"no mistake has {os.environ['MISTAKES']} in its words")
    assert len({str((case.command, case.environment)) for case in CASES}) == len(CASES) >= 300
    folder = mistake_cases.prepare(tmp_path)
    before = mistake_cases.contents(folder)
    wrong = {}
    for case, outcome in zip(cases, mistake_cases.run_all(folder, cases)):
        one_line = len(outcome.err) == 1 and outcome.err[0].startswith("error: ")
        silent = outcome.out == "" or "see the reasons above" in case.sentence
        if "--json" in case.words.split():  # a program reads the same sentence
            answer = json.loads(outcome.out)
            silent = (answer["error"], answer["status"]) == (outcome.err[0][len("error: ") :], 2)
        quick = case.after_torch or outcome.processor < MOST_PROCESSOR_SECONDS
        early = case.after_torch or "torch" not in outcome.imported
        said = one_line and case.sentence in outcome.err[0]
        if not (outcome.status == 2 and said and silent and quick and early):
            wrong[f"{case.program} {case.words}"] = (outcome.status, outcome.err[-3:], outcome.out)
    assert wrong == {}
    assert mistake_cases.contents(folder) == before


# ---- An environment that cannot work -------------------------------------------------------------


@pytest.mark.parametrize("program", [*ENTRIES, *SCRIPTS])
def test_an_old_python_and_a_missing_package_are_sentences(program):
    start = f"import runpy; runpy.run_path({program!r}, run_name='__main__')"
    old = "import sys; sys.version_info = (3, 10, 13, 'final', 0); " + start
    done = ranks.start([sys.executable, "-c", old, "--help"], 60)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: Trine needs Python 3.11 or newer, and ")
    assert done.err.count("\n") == 1
    packages = "('psutil', 'h5py', 'numpy', 'matplotlib')"
    without = f"import sys; sys.modules |= dict.fromkeys({packages}); {start}"
    done = ranks.start([sys.executable, "-c", without, "--no-such-flag"], 60)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert " has no package '" in done.err
    assert ("pip install numpy" if program == "plan.py" else "scripts/setup.sh") in done.err


@pytest.mark.parametrize("program", [*ENTRIES, *SCRIPTS, "base/errors.py"])
def test_an_old_python_reads_as_far_as_the_sentence(program):
    ast.parse((ROOT / program).read_text(), feature_version=(3, 7))


def test_an_output_that_cannot_be_written_is_a_sentence_and_no_reader_is_none():
    show = ["checkpoint.py", "show", "tests/data/run_189cc1d"]
    for output, said in (("> /dev/full", "error: cannot write the output: No space"), ("", "")):
        into, out = os.pipe()
        os.close(into)  # the reader is gone, as when `| head` has ended
        command = ["bash", "-c", f'exec "$@" {output}', "bash", sys.executable, *show]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, cwd=ROOT, text=True)
        os.close(out)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == bool(said)


def test_closed_standard_streams_are_replaced_so_that_no_file_gets_their_numbers(tmp_path):
    code = "import os; from base import errors; errors.begin_program()"
    code += "; file = os.open('.', 0); print(file)"
    show = f"{code}; os.write(3, str(file).encode())"
    with open(tmp_path / "out", "wb") as file:
        shell = ["bash", "-c", 'exec "$@" 3>&1 <&- >&- 2>&-', "bash", sys.executable, "-c", show]
        assert subprocess.run(shell, stdout=file, cwd=ROOT).returncode == 0
    assert int((tmp_path / "out").read_text()) > 3


# ---- What processes do not show ------------------------------------------------------------------


@pytest.mark.parametrize(("text", "threads"), [(" 4, 2", 4), ("3", 3), ("", None)])
def test_the_first_of_a_list_of_threads_counts(monkeypatch, text, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert threads_asked_for() == threads


def test_a_folder_that_can_be_written_is_left_as_it_is(tmp_path):
    paths.check_folder("--out", str(tmp_path))
    paths.check_folder("--out", str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"cannot write in .*: File name too long"):
        paths.check_folder("--out", str(tmp_path / ("x" * 300)))
    (tmp_path / "link").symlink_to(tmp_path / "link")
    with pytest.raises(UserError, match=r"link is a link to .*link, "):
        paths.check_folder("--out", str(tmp_path / "link" / "run"))


def test_a_file_stays_as_it_was_if_the_new_text_has_no_room(tmp_path, monkeypatch):
    """Texts, pictures of layouts, and the curve of a run."""
    run = tmp_path / "runs" / "a"
    words = "--layers 1 --hidden 8 --heads 2 --seq-length 8 --vocab-size 61 --data synthetic"
    words += f" --steps 2 --no-watchdog --out {run}"
    assert ranks.fork_ranks(1, "train.py", *words.split()).status == 0
    of_run = sorted(os.listdir(run))
    (tmp_path / "pages").mkdir()
    tmp_path = tmp_path / "pages"
    path = tmp_path / "page.html"
    path.write_text("old")
    path.chmod(0o640)

    def full(self, text):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match=r"cannot write .*No space"):
            paths.write_file(str(path), "new")
        with pytest.raises(UserError, match=r"cannot write .*No space"):
            picture.write(str(path), "x", "y", {"fits": [(1.0, 2.0)], "front": [(1.0, 2.0)]})
        with pytest.raises(UserError, match=r"cannot write .*loss.png: No space"):
            plot_loss.draw(run)
    assert sorted(os.listdir(run)) == of_run
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["page.html"])
    paths.write_file(str(path), "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    paths.write_file("/dev/null", "text")
    with open(path) as opened:  # as a shell that sends the output into a file
        paths.write_file(f"/dev/fd/{opened.fileno()}", "newer")
        assert os.path.samestat(os.fstat(opened.fileno()), path.stat())
    with pytest.raises(SystemExit), errors.sentences():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


@pytest.mark.usefixtures("ends")
def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "old").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    before = {path.name: path.lstat().st_mtime_ns for path in tmp_path.iterdir()}
    for name in ("old", "link", "new", "pipe"):
        check_file(str(tmp_path / name))
    check_file(None)
    assert {path.name: path.lstat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert (tmp_path / "old").read_text() == "kept"
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere" / "file")
    cases = {"a/b": "No such file", ".": "Is a directory", "x" * 300: "File name too long"}
    for name, why in (cases | {"old/b": "Not a directory", "lost": "No such file"}).items():
        with pytest.raises(UserError, match=f"cannot write .*: {why}"):
            check_file(str(tmp_path / name))


@pytest.mark.parametrize("flag", ["--kill-switch", "--save-switch"])
def test_a_switch_may_be_in_a_folder_that_the_run_makes(tmp_path, flag):
    words = "--layers 4 --hidden 64 --heads 4 --vocab-size 100 --steps 1"
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        given = [*words.split(), "--out", str(tmp_path / "a" / "b"), flag, str(folder / "stop")]
        run_paths.check_paths(command_line.parse(given))
    given = [*words.split(), "--out", str(tmp_path / "a" / "b"), flag, str(tmp_path / "a-b" / "x")]
    with pytest.raises(UserError, match=f"{flag} .* can never appear: there is no folder .*a-b"):
        run_paths.check_paths(command_line.parse(given))


def test_only_what_certainly_does_not_fit_is_refused():
    words = "--layers 4 --hidden 64 --heads 4 --vocab-size 1000 --steps 1 --device cpu"
    config = validation.check(command_line.parse(words.split()), 1)
    table = memory.run_memory(config)
    states = sum(table[0][part] for part in ("weights", "gradients", "optimizer"))
    least = max(states, sum(table[0].values()) / 2)
    memory.check_fits(table, config, least)
    with pytest.raises(UserError, match=r"needs, in GB, .*this node has 0\.0 GB"):
        memory.check_fits(table, config, least - 1)
    on_gpu = replace(config, run=replace(config.run, device="auto"))
    memory.check_fits(table, on_gpu, 1.0)  # the model may be on a GPU
    huge = [dict.fromkeys(memory.OF_RUN, 1000000000000.0)]
    with pytest.raises(UserError, match="no GPU has 1,000 GB"):
        memory.check_fits([huge[0] | {"weights": 1.1e12}], on_gpu, 1.0)
    memory.check_fits([huge[0] | {"weights": 1.1e12}], on_gpu, 1e13)
