"""Starts two ranks many times, kills one at a random moment, and checks the checkpoints.

    python tests/kill_worker.py FOLDER KILLS SEED

Ranks are forked from this process after its imports, which take most of a start: each is a process
that runs trainer.main as torchrun would have started it. Prints one JSON object; RuntimeError if a
visible checkpoint is not whole or a resumed run differs.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from ranks import free_port

import trainer
from checkpointing import folders
from checkpointing.resumed import inherited_options
from config import validation
from config.command_line import parse_request
from distributed.launch import Launch

RANKS = 2
SHAPE = (
    "--layers 1 --hidden 32 --heads 4 --seq-length 8 --vocab-size 31 --global-batch-size 4 "
    "--lr 1e-3 --lr-schedule constant --device cpu"
)
START_TIMEOUT = 60.0


def launch(folder: Path, words: list[str], ranks: int = RANKS) -> list[int]:
    """The process ids of the ranks of one run."""
    port, ids = free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            be_rank(rank, ranks, port, folder, words)
        ids.append(child)
    return ids


def set_torchrun_variables(rank: int, ranks: int, port: int) -> None:
    """Set the environment variables that torchrun would have set."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ.update({key: str(value) for key, value in values.items()})


def be_rank(rank: int, ranks: int, port: int, folder: Path, words: list[str]) -> None:
    """A forked process: a rank of train.py; never returns."""
    output = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    set_torchrun_variables(rank, ranks, port)
    status = 1
    try:
        request = parse_request(words, resumed=inherited_options)  # as train.py does
        config = validation.check(request.config, ranks)
        trainer.main(config, Launch("torchrun", rank, ranks))
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait_for_first_row(metrics: Path, since: int, ids: list[int]) -> None:
    """Wait for a row of this run; RuntimeError if a rank ends before, or after START_TIMEOUT."""
    limit = time.monotonic() + START_TIMEOUT
    while not has_row(metrics, since):
        ended = [rank for rank, i in enumerate(ids) if os.waitpid(i, os.WNOHANG)[0]]
        if ended or time.monotonic() > limit:
            raise RuntimeError(f"ranks {ended} ended before the first step: {logs(metrics.parent)}")
        time.sleep(0.002)


def has_row(metrics: Path, since: int) -> bool:
    """Whether the file has been written since; a run that starts renames an earlier run's file."""
    try:
        found = metrics.stat()
    except FileNotFoundError:
        return False
    return found.st_mtime_ns > since and found.st_size > 0


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("rank*.log")))


def kill(ids: list[int], victim: int, delay: float) -> None:
    """SIGKILL a rank, and after `delay` seconds the others, as a launcher does."""
    os.kill(ids[victim], signal.SIGKILL)
    time.sleep(delay)
    for i in ids:
        os.kill(i, signal.SIGKILL)
    for i in ids:
        os.waitpid(i, 0)


def newest(folder: Path) -> int:
    """The newest visible checkpoint's step; every visible one must be complete and intact."""
    steps = [0]
    for path in folders.list_checkpoints(str(folder / "checkpoints")):
        for name, entry in folders.read_manifest(path)["files"].items():
            problem = folders.find_problem(path, name, entry)
            if problem:
                raise RuntimeError(f"visible but not intact: {problem}")
        steps.append(folders.step_of(path))
    return max(steps)


def rows(folder: Path) -> list[list[dict]]:
    """The rows of every run in a folder."""
    files = sorted(folder.glob("metrics.jsonl*"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def visible(folder: Path) -> int:
    """The newest visible step while ranks run."""
    return max(
        map(folders.step_of, folders.list_checkpoints(str(folder / "checkpoints"))),
        default=0,
    )


def kill_repeatedly(folder: Path, kills: int, chance: random.Random) -> dict:
    """Kill runs at random moments; how many during a save, and the last step reached."""
    saving = ["--save-every", "1", "--keep-last", "3", "--resume", "auto", "--steps", "1000000"]
    words = [*SHAPE.split(), "--out", str(folder), *saving]
    during_save, resumed, last = 0, [], 0
    for _ in range(kills):
        since = time.time_ns()
        ids = launch(folder, words)
        try:
            wait_for_first_row(folder / "metrics.jsonl", since, ids)
        except BaseException:
            for i in ids:  # a failing test must not leave its ranks running
                os.kill(i, signal.SIGKILL)
            raise
        time.sleep(chance.uniform(0.0, 0.3))
        seen = visible(folder)
        kill(ids, chance.randrange(RANKS), chance.uniform(0.0, 0.05))
        during_save += any(name.endswith(".partial") for name in os.listdir(folder / "checkpoints"))
        first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        if first["iteration"] != last + 1:
            raise RuntimeError(f"step {last} was complete; the run began at {first['iteration']}")
        last = newest(folder)
        if last < seen:
            raise RuntimeError(f"step {seen} was visible before the kill, {last} is the newest now")
        resumed.append(last)
    return {"during_save": during_save, "resumed": resumed, "last": last}


def finish(folder: Path, words: list[str]) -> None:
    """Run to the end; RuntimeError if a rank ends with another status than 0."""
    folder.mkdir(exist_ok=True)
    ids = launch(folder, words)
    statuses = [os.waitpid(i, 0)[1] for i in ids]
    if any(statuses):
        raise RuntimeError(f"ended with {statuses}: {logs(folder)}")


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    killed, straight = folder / "killed", folder / "straight"
    killed.mkdir()
    result = kill_repeatedly(killed, kills, random.Random(seed))
    total = result["last"] + 5
    words = [*SHAPE.split(), "--steps", str(total)]
    finish(killed, [*words, "--out", str(killed), "--save-every", str(total), "--resume", "auto"])
    finish(straight, [*words, "--out", str(straight)])
    expected = {r["iteration"]: (r["loss"], r["grad_norm"]) for r in rows(straight)[0]}
    compared = 0
    for run in rows(killed):
        for row in run:
            if (row["loss"], row["grad_norm"]) != expected[row["iteration"]]:
                raise RuntimeError(f"{row} is not {expected[row['iteration']]}")
            compared += 1
    print(json.dumps(result | {"steps": total, "rows": compared, "runs": len(rows(killed))}))


if __name__ == "__main__":
    main()
