"""Starts in a folder that a run has used: if this failed, a start would lose or rename files of an
earlier run without a word, or go on with options that the run did not have.
"""

import json
import shlex
from pathlib import Path

import pytest
from ranks import fork_one
from small_corpora import END, write_chats

import checkpoint
import sample
from base.errors import UserError
from checkpointing import folders, resumed
from checkpointing.resumed import inherited_options
from config.command_line import parse_request
from tools.numerics import diff, record

WORDS = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 --device cpu --no-watchdog"
SAVED = "--steps 6 --save-every 3"


def train(out: Path, words: str, status: int = 0, shape: str = WORDS) -> str:
    """Train, and return what was printed."""
    done = fork_one("train.py", *shape.split(), *words.split(), "--out", str(out))
    assert done.status == status, done.out + done.err
    return done.out + done.err


def steps(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.glob("step_*"))]


def rows(out: Path, ending: str = "") -> list[dict]:
    lines = (out / f"metrics.jsonl{ending}").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def test_a_run_without_resume_moves_no_checkpoint_before_it_saves(tmp_path):
    """The next --resume auto goes on with the run that has saved, in its own files."""
    train(tmp_path, SAVED)
    (tmp_path / "spikes.jsonl").write_text('{"iteration": 1}\n')
    printed = train(tmp_path, "--steps 2 --lr 1e-2")
    names = "run.json, metrics.jsonl, times.jsonl, log.txt, spikes.jsonl"
    where = f"{tmp_path} has files of another run, which now have names that end in .1"
    assert f"{where}: {names}" in printed
    assert where in (tmp_path / "log.txt").read_text()
    assert steps(tmp_path / "checkpoints") == ["step_00000003", "step_00000006"]
    assert not list(tmp_path.glob("checkpoints.*"))
    assert (tmp_path / "spikes.jsonl.1").exists()

    printed = train(tmp_path, "--resume auto --steps 8", shape="")
    assert "step_00000006: step 6, 48 samples consumed" in printed
    assert "which now have names that end in .2: run.json," in printed
    assert [row["iteration"] for row in rows(tmp_path)] == [7, 8]
    assert (tmp_path / "spikes.jsonl").read_text() == '{"iteration": 1}\n'
    # The record of the run has its own steps, without those of the run between.
    assert [row["iteration"] for row in record.read(tmp_path).steps] == [*range(1, 9)]


def test_a_save_moves_the_checkpoints_of_the_run_before_and_says_so(tmp_path):
    train(tmp_path, SAVED)
    printed = train(tmp_path, "--steps 2 --save-every 2")
    assert f"set aside in {tmp_path}/checkpoints.1: step_00000006, step_00000003" in printed
    assert "began at step 0, without --resume" in printed
    assert steps(tmp_path / "checkpoints") == ["step_00000002"]
    # A run that saves only because it is stopped moves them, too.
    printed = train(tmp_path, "--steps 9 --stop-at-samples 8", status=75)
    assert f"set aside in {tmp_path}/checkpoints.2: step_00000002" in printed
    assert steps(tmp_path / "checkpoints") == ["step_00000001"]


def test_checkpoints_beside_an_empty_place_are_named(tmp_path):
    train(tmp_path, SAVED)
    before = (tmp_path / "run.json").read_bytes()
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints.2")
    newest = tmp_path / "checkpoints.2/step_00000006"
    for words in ("--resume auto", f"--resume {tmp_path}", f"--resume {tmp_path}/checkpoints"):
        for shape in (WORDS, ""):
            printed = train(tmp_path, f"{words} --steps 9", status=2, shape=shape)
            assert f"there are some beside it: {newest} (steps 6, 3). Give one" in printed
    assert (tmp_path / "run.json").read_bytes() == before
    with pytest.raises(UserError, match=r"checkpoints\.2/step_00000006 \(steps 6, 3\)"):
        checkpoint.run_command(["show", str(tmp_path)])
    with pytest.raises(UserError, match=r"checkpoints\.2/step_00000006 \(steps 6, 3\)"):
        sample.prepare_task(sample.parse([str(tmp_path), "--prompt", "x"]), 1)
    assert "step_00000006: step 6" in train(tmp_path, f"--resume {newest} --steps 7")
    assert steps(tmp_path / "checkpoints.2") == ["step_00000003", "step_00000006"]


