"""Runs the user's command of --after-save for each complete checkpoint, beside the training.

    commands = AfterSave("rclone copy $TRINE_CHECKPOINT remote:bucket", "runs/a")
    commands.announce(500)                               before the checkpoint is published
    commands.add("runs/a/checkpoints/step_00000500")     when it is published
    for note in commands.notes(): print(note)

Rank 0 has it. The commands run one at a time, in the order of the saves, each by `sh -c` in a
process group of its own and at low priority. A command that fails is a note. A checkpoint whose
command waits or runs is not deleted by --keep-last.

OUT/after_save/step_00000500.log       the command's output; locked while the command runs
OUT/after_save/step_00000500.status    its exit status, once it has ended

A command that has begun goes on if the run ends before it, unless the system ends it with the job.
One without a .status was cut off, or never begun: a start that resumes the run runs it again. So a
command may run twice for a checkpoint; one that failed is not repeated.
"""

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path

from base.child_environment import plain_environment
from checkpointing.folders import folder_name, list_checkpoints, step_of

FOLDER = "after_save"
NICE = 10  # how much the commands yield to the ranks on this node: see nice(1)
LAST_BYTES = 2000  # of a failed command's output, of which the note has the last line
# Runs the command, the first argument, and writes its status into a file, the second argument: the
# run may have ended by then.
WRAPPER = 'sh -c "$1"; status=$?; echo $status >"$2.new" && mv "$2.new" "$2"; exit $status'


class AfterSave:
    """The commands of one run. `add` may be called by another thread than the other methods."""

    def __init__(self, command: str, out: str):
        """Begin without a command. command: for `sh -c`. out: the run's folder."""
        self.command = command
        self.out = os.path.abspath(out)
        self.folder = Path(self.out, FOLDER)
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._steps: list[int] = []  # of the checkpoints whose commands run or wait
        self._thread: threading.Thread | None = None

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints whose commands run or wait, in this order."""
        with self._lock:
            return [*self._steps]

    def notes(self) -> list[str]:
        """Return the lines about commands that have ended since the last call."""
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._notes.get_nowait())
        return lines

    def announce(self, step: int) -> None:
        """Tell the next start that the command is due for this step's checkpoint, if there is one.

        Called before the checkpoint is published: so no kill can leave one without its command.
        """
        log, status = self._files(step)
        try:
            self.folder.mkdir(exist_ok=True)
            status.unlink(missing_ok=True)
            log.write_bytes(b"")
        except OSError as error:
            self._notes.put(f"note: --after-save: cannot write {log}: {error.strerror}")

    def add(self, checkpoint: str) -> None:
        """Run the command for a complete checkpoint, after those before it. Returns at once.

        checkpoint: its folder. `announce` was called for it.
        """
        step = step_of(checkpoint)
        with self._lock:
            self._steps.append(step)
            waiting = len(self._steps)
        if waiting > 1 and waiting & (waiting - 1) == 0:  # at 2, 4, 8, ...
            self._notes.put(
                f"note: --after-save is slower than the saves: {waiting} checkpoints wait for it, "
                "and are kept until then"
            )
        self._queue.put(os.path.abspath(checkpoint))
        if self._thread is None:
            # A daemon thread: the run does not wait for it when it ends.
            self._thread = threading.Thread(target=self._work, name="after-save", daemon=True)
            self._thread.start()

    def resume(self, parent: str, upto: int) -> list[str]:
        """Add the checkpoints whose commands were cut off, or never begun; return their names.

        parent: the folder of checkpoints. upto: the last step that counts.
        """
        names = []
        for checkpoint in sorted(list_checkpoints(parent), key=step_of):
            step = step_of(checkpoint)
            log, status = self._files(step)
            is_whole = os.path.basename(checkpoint) == folder_name(step)  # and not .old
            is_due = log.exists() and not status.exists() and not _is_locked(log)
            if is_whole and step <= upto and is_due:
                self.add(checkpoint)
                names.append(folder_name(step))
        return names

    def _files(self, step: int) -> tuple[Path, Path]:
        """Return the files with a command's output, and with its exit status."""
        name = folder_name(step)
        return self.folder / f"{name}.log", self.folder / f"{name}.status"

    def _work(self) -> None:
        """Run the commands of the queue, one after the other; runs in a thread."""
        while True:
            checkpoint = self._queue.get()
            try:
                self._notes.put(self._run(checkpoint))
            except OSError as error:
                name = os.path.basename(checkpoint)
                self._notes.put(f"note: --after-save of {name} cannot run: {error}")
            with self._lock:
                del self._steps[0]

    def _run(self, checkpoint: str) -> str:
        """Run the command for a checkpoint to its end, and return a line about it."""
        step = step_of(checkpoint)
        log, status_file = self._files(step)
        variables = {"TRINE_CHECKPOINT": checkpoint, "TRINE_STEP": str(step)}
        variables |= {"TRINE_OUT": self.out}
        began = time.monotonic()
        with open(log, "wb") as output:
            with contextlib.suppress(OSError):  # the lock lives as long as the command has the file
                fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = subprocess.Popen(
                ["/bin/sh", "-c", WRAPPER, "after-save", self.command, str(status_file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=plain_environment() | variables,
                start_new_session=True,
            )
        with contextlib.suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        status = process.wait()
        name = os.path.basename(checkpoint)
        seconds = time.monotonic() - began
        if status == 0:
            return f"--after-save of {name}: done in {seconds:.1f} s"
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        return f"note: --after-save of {name} {how} after {seconds:.1f} s{_last_line(log)}"


def _last_line(log: Path) -> str:
    """Return the last line of a command's output, and where it is, for a note."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f": {words[-1]:.200} ({log})" if words else f" ({log} is empty)"
    return ""


def _is_locked(log: Path) -> bool:
    """Return whether a command of an earlier start still runs, so far as this node can tell."""
    try:
        with open(log, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
