"""Files of others: only regular files are opened, nothing is waited for, and sizes are checked."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import ROOT

import checkpoint
import runs
from architecture.families import read_object
from base.errors import UserError
from base.regular_files import open_regular, read_regular
from config.command_line import parse_request, read_toml
from corpora.mapped_files import MappedFile
from corpora.tokenizer_files import load_tokenizer
from scripts import prepare_data
from telemetry.log import Log
from telemetry.loss_monitor import earlier_steps
from tools.numerics import spikes, traces
from tools.numerics.record import read
from tools.planner.run_files import rows_of
from tools.supervisor.decisions import read_entries
from tools.tuner.trials import Trial, TrialStore

pytestmark = pytest.mark.usefixtures("ends")
DEMO = ROOT / "tests/data"
ESCAPE = "\x1b]0;TITLE\x07\u202e"


def special_files(folder: Path) -> list[Path]:
    os.mkfifo(folder / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(folder / "pipe")
    names = ("pipe", "socket", "folder", "link")
    return [*(folder / name for name in names), Path("/dev/zero"), Path("/dev/tty")]


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "file-link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "file") == b"text"
    assert read_regular(tmp_path / "file-link") == b"text"
    with pytest.raises(OSError, match="it is not a regular file"):
        open_regular(tmp_path / "file-link", follow=False)
    for path in special_files(tmp_path):
        for follow in (True, False):
            with pytest.raises(OSError, match=r"regular file|directory|symbolic|such|device"):
                open_regular(path, follow)
    with pytest.raises(OSError, match="it has 4 bytes, and at most 3 are read"):
        read_regular(tmp_path / "file", 3)
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(2**33)
    with pytest.raises(OSError, match="at most 67,108,864 are read"):
        read_regular(tmp_path / "hole")


@pytest.mark.parametrize(
    "reader",
    [
        lambda path: read_toml(path, "the file"),
        lambda path: read_object(str(path)),
        lambda path: load_tokenizer(str(path)),
        lambda path: traces.read(path),
        lambda path: rows_of(path),
        lambda path: TrialStore(path),
    ],
    ids=["toml", "json", "tokenizer", "trace", "rows", "trials"],
)
def test_every_reader_refuses_a_pipe_in_one_sentence(tmp_path, reader):
    for path in special_files(tmp_path):
        with pytest.raises(UserError):
            reader(path)


def test_readers_of_a_run_do_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl.1")
    assert read_entries(tmp_path / "metrics.jsonl.1") == []
    with pytest.raises(OSError, match="it is not a regular file"):
        earlier_steps(str(tmp_path), 3)
    with pytest.raises(OSError, match="it is not a regular file"):
        MappedFile(str(tmp_path / "metrics.jsonl.1"))


@pytest.mark.parametrize("program", ["train.py", "supervise.py"])
def test_a_pipe_as_config_is_a_sentence(tmp_path, program):
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, program, "--config", str(tmp_path / "pipe"), "--dry-run"]
    if program == "supervise.py":
        command = [sys.executable, program, "--", sys.executable, "train.py", *command[2:]]
    done = subprocess.run(command[:4] if program == "train.py" else command, cwd=ROOT,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


# ---- The folder of a run -------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder with the files of a run of three steps, and a trace of one."""
    folder = tmp_path / "run"
    (folder / "numerics").mkdir(parents=True)
    model = {"layers": 1, "hidden": 8, "heads": 1, "vocab_size": 16, "seq_length": 8}
    config = {"model": model, "training": {"steps": 3}, "layout": {"dp": 1}, "run": {}, "data": {}}
    facts = {"config": config, "blocks_per_stage": [1], "cluster": {"ranks": 1}}
    (folder / "run.json").write_text(json.dumps(facts))
    row = {"loss": 3.0, "grad_norm": 1.0, "learning_rate": 0.1, "seconds": 1.0, "skipped": False}
    row |= {"tokens_per_second": 1.0, "tflops_model": 1.0, "global_batch_size": 1}
    rows = [row | {"iteration": n, "consumed_samples": n, "consumed_tokens": n} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_trace(folder)
    return folder


def write_trace(folder: Path, save=np.savez, values=None, **changes) -> None:
    about = {"format": traces.FORMAT, "activations": ["embedding"], "parameters": ["a"], "bins": 2}
    about |= {"kinds": ["gradient", "weights"], "samples": 2, "step": 1, "response_step": 1}
    about |= {"precision": "fp32", "optimizer": "adamw", "layout": {"dp": 1}} | changes
    values = np.ones((4, 12)) if values is None else values
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    file = folder / "numerics/step-000001.npz"
    save(file, values=values, response=np.ones(2, np.float32), about=text)


def diff(folder: Path) -> int:
    return runs.run_command(["diff", str(folder), str(folder)])


def test_a_right_trace_is_read(run, capsys):
    assert diff(run) == 0
    assert "rounding explains all tensors of step-000001.npz" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"activations": "embedding"},
        {"parameters": [1]},
        {"kinds": []},
        {"bins": 10**18},
        {"bins": 3},
        {"samples": 10**15},
        {"precision": ["fp32"]},
        {"precision": "fp4"},
        {"layout": {"tp": 10**9}},
        {"layout": {"tp": "2"}},
        {"layout": {"unknown": 1}},
        {"layout": []},
        {"response_step": "1"},
        {"values": np.array([["text"] * 12] * 4)},
        {"values": np.ones((4, 2))},
        {"values": np.ones(48)},
        {"values": np.ones((4, 12), complex)},
        {"save": np.savez_compressed},
    ],
    ids=[str(number) for number in range(18)],
)
def test_a_trace_of_other_types_or_sizes_is_one_sentence(run, changes):
    write_trace(run, **changes)
    with pytest.raises(UserError, match=r"is no file of --trace-numerics: "):
        diff(run)


