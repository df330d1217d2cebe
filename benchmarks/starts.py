"""Every way to fail, at every moment of a start, under every launcher: does the job end in time?

    bash scripts/slurm_here.sh python benchmarks/starts.py             prints the table
    python benchmarks/starts.py --launchers mpirun torchrun --ways kill stop

Jobs of three ranks of train.py, one of which fails (tests/early_worker.py): each rank in turn.
`srun` has no --kill-on-bad-exit, with which Slurm itself would end the other ranks. Seconds count
from the failure to the end of the launcher. Exit status 1 if a job did not end within LIMIT,
ended with status 0 or 75, left a process, or did not name the rank that raised or was lost.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

from ranks import OPENMPI_LIBRARY, mpi_command, none_left, openmpi_command, start, why_no_slurm

from config.messages import Parser, UserError, exit_with

RANKS = 3
LIMIT = 30.0  # seconds from the failure
LONGEST = 150.0  # seconds from the start of the launcher; then it is killed
MOMENTS = ("before", "meeting", "after")
WAYS = ("raise", "import", "exit", "kill", "stop")
LOST = ("kill", "stop")  # the watch or the monitor writes a case
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LAUNCHERS = {
    "mpirun": [*mpi_command(RANKS), sys.executable],
    "mpirun of Open MPI": [*openmpi_command(RANKS), sys.executable],
    "srun": ["srun", "--mpi=pmi2", "-N2", f"-n{RANKS}", sys.executable],
    "torchrun": [*TORCHRUN, f"{RANKS}"],
}
TRAIN = (
    "--layers 1 --hidden 8 --heads 2 --seq-length 8 --vocab-size 32 --global-batch-size 3 "
    "--steps 1 --device cpu"
)


@dataclass(frozen=True)
class Failure:
    """A start in which a rank fails at a moment in a way."""

    launcher: str
    moment: str
    way: str
    culprit: int


@dataclass(frozen=True)
class Ended:
    """How it ended. status, seconds since the failure: None if it did not end."""

    status: int | None
    seconds: float | None
    named: bool
    left: list[str]

    def wrong(self, failure: Failure) -> list[str]:
        """Return the differences from what the start must print."""
        good = {
            f"ended within {LIMIT:g} s": self.seconds is not None and self.seconds <= LIMIT,
            "ended non-zero": self.status not in (None, 0, 75),
            "named": self.named or failure.way == "exit",  # which says nothing
            "nothing left": not self.left,
        }
        return [what for what, right in good.items() if not right]


def run(failure: Failure) -> Ended:
    """Start the job, and wait for its end."""
    with tempfile.TemporaryDirectory(prefix="starts-") as folder:
        out = Path(folder, "run")
        fails = [failure.moment, failure.way, str(failure.culprit)]
        words = ["tests/early_worker.py", *fails, *TRAIN.split(), "--out", str(out)]
        environment = {"OMP_NUM_THREADS": "1"}
        if "Open MPI" in failure.launcher:
            environment |= OPENMPI_LIBRARY
        try:
            outcome = start([*LAUNCHERS[failure.launcher], *words], LONGEST, **environment)
        except subprocess.TimeoutExpired:
            return Ended(None, None, False, none_left(folder))
        ended, text = time.time(), outcome.out + outcome.err
        came = rf"rank {failure.culprit} comes to {failure.moment} at ([\d.]+)"
        failed = re.search(came, text)
        seconds = round(ended - float(failed[1]), 1) if failed else None
        named = _is_named(failure, text, out)
        return Ended(outcome.status, seconds, named, none_left(folder))


def _is_named(failure: Failure, text: str, out: Path) -> bool:
    """Whether that rank, and no other, is named: in a case, or beside its traceback."""
    cases = [json.loads(path.read_text()) for path in out.glob("hang*/case.json")]
    culprits = [case["culprits"] for case in cases]
    if failure.way in LOST:
        return culprits == [[failure.culprit]]
    place = f"rank {failure.culprit} of {RANKS} on "
    return place in text and culprits in ([], [[failure.culprit]])


def table(ended: dict[Failure, Ended]) -> str:
    """A row for each launcher and moment, a column for each way: seconds, and the status."""
    ways = [way for way in WAYS if any(failure.way == way for failure in ended)]
    lines = [f"| launcher | moment | {' | '.join(ways)} |", "| --- | --- |" + " --: |" * len(ways)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for failure, end in ended.items():
        row = cells.setdefault((failure.launcher, failure.moment), {})
        row[failure.way] = f"{end.seconds} ({end.status})"
    for (launcher, moment), row in cells.items():
        lines.append(f"| {launcher} | {moment} | {' | '.join(row[way] for way in ways)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all starts, print the table, and exit with the failures if there are any."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    try:
        given = parser.parse_args()
        if "srun" in given.launchers and (reason := why_no_slurm()):
            raise UserError(reason)
    except UserError as mistake:
        exit_with(mistake)
    cases = [(a, b, c) for a in given.launchers for b in given.moments for c in given.ways]
    ended, wrong, missed = {}, [], 0
    for number, case in enumerate(cases):
        failure = Failure(*case, culprit=number % RANKS)
        ended[failure] = end = run(failure)
        load = os.getloadavg()[0]
        print(f"{failure}: {end}, load average {load:.1f}", file=sys.stderr, flush=True)
        wrong += [f"{failure}: not {what}" for what in end.wrong(failure)]
        missed += bool(end.wrong(failure))
    print(table(ended))
    print(f"{len(cases) - missed} of {len(cases)} as expected")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
