"""train.py, one rank of which fails during the start: `python THIS MOMENT WAY RANK WORDS...`.

MOMENT: imports (a late one of train.py's), before (when it is to start MPI), meeting (when MPI has
started, and the ranks are to meet in the store), after (when they have met, before the first step).
WAY: one of WAYS. Every rank prints when it comes to that moment, in seconds since 1970.
"""

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MOMENTS = ("imports", "before", "meeting", "after")


def _raise() -> None:
    raise OSError(5, "planted")


def _import() -> None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


def _mistake() -> None:
    from base.errors import UserError

    raise UserError("planted: no such device")


def _send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


WAYS: dict[str, Callable[[], None]] = {
    "raise": _raise,  # an exception
    "import": _import,  # a package that is not there
    "mistake": _mistake,  # a mistake that this rank alone sees
    "exit": lambda: sys.exit(3),
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "term": _send(signal.SIGTERM),
    "sleep": lambda: time.sleep(3600),
    "none": lambda: None,
}


class Fails:
    """A finder of modules that fails for one of them."""

    def __init__(self, name: str, fail: Callable[[], None]):
        self.name, self.fail = name, fail

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name == self.name:
            self.fail()


def plant(moment: str, fail: Callable[[], None]) -> None:
    """Have this rank call the function at that moment."""
    if moment == "imports":
        sys.meta_path.insert(0, Fails("distributed.mesh", fail))
        return
    from distributed import preflight, rendezvous

    functions = {
        "before": (rendezvous, "find_local"),
        "meeting": (rendezvous, "open_store"),
        "after": (preflight, "introduce"),
    }
    module, name = functions[moment]
    original = getattr(module, name)

    def failing(*arguments):
        fail()
        return original(*arguments)

    setattr(module, name, failing)


if __name__ == "__main__":
    # A signal waits from here on until train.py handles it; train.py begins to block it later.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    names = "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"
    own = next((os.environ[name] for name in names if name in os.environ), "0")
    moment, way, culprit = sys.argv[1:4]

    def come() -> None:
        print(f"rank {own} comes to {moment} at {time.time():.2f}", flush=True)
        WAYS[way if own == culprit else "none"]()

    plant(moment, come)
    sys.argv = ["train.py", *sys.argv[4:]]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