@pytest.mark.parametrize("words", [["--resume"], ["--resume", "auto", "--branch-from"]], ids=str)
def test_a_checkpoint_that_is_not_there_is_the_mistake_and_not_the_missing_model(words, tmp_path):
    with pytest.raises(UserError, match="nowhere is not a complete checkpoint: there is no such"):
        parse_request([*words, "nowhere", "--out", str(tmp_path)], resumed=inherited_options)


def test_an_import_in_which_a_run_has_saved_is_not_taken_for_one_of_both(tmp_path):
    """Else the imported model would be sampled, exported and resumed in place of the tuned one."""
    for name in ("step_00000000", "checkpoints/step_00000004", "checkpoints/step_00000002"):
        (tmp_path / name).mkdir(parents=True)
    words = rf"two places: {tmp_path}/step_00000000, and .* newest {tmp_path}/checkpoints/step_.*4"
    with pytest.raises(UserError, match=words):
        folders.find_checkpoints(str(tmp_path))
    (found, _) = folders.find_checkpoints(str(tmp_path / "checkpoints"))
    assert found.endswith("step_00000004")
    with pytest.raises(UserError, match=words):
        resumed.candidates(str(tmp_path), "elsewhere")
    assert len(resumed.candidates("auto", str(tmp_path))) == 2


def test_checkpoints_that_an_audit_has_set_aside_do_not_stop_a_new_beginning(tmp_path):
    parent = tmp_path / "checkpoints"
    (parent / "step_00000003").mkdir(parents=True)
    line = folders.set_aside(str(parent), -1, "an audit found wrong results", wrong=True)
    assert line.endswith("step_00000003; an audit found wrong results")
    folders.refuse_set_aside(str(parent))
    (parent / "step_00000004").mkdir()
    folders.set_aside(str(parent), -1, "another course")
    with pytest.raises(UserError, match=r"checkpoints\.2/step_00000004 \(steps 4\)"):
        folders.refuse_set_aside(str(parent))


def test_a_start_that_has_no_step_to_do_or_is_refused_replaces_nothing(tmp_path):
    train(tmp_path, SAVED)
    files = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    log = files.pop(tmp_path / "log.txt")
    printed = train(tmp_path, "--resume auto --lr 1e-2 --steps 6 --micro-batch-size 2")
    assert "options that changed: lr 0.0003 before, 0.01 now" in printed
    assert "the run is finished: 6 steps, 48 samples are done; a larger --steps or" in printed
    printed = train(tmp_path, "--resume auto --train-samples 55", shape="--device cpu")
    assert "48 samples are done, and the 7 that are left are fewer than a batch of 8;" in printed
    for words, both in (
        ("--steps 5", "steps(5) is less than the 6 steps"),
        ("--train-samples 47", "train-samples(47) is less than the 48 samples"),
    ):
        printed = train(tmp_path, f"--resume auto {words}", status=2, shape="--device cpu")
        assert (
            f"error: {both} that are done in the checkpoint from which the run goes on" in printed
        )
    train(tmp_path, "--resume auto --steps 9 --optimizer sgd", status=2)
    train(tmp_path, "--resume auto --steps 9 --layers 2 --hidden 8 --heads 2", status=2, shape="")
    assert {path: path.read_bytes() for path in files} == files
    assert (tmp_path / "log.txt").read_bytes().startswith(log)
    assert not list(tmp_path.glob("*.1"))


