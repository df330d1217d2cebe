"""What people read while a run trains: a line for a step, and one live line.

    LiveLine(launcher)     rewrites one line on the terminal, if there is one
    of_step(facts)         step 120/500 | loss 3.2104 | grad norm 0.812 | ... | 1:02:03 left

Under an MPI launcher standard output is a pipe, or a terminal of the launcher's own making: there
the live line is written to the terminal that the launcher itself has. Rank 0 finds it if it runs on
the launcher's node; elsewhere there is no live line.
"""

import math
import os
import stat
import time
from dataclasses import dataclass
from typing import Any

import psutil

LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"}
SECONDS_BETWEEN = 0.2  # of two forms of the live line
CLEAR = "\r\x1b[K"


@dataclass(frozen=True)
class Facts:
    """A step's row of metrics.jsonl, and the means since the last log line."""

    row: dict[str, Any]
    total: int  # steps
    loss: float
    seconds: float  # of a step
    samples_per_second: float
    skipped: int  # steps so far
    nan: int
    seconds_left: float

    @property
    def ratio(self) -> float:
        """The mean rate over that of the row's step alone."""
        return self.samples_per_second / (self.row["global_batch_size"] / self.row["seconds"])


def of_step(facts: Facts) -> str:
    """One step in at most 130 characters; MFU only where the device's peak is known."""
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
    """A line below that one, on what was read of several corpora; the line itself has one's."""
    epochs = row.get("corpus_epochs", {})
    if len(epochs) < 2:
        return ""
    tokens = row["corpus_tokens"]
    parts = [f"{name}: {tokens[name]} tokens, {epochs[name]:.4f} epochs" for name in epochs]
    return "\n " + " | ".join(parts)


def _epochs(row: dict[str, Any]) -> float | None:
    """The epochs of the run's only corpus; None if there are several, or the row has none."""
    epochs = list(row.get("corpus_epochs", {}).values())
    return epochs[0] if len(epochs) == 1 else None


def of_evaluation(name: str, iteration: int, total: int, loss: float) -> str:
    """The mean loss per token on a split or a set of --eval-data, and its exponential."""
    perplexity = math.exp(min(loss, 100.0))
    return f" step {iteration}/{total} | {name} loss {loss:.4f} | perplexity {perplexity:.5g}"


def of_skipped_step(iteration: int, total: int, consumed: int, batch: int) -> str:
    """A step of `batch` samples, up to `consumed`, that was passed over."""
    samples = f"{consumed - batch} to {consumed - 1}"
    return f" step {iteration}/{total} | passed over by --skip-samples: {samples}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, with days before them if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"


class LiveLine:
    """One line on the terminal, rewritten at most five times a second.

    replaces_lines: whether standard output goes to that same terminal, so that log lines need not.
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
            try:  # one that is stopped (Ctrl-S) must not stop the run
                self._file = os.open(terminals[0], os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            except OSError:
                self.replaces_lines = False

    def show(self, text: str) -> None:
        """Rewrite the line, unless it was a moment ago."""
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
        """Remove the line, before other text is printed."""
        if self._shown:
            self._write(CLEAR)
        self._shown = False
        self._latest = 0.0

    def close(self) -> None:
        """Remove the line for good."""
        self.clear()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.replaces_lines = False

    def _write(self, text: str) -> None:
        try:
            os.write(self._file, text.encode())
        except BlockingIOError:  # the terminal is stopped: the next form is written again
            return
        except OSError:  # the terminal is gone, its log lines too
            self._shown = False
            self.close()


def _outputs(launcher: str) -> list[str]:
    """The files that standard output and error of this run's launcher, or of itself, go to."""
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
