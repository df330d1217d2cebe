"""Runs a program for a limited time; at its limit all that it has started is killed.

status = run_limited([sys.executable, "train.py"], 60.0, cwd=ROOT)      None: killed
"""

import contextlib
import subprocess
from typing import Any

import psutil


def run_limited(command: list[str], seconds: float, **options: Any) -> int | None:
    """The program's status; None if it was killed, with all its children, sessions of their own
    included. options: of subprocess.Popen.
    """
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
    program = subprocess.Popen(command, **options)
    try:
        return program.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        started = psutil.Process(program.pid)
        for process in [*started.children(recursive=True), started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        program.wait()
        return None