def test_printed_commands_can_be_typed_with_any_name(tmp_path):
    out = tmp_path / "a run's folder"
    printed = train(out, "--steps 2")
    (line,) = [line for line in printed.splitlines() if "by part: python plan.py" in line]
    assert shlex.split(line.partition("by part: ")[2])[-2:] == ["--config", str(out)]
    (tmp_path / "hf dir").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf dir" / name).touch()
    with pytest.raises(UserError) as caught:
        folders.read_manifest(str(tmp_path / "hf dir"))
    command = str(caught.value).split("`")[1]
    assert shlex.split(command)[-2:] == [str(tmp_path / "hf dir"), "NEW_FOLDER"]
    with pytest.raises(UserError, match=r"run.json is not a complete checkpoint: it is a file$"):
        folders.read_manifest(str(out / "run.json"))


def test_a_resume_with_another_batch_size_has_the_rate_of_what_is_consumed(tmp_path):
    """40 steps with 8 samples each, after 20 of them with 2: 200 samples in all."""
    words = "--lr 1e-3 --min-lr 1e-5 --steps 40 "
    train(tmp_path, words + "--stop-at-samples 160", status=75)
    printed = train(tmp_path, "--global-batch-size 2 --resume auto", shape="--device cpu")
    assert "global_batch_size 8 before, 2 now" in printed
    now = "the run now has 200 samples in all, 320 before: the learning rate goes by the 40 that"
    assert now in printed
    rates = {row["iteration"]: row["learning_rate"] for row in rows(tmp_path)}
    assert rates.keys() == set(range(21, 41))
    assert rates[21] == pytest.approx(1.0454e-4, rel=1e-3)
    assert 1e-5 < rates[40] < 1.1e-5
    assert sorted(rates.values(), reverse=True) == list(rates.values())


@pytest.mark.slow
def test_a_resume_takes_the_data_options_of_the_run(tmp_path):
    write_chats(tmp_path)
    data = f"--data {tmp_path}/chats --split 1 --cache none "
    more = f"--answers-only --reset-attention --reset-positions --eod-token {END} --seed 5 "
    more += "--weight-decay 0.3 --adam-beta2 0.9 --lr-warmup-samples 9 --save-every 4"
    whole, parts, changed = (tmp_path / name for name in ("whole", "parts", "changed"))
    train(whole, data + more + " --steps 8")
    train(parts, data + more + " --steps 8 --stop-at-samples 32", status=75)
    printed = train(changed, f"--resume {parts} {data} --no-reset-attention --steps 8")
    assert "reset_attention True before, False now" in printed
    printed = train(parts, f"--resume auto {data} --steps 8")
    assert "answers-only" in printed
    assert "reset-positions" in printed
    assert "options that changed" not in printed
    # To the bit the same steps as those of the run that was not interrupted.
    assert [row["loss"] for row in rows(parts)] == [row["loss"] for row in rows(whole)[4:]]
    # A mistake that comes from the checkpoint says where it comes from.
    printed = train(parts, "--resume auto --data synthetic --steps 9", status=2)
    assert "--answers-only needs the files of --data" in printed
    assert "taken from" in printed


def test_diff_says_first_that_the_data_differ(tmp_path):
    """Two corpora of the same documents, prepared in another order."""
    for number, name in enumerate("ab"):
        folder = tmp_path / name
        folder.mkdir()
        write_chats(folder)
        if number:  # other tokens in the same places
            tokens = (folder / "chats.bin").read_bytes()
            (folder / "chats.bin").write_bytes(tokens[::-2] + tokens[::-2])
        train(tmp_path / f"run_{name}", f"--data {folder}/chats --split 1 --cache none --steps 3")
    train(tmp_path / "again", f"--data {tmp_path}/a/chats --split 1 --cache none --steps 9")
    found = diff.compare(tmp_path / "run_a", tmp_path / "run_b")
    assert found["data"]["sample"] == 1
    assert found["differs"]
    lines = diff.text(found).splitlines()
    assert lines[2].startswith("the data differ: sample 1 of the run is not the same text")
    facts = json.loads((tmp_path / "run_a/run.json").read_text())
    assert list(facts["samples"]) == ["1", "2", "4", "8", "16"]  # of 24
    same = diff.compare(tmp_path / "run_a", tmp_path / "run_a")
    assert same["data"] is None
    assert not same["differs"]
