"""Text that people read while a run trains: log lines, and a live line on the terminal.

    LiveLine(launcher)     rewrites one line on the terminal, if there is a terminal
    of_step(facts)         step 120/500 | loss 3.2104 | grad norm 0.812 | ... | 1:02:03 left

Under an MPI launcher a rank's standard output is a pipe, or a terminal that the launcher made. The
live line then goes to the launcher's terminal, which rank 0 can open if both run on the same node;
otherwise there is no live line. telemetry/log.py calls these functions.
"""

import math
import os
import stat
import time
from dataclasses import dataclass
from typing import Any

import psutil

LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"}
SECONDS_BETWEEN = 0.2  # least time from one rewriting of the live line to the next
CLEAR = "\r\x1b[K"  # moves the cursor to the line's start and erases the line


@dataclass(frozen=True)
class Facts:
    """A step's row of metrics.jsonl, and the means over the steps since the last log line.

    With --log-every N the means are over the last N steps.
    """

    row: dict[str, Any]
    total: int  # the run's last step
    loss: float  # mean
    seconds: float  # mean per step
    samples_per_second: float  # mean
    skipped: int  # number of steps so far whose update was skipped
    nan: int  # number of steps so far whose loss was not finite
    seconds_left: float  # estimate for the rest of the run

    @property
    def ratio(self) -> float:
        """The mean samples per second divided by the samples per second of the row's step."""
        return self.samples_per_second / (self.row["global_batch_size"] / self.row["seconds"])


def of_step(facts: Facts) -> str:
    """Return a step's log line; MFU is in it only where the device's peak FLOPS are known."""
    row = facts.row
    parts = [
        f" step {row['iteration']}/{facts.total}",
        f"loss {facts.loss:.4f}",
        f"grad norm {row['grad_norm']:.3f}",
        f"lr {row['learning_rate']:.2E}",
        f"{row['tokens_per_second'] * facts.ratio:,.0f} tokens/s",
        f"{row['peak_memory_bytes'] / 1e9:.1f} GB",
        f"{duration(facts.seconds_left)} left",
    ]
    if row["mfu"] is not None:
        parts.insert(5, f"MFU {row['mfu'] * facts.ratio:.1%}")
    if "sample_length" in row:
        parts.insert(1, f"{row['sample_length']} tokens a sample")
    if (epochs := _epochs(row)) is not None:
        parts.append(f"epoch {epochs:.3f}")
    parts += [f"{facts.skipped} skipped"] if facts.skipped else []
    parts += [f"{facts.nan} nan"] if facts.nan else []
    return " | ".join(parts)


def of_corpora(row: dict[str, Any]) -> str:
    """Return the line about several corpora that follows a step's log line, or "".

    The epoch of a run's only corpus is in the step's log line itself (`of_step`).
    """
    epochs = row.get("corpus_epochs", {})
    if len(epochs) < 2:
        return ""
    tokens = row["corpus_tokens"]
    parts = [f"{name}: {tokens[name]} tokens, {epochs[name]:.4f} epochs" for name in epochs]
    return "\n " + " | ".join(parts)


def _epochs(row: dict[str, Any]) -> float | None:
    """Return the epochs of the run's only corpus; None if the row has no or several corpora."""
    epochs = list(row.get("corpus_epochs", {}).values())
    return epochs[0] if len(epochs) == 1 else None


def of_evaluation(name: str, iteration: int, total: int, loss: float) -> str:
    """Return the log line of an evaluation; name: a split or a set of --eval-data.

    loss: the mean per token; its exponential is the perplexity.
    """
    perplexity = math.exp(min(loss, 100.0))
    return f" step {iteration}/{total} | {name} loss {loss:.4f} | perplexity {perplexity:.5g}"


def of_skipped_step(iteration: int, total: int, consumed: int, batch: int) -> str:
    """Return the log line of a step that was passed over: `batch` samples, up to `consumed`."""
    samples = f"{consumed - batch} to {consumed - 1}"
    return f" step {iteration}/{total} | passed over by --skip-samples: {samples}"


def duration(seconds: float) -> str:
    """Return seconds as text: `1:02:03` (hours, minutes, seconds), or `2d 1:02:03` with days."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"


class LiveLine:
    """One line on the terminal, rewritten at most five times a second.

    replaces_lines: whether standard output goes to the same terminal. Log lines are then written
    to log.txt only, since the live line shows the same.
    """

    def __init__(self, launcher: str = "python"):
        """launcher: what started the ranks, as distributed/launch.py names it."""
        outputs = _outputs(launcher)
        terminals = [path for path in outputs if _is_terminal(path)]
        self._file = -1
        self._latest = 0.0
        self._shown = False
        self.replaces_lines = bool(terminals) and terminals[0] == outputs[0]
        if terminals:
            try:  # O_NONBLOCK: a terminal that is stopped (Ctrl-S) must not stop the run
                self._file = os.open(terminals[0], os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            except OSError:
                self.replaces_lines = False

    def show(self, text: str) -> None:
        """Rewrite the line, unless the line was rewritten less than SECONDS_BETWEEN ago."""
        now = time.monotonic()
        if self._file < 0 or now - self._latest < SECONDS_BETWEEN:
            return
        self._latest = now
        try:
            columns = os.get_terminal_size(self._file).columns or 80
            self._write(CLEAR + text[: columns - 1])
            self._shown = True
        except OSError:
            self.close()

    def clear(self) -> None:
        """Erase the line; called before other text is printed."""
        if self._shown:
            self._write(CLEAR)
        self._shown = False
        self._latest = 0.0

    def close(self) -> None:
        """Erase the line and close the terminal; `show` does nothing from now on."""
        self.clear()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.replaces_lines = False

    def _write(self, text: str) -> None:
        try:
            os.write(self._file, text.encode())
        except BlockingIOError:  # the terminal is stopped: the next `show` tries again
            return
        except OSError:  # the terminal is gone
            self._shown = False
            self.close()


def _outputs(launcher: str) -> list[str]:
    """Return the paths of the files that standard output and standard error go to; "" if unknown.

    Under mpirun the outputs are the launcher's, else this process's.
    """
    pid = os.getpid()
    if launcher.startswith("mpirun"):
        try:
            parents = psutil.Process().parents()
            pid = next((p.pid for p in parents if p.name() in LAUNCHERS), -1)
        except psutil.Error:
            pid = -1
    found = []
    for number in (1, 2):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
        except OSError:
            found.append("")
    return found


def _is_terminal(path: str) -> bool:
    if not path.startswith("/dev/"):
        return False
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode):
            return False
        file = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.isatty(file)
    finally:
        os.close(file)
