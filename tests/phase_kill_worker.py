"""Kills a run with phases, and a branch of it, at random moments; checks that every row is on the
curve of the uninterrupted run.

    python tests/phase_kill_worker.py FOLDER KILLS SEED

A phase begins every three steps, with another length, batch or corpora, and every step is saved.
Each start is killed at a random moment of its first seconds, before its first row; or after it,
when a phase has just ended, when a save has just begun, or some steps later. Its layout is drawn at
random. Prints one JSON object with where each kill fell; RuntimeError if a row is not that of the
uninterrupted run, or a visible checkpoint is not whole.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import kill_worker
from compare import relative_difference
from small_corpora import write_corpora
from test_phases import written

SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 61 --lr 1e-3 --device cpu"
SHAPE += " --precision fp64 --split 100,0 --positions rotary --save-every 1"
LAYOUTS = ("", "--tp 2", "--pp 2", "--cp 2", "--zero 2")
STEPS, BRANCH_STEPS, AT = 90, 30, 60  # of the run and the branch; the branch begins after step AT
STEPS_OF_A_PHASE = 3
# When a start is killed: before its first row, or after it at any moment, when the row of a phase's
# last step is there, or when a save has begun.
AIMS = ("start", "any", "change", "save")


def plan(folder: Path, chance: random.Random) -> str:
    """The file of phases of three steps each, drawn at random; the last is that of the branch."""
    write_corpora(folder)
    phases, tokens = [], 0
    for number in range(STEPS // STEPS_OF_A_PHASE):
        length, batch = chance.choice((4, 8, 12, 16)), chance.choice((2, 4, 8))
        names = chance.sample(["a", "b", "c"], chance.randint(1, 3))
        data = [word for name in names for word in (chance.choice((1, 2)), f"{folder}/{name}")]
        phases.append({"name": f"s{number}", "from_tokens": tokens, "data": data})
        phases[-1] |= {"seq_length": length, "global_batch_size": batch}
        tokens += STEPS_OF_A_PHASE * length * batch
    # The branch goes on in the phase of step AT.
    last = phases[AT // STEPS_OF_A_PHASE - 1]
    decay = BRANCH_STEPS * last["seq_length"] * last["global_batch_size"]
    (folder / "decay").write_text(str(decay))
    return written(folder / "phases.toml", phases, train_tokens=tokens)


def run_and_kill(
    out: Path, words: list[str], kills: int, chance: random.Random, began_at: int
) -> list[dict]:
    """Kill a run so many times, then let it end; return where each kill fell (`place_of`).

    began_at: the step after which the run begins.
    """
    places = []
    seconds = 4.0  # of a start, up to its first row
    for _ in range(kills):
        since, began = time.time_ns(), time.monotonic()
        out.mkdir(exist_ok=True)
        layout = chance.choice(LAYOUTS)
        ids = kill_worker.launch(out, [*words, *layout.split()])
        aim = chance.choice(AIMS)
        if aim == "start":
            time.sleep(chance.uniform(0.0, seconds))
        else:
            try:
                kill_worker.wait_for_first_row(out / "metrics.jsonl", since, ids)
            except BaseException:
                for i in ids:
                    os.kill(i, signal.SIGKILL)
                raise
            seconds = time.monotonic() - began
            wait_for(aim, out, since, seconds, chance)
        kill_worker.kill(ids, chance.randrange(kill_worker.RANKS), chance.uniform(0.0, 0.05))
        places.append({"layout": layout, "aim": aim} | place_of(out, since, began_at))
    kill_worker.finish(out, words)
    return places


def wait_for(aim: str, out: Path, since: int, seconds: float, chance: random.Random) -> None:
    """Wait for the moment of a kill: AIMS has the names. It does not wait longer than a start."""
    limit = time.monotonic() + seconds
    if aim == "change":
        while time.monotonic() < limit and max(rows_in(out / "metrics.jsonl")) % STEPS_OF_A_PHASE:
            time.sleep(0.001)
    elif aim == "save":
        while time.monotonic() < limit and not is_saving(out, since):
            time.sleep(0.001)
    # A part of a step, or some steps on a busy machine too.
    time.sleep(chance.uniform(0.0, seconds / 2 if aim == "any" else 0.1))


def is_saving(out: Path, since: int) -> bool:
    """Whether a save of this start has begun and is not complete."""
    partial = (out / "checkpoints").glob(".*.partial")
    try:
        return any(path.stat().st_mtime_ns > since for path in partial)
    except FileNotFoundError:  # complete by now
        return False


def place_of(out: Path, since: int, began_at: int) -> dict:
    """Where a kill fell: the newest checkpoint's step, the last step that this start has a row of
    (None if it has none), whether a save had begun and not ended, and whether the next step was the
    first of a phase or of the run.
    """
    metrics, step = out / "metrics.jsonl", None
    if kill_worker.has_row(metrics, since):
        step = max(rows_in(metrics), default=None)
    newest = kill_worker.newest(out)
    at = max(newest, began_at) if step is None else step
    return {
        "newest": newest,
        "step": step,
        "save": is_saving(out, since),
        "first": at == began_at,
        "change": at % STEPS_OF_A_PHASE == 0,
    }


def rows_of(out: Path) -> dict[int, list[tuple]]:
    """What every start's row says of each step."""
    found: dict[int, list[tuple]] = {}
    for path in out.glob("metrics.jsonl*"):
        for step, facts in rows_in(path).items():
            found.setdefault(step, []).append(facts)
    return found


