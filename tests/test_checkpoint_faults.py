"""What a checkpoint stands: ranks killed while they save, and files that have changed since.

Fifty SIGKILLs at random moments take a minute or two; 300 changed files a few seconds.
"""

import functools
import json
import os
import random
import shutil
import sys
from pathlib import Path

import checkpoint_worker as worker
import pytest
from ranks import mpirun, start

import trainer
from checkpointing import file_format, save
from checkpointing.load import Progress
from config import validation
from config.messages import UserError

SEED = 20261120
KILLS, CHANGES, ROUNDS = 50, 300, 8


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_that_was_visible(tmp_path):
    command = [sys.executable, "tests/kill_worker.py", str(tmp_path), str(KILLS), str(SEED)]
    outcome = start(command, timeout=120 + 20 * KILLS)
    assert outcome.status == 0, outcome.err[-4000:]
    result = json.loads(outcome.out.splitlines()[-1])
    assert len(result["resumed"]) == KILLS
    assert result["during_save"] > KILLS // 4
    assert result["runs"] == KILLS + 1
    print(
        f"{KILLS} kills with seed {SEED}, {result['during_save']} of them while a save was under "
        f"way: every restart began after the newest visible step; {result['rows']} rows of "
        f"{result['runs']} runs over {result['steps']} steps bitwise equal to the straight run"
    )


@pytest.mark.slow
def test_killed_and_resumed_under_other_layouts(tmp_path):
    """One rank is killed, the watchdog ends the rest, another layout goes on: one loss curve."""
    command = [sys.executable, "tests/resume_worker.py", str(tmp_path), str(ROUNDS), str(SEED)]
    outcome = start(command, timeout=120 + 30 * ROUNDS)
    assert outcome.status == 0, outcome.err[-4000:]
    result = json.loads(outcome.out.splitlines()[-1])
    assert len(result["layouts"]) == ROUNDS
    assert result["rows"] >= result["steps"] >= ROUNDS
    assert result["furthest"] < 1e-5
    print(
        f"{ROUNDS} rounds, {len({tuple(one) for one in result['layouts']})} layouts, "
        f"{result['rows']} rows of {result['steps']} steps: losses within "
        f"{result['furthest']:.1e} of the straight run; a job was gone {result['longest']} s after "
        f"the kill at most"
    )


# ------------------------------------------------------------------------------------------------
# Changed files
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    """A run of two ranks' checkpoint: two shards, an index, a manifest."""
    folder = tmp_path_factory.mktemp("intact")
    options = {"tp": 2, "out": str(folder), "save_every": 1}
    jobs, results = folder / "jobs.json", folder / "results.json"
    jobs.write_text(json.dumps([{"options": options, "before": 2, "after": 0}]))
    outcome = mpirun(2, "tests/checkpoint_worker.py", str(jobs), str(results))
    assert outcome.status == 0, outcome.err[-4000:]
    return folder / "checkpoints/step_00000002"


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def flip_a_run(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    run = data[at : at + chance.randrange(1, 512)]
    data[at : at + len(run)] = bytes(byte ^ 0xFF for byte in run)
    path.write_bytes(data)


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 64)))


def lose(path: Path, chance: random.Random) -> None:
    path.unlink()


def make_foreign(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(path.stat().st_size))


def swap(path: Path, chance: random.Random) -> None:
    """Exchange two files, shards mostly."""
    others = [p for p in path.parent.iterdir() if p != path]
    shard = path.parent / "rank_00000.h5"
    other = shard if path != shard and chance.random() < 0.7 else chance.choice(others)
    held = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(held)


def make_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


CHANGERS = (truncate, truncate, flip, flip, flip, flip_a_run, lengthen, lose, make_foreign, swap)


@functools.cache
def run() -> trainer.TrainState:
    """One run of this process, to load into again and again."""
    return trainer.build(validation.check(worker.options({}), 1))


def load(folder: Path, out: Path) -> Progress:
    """Resume from exactly that folder."""
    pieces = run()
    options = worker.options({"out": str(out), "resume": str(folder)})
    config = validation.check(options, 1)
    mesh, said = pieces.factory.mesh, []
    checkpoints = save.Checkpointer(config, mesh, pieces.optimizer, say=said.append)
    return checkpoints.resume()


