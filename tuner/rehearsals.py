"""The rehearsal of a layout before its first trial: rehearse.py on fake GPUs, as a process.

    outcome = Rehearser("a100-80").rehearse(candidate, runner, number=3)
    outcome.finding         # why the layout must not be queued, or empty
    outcome.text            # `12 s: every operation of the ranks that were run meets, and it fits`

It comes before the trial and not beside the one before: a trial's ranks may share this machine's
cores, and would be measured too slow. On CPUs nothing is rehearsed: memory and NCCL's rules, which
a layout can break, are of GPUs, and a trial costs less there.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tuner import search_space, trials

PROGRAM = str(Path(__file__).resolve().parent.parent / "rehearse.py")


@dataclass(frozen=True)
class Outcome:
    """What a rehearsal says. failure: why there is no answer, or empty; then the trial decides."""

    seconds: float = 0.0
    finding: str = ""
    failure: str = ""

    @property
    def text(self) -> str:
        """The seconds that it took, and what it says."""
        said = (
            "rejected"
            if self.finding
            else "every operation of the ranks that were run meets, and it fits"
        )
        if self.failure:
            said = f"no answer, the trial decides: {self.failure}"
        return f"{self.seconds:.0f} s: {said}"


@dataclass(frozen=True)
class Rehearser:
    """For which machine layouts are rehearsed."""

    gpu: str
    calibration: str | None = None

    def rehearse(
        self, candidate: search_space.Candidate, runner: trials.Runner, number: int
    ) -> Outcome:
        """Rehearse a candidate, with the runner's time limit; words and answers into the folder of
        the trial of that number. When it returns or raises, no process of it is left.
        """
        out, began = runner.out(candidate, number), time.monotonic()
        answers, log = out / "rehearsal.json", out / "rehearsal.txt"
        answers.unlink(missing_ok=True)  # of a search that was stopped
        command = [sys.executable, PROGRAM, "--gpus", str(candidate.ranks), "--gpu", self.gpu]
        command += ["--calibration", self.calibration] if self.calibration else []
        command += ["--json", str(answers), *search_space.to_cli_args(candidate.config)]
        status, output = trials.execute(command, log, number, runner.time_limit)
        seconds = time.monotonic() - began
        if answers.exists() and status in (0, 1):
            return Outcome(seconds, json.loads(answers.read_text())["finding"])
        lines = output.strip().splitlines() or ["no output"]
        late = f"not done within {runner.time_limit:g} s" if status is None else lines[-1][:300]
        return Outcome(seconds, failure=late)