def test_a_trace_is_measured_before_memory_is_taken(run):
    file = run / "numerics/step-000001.npz"
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            if name == "values.npy":
                header = {"descr": "<f8", "fortran_order": False, "shape": (10**15, 12)}
                np.lib.format.write_array_header_1_0(forged := io.BytesIO(), header)
                content = forged.getvalue()
            archive.writestr(name, content)
    with pytest.raises(UserError, match="is no file of --trace-numerics"):
        diff(run)
    np.save(file.open("wb"), np.ones(3))
    with pytest.raises(UserError, match="is no file of --trace-numerics"):
        diff(run)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "spikes.jsonl"])
def test_a_pipe_in_the_folder_of_a_run_is_not_waited_for(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for words in (["show"], ["diff", "--spikes"], ["chart", "--text"]):
        needed = {"run.json": True, "metrics.jsonl": words == ["chart", "--text"]}
        needed["spikes.jsonl"] = "--text" not in words
        command = [words[0], str(run), *words[1:]]
        if needed[name]:
            with pytest.raises(UserError, match="not a regular file"):
                runs.run_command(command)
        else:
            runs.run_command(command)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration", "1"),
        ("iteration", 10**400),
        ("loss", [3.0]),
        ("learning_rate", "0.1"),
        ("grad_norm", {}),
        ("consumed_tokens", 1.5),
        ("seconds", None),
    ],
)
def test_a_row_of_other_types_is_left_out_with_a_note(run, name, value, capsys):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1][name] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = read(run)
    assert [row["iteration"] for row in record.steps] == [1, 3]
    if name != "loss":
        assert any("1 lines are damaged and not read" in note for note in record.notes)
    for words in (["show", run], ["chart", "--text", run], ["diff", run, run]):
        runs.run_command([str(word) for word in words])
    capsys.readouterr()


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("model", "hidden", "8"),
        ("training", "precision", ["fp32"]),
        ("training", "steps", {}),
        ("layout", "dp", True),
        ("", "blocks_per_stage", "1"),
        ("", "cluster", {"ranks": "1"}),
        ("", "command", [1]),
    ],
)
def test_facts_of_other_types_are_one_sentence(run, group, name, value):
    facts = json.loads((run / "run.json").read_text())
    (facts["config"][group] if group else facts)[name] = value
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=name):
        diff(run)


