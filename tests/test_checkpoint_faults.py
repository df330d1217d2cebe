"""If this failed, a kill during a save would lose a checkpoint, or a damaged one would load.

Twelve SIGKILLs at random moments take a quarter of a minute, 300 changed files a few seconds.
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
from compare import assert_within
from ranks import results_of, start

import trainer
from base.errors import UserError
from checkpointing import folders, save
from checkpointing.state import Progress
from config import validation

SEED = 20261120
KILLS, CHANGES, ROUNDS = 12, 300, 3


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_that_was_visible(tmp_path):
    command = [sys.executable, "tests/kill_worker.py", str(tmp_path), str(KILLS), str(SEED)]
    outcome = start(command, timeout=120 + 20 * KILLS)
    assert outcome.status == 0, outcome.err[-4000:]
    result = json.loads(outcome.out.splitlines()[-1])
    assert len(result["resumed"]) == KILLS
    assert result["during_save"] > 0
    assert result["runs"] == KILLS + 1
    print(
        f"{KILLS} kills with seed {SEED}, {result['during_save']} of them while a save was under "
        f"way: every restart began after the newest visible step; {result['rows']} rows of "
        f"{result['runs']} runs over {result['steps']} steps bitwise equal to the uninterrupted run"
    )


@pytest.mark.slow
def test_killed_and_resumed_under_other_layouts(tmp_path):
    """One rank is killed, the watchdog ends the rest, another layout resumes: one loss curve."""
    command = [sys.executable, "tests/resume_worker.py", str(tmp_path), str(ROUNDS), str(SEED)]
    outcome = start(command, timeout=120 + 30 * ROUNDS)
    assert outcome.status == 0, outcome.err[-4000:]
    result = json.loads(outcome.out.splitlines()[-1])
    assert len(result["layouts"]) == ROUNDS
    assert result["rows"] >= max(result["steps"], ROUNDS), "a row of each step and each round"
    assert_within(result["largest_difference"], 1e-5)
    print(
        f"{ROUNDS} rounds, {len({tuple(one) for one in result['layouts']})} layouts, "
        f"{result['rows']} rows of {result['steps']} steps: losses within "
        f"{result['largest_difference']:.1e} of the uninterrupted run; a job ended at most "
        f"{result['longest']} s after the kill"
    )


# ------------------------------------------------------------------------------------------------
# Changed files
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    """A run of two ranks' checkpoint: two shards, an index, a manifest."""
    folder = tmp_path_factory.mktemp("intact")
    options = {"tp": 2, "out": str(folder), "save_every": 1}
    job = {"options": options, "before": 2, "after": 0}
    results_of("tests/checkpoint_worker.py", 2, [job], folder)
    return folder / "checkpoints/step_00000002"


def truncate(path: Path, generator: random.Random) -> None:
    os.truncate(path, generator.randrange(path.stat().st_size))