def test_no_changed_file_loads(intact, tmp_path):
    chance, refused = random.Random(SEED), {}
    assert load(intact, tmp_path).iteration == 2  # unchanged it does
    for number in range(CHANGES):
        folder = tmp_path / "step_00000002"
        shutil.copytree(intact, folder)
        path = chance.choice(sorted(folder.iterdir()))
        changer = chance.choice((*CHANGERS, make_folder))
        before = {p: p.read_bytes() for p in folder.iterdir()}
        changer(path, chance)
        if {p: p.is_file() and p.read_bytes() for p in folder.iterdir()} == before:
            raise AssertionError(f"change {number}, {changer.__name__}, changed nothing")
        with pytest.raises(UserError) as caught:
            load(folder, tmp_path)
        sentence = str(caught.value)
        assert "\n" not in sentence
        assert len(sentence) < 400
        assert str(folder) in sentence, sentence
        refused[changer.__name__] = refused.get(changer.__name__, 0) + 1
        shutil.rmtree(folder)
    print(f"{CHANGES} changed files with seed {SEED}, each refused in a sentence: {refused}")


def test_shards_of_another_step_are_refused(intact, tmp_path):
    """Each intact by itself, and of the right sizes."""
    options = {"out": str(tmp_path / "a"), "save_every": 1, "seed": 3}
    pieces = trainer.build(validation.check(worker.options(options), 1))
    checkpoints = save.Checkpointer(pieces.config, pieces.factory.mesh, pieces.optimizer)
    checkpoints.after_step(Progress(1, worker.BATCH))
    for p in pieces.stages.parameters():
        p.data.add_(1e-3)
    checkpoints.after_step(Progress(2, 2 * worker.BATCH))
    checkpoints.close()
    first, second = sorted((tmp_path / "a/checkpoints").iterdir())
    shutil.copy(first / "rank_00000.h5", second / "rank_00000.h5")
    with pytest.raises(UserError, match=r"rank_00000.h5 is damaged: its CRC-32 is"):
        load(second, tmp_path)
    shutil.rmtree(second)
    shutil.copytree(first, second)
    with pytest.raises(UserError, match="holds step 1, not the step of its name"):
        load(second, tmp_path)


def test_the_newest_complete_one_is_taken_and_said(intact, tmp_path):
    parent = tmp_path / "checkpoints"
    shutil.copytree(intact, parent / "step_00000002")
    for step in (5, 7):
        shutil.copytree(intact, parent / f"step_{step:08d}")
        os.remove(parent / f"step_{step:08d}" / ("manifest.json" if step == 5 else "rank_00001.h5"))
    (parent / ".step_00000009.0123abcd.partial").mkdir()
    body = file_format.read_manifest(str(intact))
    files = {name: (entry["bytes"], entry["crc32"]) for name, entry in body["files"].items()}
    file_format.write_manifest(str(parent / "step_00000007"), 7, files)

    config = worker.options({"out": str(tmp_path), "resume": "auto", "save_every": 1})
    pieces, said = trainer.build(validation.check(config, 1)), []
    checkpoints = save.Checkpointer(
        pieces.config, pieces.factory.mesh, pieces.optimizer, say=said.append
    )
    assert checkpoints.resume().iteration == 2
    assert "removed 1 unfinished" in said[0]
    assert "step_00000007 cannot be loaded" in said[1]
    assert "rank_00001.h5: No such file" in said[1]
    assert "step_00000005 cannot be loaded" in said[2]
    assert "resumed from" in said[3]

    os.remove(parent / "step_00000002/index.h5")
    with pytest.raises(UserError, match=r"nothing to resume from: .*step_00000007.*step_00000002"):
        checkpoints.resume()


def test_a_format_of_the_future_is_refused(intact, tmp_path, monkeypatch):
    folder = tmp_path / "step_00000002"
    shutil.copytree(intact, folder)
    body = file_format.read_manifest(str(intact))
    with monkeypatch.context() as patch:
        patch.setattr(file_format, "VERSION", 7)
        files = {name: (entry["bytes"], entry["crc32"]) for name, entry in body["files"].items()}
        file_format.write_manifest(str(folder), 2, files)
    with pytest.raises(UserError, match="has format version 7; this code reads 1"):
        load(folder, tmp_path)


def test_files_without_permission(intact, tmp_path, monkeypatch):
    """Simulated: root, who runs many a container, may read everything."""
    actual = os.open

    def refuse(path, *rest):
        if str(path).endswith("rank_00001.h5"):
            raise PermissionError(13, "Permission denied", path)
        return actual(path, *rest)

    monkeypatch.setattr(file_format.os, "open", refuse)
    with pytest.raises(UserError, match=r"cannot read .*rank_00001.h5: Permission denied"):
        load(intact, tmp_path)
