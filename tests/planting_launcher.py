"""scripts/forkrun.py with failures planted by the model's hidden size: for the tuner's tests.

    python tests/planting_launcher.py RANKS train.py --hidden 48 ...

hidden 5120: each rank may allocate 2 GiB more than it starts with: enough for the stacks of
threads, too little for weights and gradients of 2.5 GB (with the optimizer's state both ranks need
10 GB, which train.py refuses on a node that has less). 48: the last rank never joins. 80: the last
rank raises an exception before it joins. All other sizes: as forkrun.py.
"""

import resource
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import forkrun

SPARE = 2 * 2**30  # bytes


def plant(hidden: str, last: bool) -> None:
    """Make this rank fail if the hidden size asks for it."""
    if hidden == "5120":
        limit = psutil.Process().memory_info().vms + SPARE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if hidden == "48" and last:
        time.sleep(600)
    if hidden == "80" and last:
        raise RuntimeError("planted")


def main(arguments: list[str]) -> int:
    hidden = arguments[arguments.index("--hidden") + 1]
    last = int(arguments[0]) - 1
    run_path = forkrun.runpy.run_path

    def planted(path: str, run_name: str):
        plant(hidden, int(forkrun.os.environ["RANK"]) == last)
        return run_path(path, run_name=run_name)

    forkrun.runpy.run_path = planted
    return forkrun.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