def flip_a_bit(path: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def flip_bytes(path: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = generator.randrange(len(data))
    run = data[at : at + generator.randrange(1, 512)]
    data[at : at + len(run)] = bytes(byte ^ 0xFF for byte in run)
    path.write_bytes(data)


def lengthen(path: Path, generator: random.Random) -> None:
    path.write_bytes(path.read_bytes() + generator.randbytes(generator.randrange(1, 64)))


def delete(path: Path, generator: random.Random) -> None:
    path.unlink()


def randomize(path: Path, generator: random.Random) -> None:
    path.write_bytes(generator.randbytes(path.stat().st_size))


def swap(path: Path, generator: random.Random) -> None:
    """Exchange two files, shards mostly."""
    others = [p for p in path.parent.iterdir() if p != path]
    shard = path.parent / "rank_00000.h5"
    other = shard if path != shard and generator.random() < 0.7 else generator.choice(others)
    held = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(held)


def make_folder(path: Path, generator: random.Random) -> None:
    path.unlink()
    path.mkdir()


CHANGERS = (
    truncate,
    truncate,
    flip_a_bit,
    flip_a_bit,
    flip_a_bit,
    flip_bytes,
    lengthen,
    delete,
    randomize,
    swap,
)


@functools.cache
def run() -> trainer.TrainState:
    """One run of this process, into which every checkpoint is loaded."""
    return trainer.build(validation.check(worker.options({}), 1))


def load(folder: Path, out: Path) -> Progress:
    """Resume from exactly that folder."""
    state = run()
    options = worker.options({"out": str(out), "resume": str(folder)})
    config = validation.check(options, 1)
    mesh, lines = state.factory.mesh, []
    checkpoints = save.Checkpointer(config, mesh, state.optimizer, print_line=lines.append)
    return checkpoints.resume()


def test_no_changed_file_loads(intact, tmp_path):
    generator, refused = random.Random(SEED), {}
    assert load(intact, tmp_path).iteration == 2  # the unchanged one loads
    for number in range(CHANGES):
        folder = tmp_path / "step_00000002"
        shutil.copytree(intact, folder)
        path = generator.choice(sorted(folder.iterdir()))
        changer = generator.choice((*CHANGERS, make_folder))
        before = {p: p.read_bytes() for p in folder.iterdir()}
        changer(path, generator)
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
    """Each file is intact and has the right size."""
    options = {"out": str(tmp_path / "a"), "save_every": 1, "seed": 3}
    state = trainer.build(validation.check(worker.options(options), 1))
    checkpoints = save.Checkpointer(state.config, state.factory.mesh, state.optimizer)
    checkpoints.after_step(Progress(1, worker.BATCH))
    for p in state.stages.parameters():
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


def test_the_newest_complete_checkpoint_is_loaded_and_printed(intact, tmp_path):
    parent = tmp_path / "checkpoints"
    shutil.copytree(intact, parent / "step_00000002")
    for step in (5, 7):
        shutil.copytree(intact, parent / f"step_{step:08d}")
        os.remove(parent / f"step_{step:08d}" / ("manifest.json" if step == 5 else "rank_00001.h5"))
    (parent / ".step_00000009.0123abcd.partial").mkdir()
    body = folders.read_manifest(str(intact))
    files = {name: (entry["bytes"], entry["crc32"]) for name, entry in body["files"].items()}
    folders.write_manifest(str(parent / "step_00000007"), 7, files)

    config = worker.options({"out": str(tmp_path), "resume": "auto", "save_every": 1})
    state, lines = trainer.build(validation.check(config, 1)), []
    checkpoints = save.Checkpointer(
        state.config, state.factory.mesh, state.optimizer, print_line=lines.append
    )
    assert checkpoints.resume().iteration == 2
    assert "removed 1 unfinished" in lines[0]
    assert "step_00000007 cannot be loaded" in lines[1]
    assert "rank_00001.h5: No such file" in lines[1]
    assert "step_00000005 cannot be loaded" in lines[2]
    assert "resumed from" in lines[3]

    os.remove(parent / "step_00000002/index.h5")
    with pytest.raises(UserError, match=r"nothing to resume from: .*step_00000007.*step_00000002"):
        checkpoints.resume()


def test_a_newer_format_version_is_refused(intact, tmp_path, monkeypatch):
    folder = tmp_path / "step_00000002"
    shutil.copytree(intact, folder)
    body = folders.read_manifest(str(intact))
    with monkeypatch.context() as patch:
        patch.setattr(folders, "VERSION", 7)
        files = {name: (entry["bytes"], entry["crc32"]) for name, entry in body["files"].items()}
        folders.write_manifest(str(folder), 2, files)
    with pytest.raises(UserError, match="has format version 7; this code reads 1"):
        load(folder, tmp_path)


def test_files_without_permission(intact, tmp_path, monkeypatch):
    """Simulated, because root, which many containers run as, may read every file."""
    actual = os.open

    def refuse(path, *rest, **options):
        if str(path).endswith("rank_00001.h5"):
            raise PermissionError(13, "Permission denied", path)
        return actual(path, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"cannot read .*rank_00001.h5: Permission denied"):
        load(intact, tmp_path)
