"""train.py, one rank of which fails before all ranks have met: `python THIS WHERE RANK WORDS...`.

WHERE: import (torch cannot be imported there), late (an I/O error in a later import), mpi (in what
starts MPI), mistake (a mistake that this rank alone sees), connect (after MPI has started),
stop (it is stopped there, by SIGSTOP, when it is to meet the others), or nowhere.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Fails:
    """A finder of modules that fails for one of them."""

    def __init__(self, name: str, error: Exception):
        self.name, self.error = name, error

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name == self.name:
            raise self.error


def fail(error: Exception):
    """A function that raises."""

    def failing(*arguments, **options):
        raise error

    return failing


def plant(where: str) -> None:
    """Have this rank fail there."""
    from config.messages import UserError
    from distributed import launch, rendezvous

    planted = OSError(5, "planted")
    if where == "import":
        error = ModuleNotFoundError("No module named 'torch'", name="torch")
        sys.meta_path.insert(0, Fails("torch", error))
    elif where == "late":
        sys.meta_path.insert(0, Fails("distributed.mesh", planted))
    elif where == "mpi":
        launch._local_by_mpi = fail(planted)
    elif where == "mistake":
        rendezvous._choose_device = fail(UserError("planted: no such device"))
    elif where == "connect":
        rendezvous.open_store = fail(planted)
    elif where == "stop":
        rendezvous.find_local = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    # As in train.py, but from here on: a signal waits until train.py handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    names = "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"
    own = next((os.environ[name] for name in names if name in os.environ), "0")
    if own == sys.argv[2]:
        plant(sys.argv[1])
    print(f"rank {own} begins", flush=True)
    sys.argv = ["train.py", *sys.argv[3:]]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
