"""Kills a run with stages, and a branch of it, at random moments; checks that every row is on the
curve of the uninterrupted run.

    python tests/stage_kill_worker.py FOLDER KILLS SEED

A stage begins every three steps, with another length, batch or corpora, and every step is saved, so
that most kills are around a stage's change, a save or the branch's beginning. Each start runs until
a random moment from its first second on, under a layout drawn at random. Prints one JSON object;
RuntimeError if a row is not that of the uninterrupted run, or a visible checkpoint is not whole.
"""

import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

import kill_worker
from small_corpora import write_corpora
from test_stages import written

SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 61 --lr 1e-3 --device cpu"
SHAPE += " --precision fp64 --split 100,0 --positions rotary --save-every 1"
LAYOUTS = ("", "--tp 2", "--pp 2", "--cp 2", "--zero 2")
STEPS, BRANCH_STEPS, AT = 90, 30, 60  # of the run and the branch; the branch begins after step AT
STEPS_OF_A_STAGE = 3


def plan(folder: Path, chance: random.Random) -> str:
    """The file of stages of three steps each, drawn at random; the last is that of the branch."""
    write_corpora(folder)
    stages, tokens = [], 0
    for number in range(STEPS // STEPS_OF_A_STAGE):
        length, batch = chance.choice((4, 8, 12, 16)), chance.choice((2, 4, 8))
        names = chance.sample(["a", "b", "c"], chance.randint(1, 3))
        data = [word for name in names for word in (chance.choice((1, 2)), f"{folder}/{name}")]
        stages.append({"name": f"s{number}", "from_tokens": tokens, "data": data})
        stages[-1] |= {"seq_length": length, "global_batch_size": batch}
        tokens += STEPS_OF_A_STAGE * length * batch
    # The branch goes on in the stage of step AT.
    last = stages[AT // STEPS_OF_A_STAGE - 1]
    decay = BRANCH_STEPS * last["seq_length"] * last["global_batch_size"]
    (folder / "decay").write_text(str(decay))
    return written(folder / "stages.toml", stages, train_tokens=tokens)


def run_and_kill(out: Path, words: list[str], kills: int, chance: random.Random) -> list[int]:
    """Kill a run so many times; return the newest step after each kill, then let it end."""
    reached = []
    seconds = 4.0  # of a start, up to its first row
    for _ in range(kills):
        since, began = time.time_ns(), time.monotonic()
        out.mkdir(exist_ok=True)
        ids = kill_worker.launch(out, [*words, *chance.choice(LAYOUTS).split()])
        early = chance.random() < 0.3  # before the first row, in the start
        if early:
            time.sleep(chance.uniform(0.0, seconds))
        else:
            try:
                kill_worker.wait_for_first_row(out / "metrics.jsonl", since, ids)
            except BaseException:
                for i in ids:
                    os.kill(i, signal.SIGKILL)
                raise
            seconds = time.monotonic() - began
            time.sleep(chance.uniform(0.0, seconds / 2))  # some steps, on a busy machine too
        kill_worker.kill(ids, chance.randrange(kill_worker.RANKS), chance.uniform(0.0, 0.05))
        reached.append(kill_worker.newest(out))
    kill_worker.finish(out, words)
    return reached


def rows_of(out: Path) -> dict[int, list[tuple]]:
    """What every start's row says of each step."""
    found: dict[int, list[tuple]] = {}
    for path in out.glob("metrics.jsonl*"):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # cut short by the kill
                continue
            if "loss" in row:
                facts = row["loss"], row["learning_rate"], row["consumed_tokens"]
                found.setdefault(row["iteration"], []).append(facts)
    return found


def compare(found: dict[int, list[tuple]], expected: dict[int, list[tuple]], first: int) -> int:
    """The rows of `found`, each of which is the row of an uninterrupted run, to fp64's rounding."""
    compared = 0
    for step, rows in found.items():
        for row in rows:
            for ours, theirs in zip(row, expected[step][0], strict=True):
                if not math.isclose(ours, theirs, rel_tol=1e-10):
                    raise RuntimeError(f"step {step}: {row} is not {expected[step][0]}")
            compared += 1
    missing = set(range(first, max(expected) + 1)) - found.keys()
    if missing:
        raise RuntimeError(f"no row of steps {sorted(missing)}")
    return compared


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    stages = plan(folder, chance)
    words = [*SHAPE.split(), "--lr-schedule", "constant", "--stages", stages]
    straight, killed = folder / "straight", folder / "killed"
    kill_worker.finish(straight, [*words, "--out", str(straight)])
    branches = kills // 3
    of_run = run_and_kill(
        killed, [*words, "--out", str(killed), "--resume", "auto"], kills - branches, chance
    )
    rows = compare(rows_of(killed), rows_of(straight), 1)
    checkpoint = f"{straight}/checkpoints/step_{AT:08d}"
    decay = (folder / "decay").read_text()
    words = [*SHAPE.split(), "--branch-from", checkpoint, "--decay-tokens", decay]
    branch, expected = folder / "branch", folder / "straight_branch"
    kill_worker.finish(expected, [*words, "--out", str(expected)])
    of_branch = run_and_kill(branch, [*words, "--out", str(branch)], branches, chance)
    rows += compare(rows_of(branch), rows_of(expected), AT + 1)
    print(json.dumps({"rows": rows, "run": of_run, "branch": of_branch, "stages": STEPS // 3}))


if __name__ == "__main__":
    main()