def test_what_files_say_moves_no_terminal(run, capsys):
    spike = {"iteration": 2, "loss": 9.0, "of": f"loss{ESCAPE}"}
    spike |= {"samples": [{"text": [{"prefix": f"corpus{ESCAPE}", "document": 1}]}]}
    broken = [{"iteration": 1}, spike | {"samples": 3}, spike | {"before": []}]
    broken.append(spike | {"loss": "9"})
    infinite = spike | {"loss": None}  # a loss that is not finite is null, and still a spike
    lines = [json.dumps(row) + "\n" for row in [spike, infinite, *broken]]
    (run / "spikes.jsonl").write_text("".join(lines))
    assert runs.run_command(["diff", str(run), "--spikes"]) == 1
    shown = capsys.readouterr().out
    assert "4 rows of spikes.jsonl are no spikes" in shown
    assert r"documents 1 of corpus\x1b]0;TITLE\x07\u202e" in shown
    other = run.with_name("other")
    other.mkdir()
    facts = json.loads((run / "run.json").read_text())
    facts["config"]["training"]["optimizer"] = f"adamw{ESCAPE}"
    (other / "run.json").write_text(json.dumps(facts))
    (other / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    for words in (["diff", run, other], ["show", other], ["list", run.parent]):
        runs.run_command([str(word) for word in words])
        shown += capsys.readouterr().out
    assert r"option optimizer: adamw in A, adamw\x1b" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    found = spikes.compare(run)
    assert ([row["loss"] for row in found["spikes"]], found["left_out"]) == ([9.0, None], 4)


def test_what_a_strangers_model_corpus_or_checkpoint_says_moves_no_terminal(tmp_path, capsys):
    """Names of fields in a config.json, of files, and texts in a checkpoint's options."""
    transformers = pytest.importorskip("transformers")
    hf = tmp_path / "hf"
    hf.mkdir()
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(hf)
    facts = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(facts | {f"field{ESCAPE}": 1}))
    (hf / f"file{ESCAPE}").write_text("")
    checkpoint.run_command(["import", "--from", "hf", str(hf), str(tmp_path / "in")])
    shown = capsys.readouterr().out
    assert "field\\x1b" in shown
    assert "file\\x1b" in shown
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("a text")
    (texts / "b.x\x1b[31m").write_text("")
    prepare_data.main(["--out", str(tmp_path / "c"), "--tokenizer", "bytes", str(texts)])
    words = ["--model", str(hf), "--data", "synthetic", "--steps", "1", "--seq-length", "8"]
    notes = parse_request(words).notes
    assert any("field\\x1b" in note for note in notes)
    log = SimpleNamespace(is_writer=True, waiting=None, early=[], text=None)
    log.without = lambda what: contextlib.nullcontext()
    Log.note(log, f"options that changed: precision fp32{ESCAPE} before, bf16 now")
    assert "\x1b" not in shown + capsys.readouterr().out + log.early[0]


# ---- Trials --------------------------------------------------------------------------------------


def test_a_trial_that_has_no_room_is_a_sentence(tmp_path):
    store = TrialStore(tmp_path / "trials.jsonl")
    (tmp_path / "trials.jsonl").symlink_to("/dev/full")
    trial = Trial(key="k", label="l", ranks=1, status="ok", reason="", seconds=[1.0],
                  predicted=1.0, config={})  # fmt: skip
    with pytest.raises(
        UserError, match=r"cannot write trial 1 into .*No space left .* the 0 before"
    ):
        store.add(trial)


def test_a_trial_of_other_types_is_named_and_a_cut_line_too(tmp_path):
    path = tmp_path / "trials.jsonl"
    trial = {"key": "k", "label": "l", "ranks": 1, "status": "ok", "reason": "", "seconds": [1.0]}
    trial |= {"predicted": 1.0, "config": {}}
    path.write_text(json.dumps(trial) + "\n" + '{"key": "k2"')
    store = TrialStore(path)
    assert [one.key for one in store.trials] == ["k"]
    assert store.note == f"{path}, line 2, was cut off and is left out"
    assert TrialStore(path).note == ""
    for name, value in (("label", 1), ("seconds", "1"), ("seconds", [None]), ("config", [])):
        path.write_text(json.dumps(trial | {name: value}) + "\n")
        with pytest.raises(UserError, match=f"line 1, is no trial: {name} is"):
            TrialStore(path)
    for line in ("\0\0\0", "NaN", "[1]", "text"):
        path.write_text(f"{line}\n")
        with pytest.raises(UserError, match="line 1, is no trial"):
            TrialStore(path)