def rows_in(path: Path) -> dict[int, tuple]:
    """What the rows of one start say of each step."""
    found = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # cut short by the kill
            continue
        if "loss" in row:
            found[row["iteration"]] = row["loss"], row["learning_rate"], row["consumed_tokens"]
    return found


def compare(
    found: dict[int, list[tuple]], expected: dict[int, list[tuple]], first: int
) -> tuple[int, float]:
    """The number of rows of `found`, each of which is the row of an uninterrupted run, to fp64's
    rounding, and the largest relative difference.
    """
    compared, largest = 0, 0.0
    for step, rows in found.items():
        for row in rows:
            off = relative_difference(row, expected[step][0])
            if not off <= 1e-10:
                raise RuntimeError(f"step {step}: {row} is not {expected[step][0]}")
            compared, largest = compared + 1, max(largest, off)
    missing = set(range(first, max(expected) + 1)) - found.keys()
    if missing:
        raise RuntimeError(f"no row of steps {sorted(missing)}")
    return compared, largest


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    phases = plan(folder, chance)
    words = [*SHAPE.split(), "--lr-schedule", "constant", "--phases", phases]
    straight, killed = folder / "straight", folder / "killed"
    # Of the uninterrupted run no other checkpoint is needed, and a save takes longer than a step.
    kill_worker.finish(straight, [*words, "--out", str(straight), "--save-every", str(AT)])
    branches = kills // 3
    of_run = run_and_kill(
        killed, [*words, "--out", str(killed), "--resume", "auto"], kills - branches, chance, 0
    )
    rows, off = compare(rows_of(killed), rows_of(straight), 1)
    checkpoint = f"{straight}/checkpoints/step_{AT:08d}"
    decay = (folder / "decay").read_text()
    words = [*SHAPE.split(), "--branch-from", checkpoint, "--decay-tokens", decay]
    branch, expected = folder / "branch", folder / "straight_branch"
    whole = ["--out", str(expected), "--save-every", str(BRANCH_STEPS)]
    kill_worker.finish(expected, [*words, *whole])
    of_branch = run_and_kill(branch, [*words, "--out", str(branch)], branches, chance, AT)
    more, off_branch = compare(rows_of(branch), rows_of(expected), AT + 1)
    result = {"rows": rows + more, "off": max(off, off_branch), "phases": STEPS // STEPS_OF_A_PHASE}
    print(json.dumps(result | {"run": of_run, "branch": of_branch}))


if __name__ == "__main__":
    main()
