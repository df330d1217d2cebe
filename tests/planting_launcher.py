"""scripts/forkrun.py with failures planted by the micro-batch size: for the tuner's tests.

    python tests/planting_launcher.py RANKS train.py --micro-batch-size 2 ...

4: the last rank raises an exception before it joins. 8: each rank may allocate 2 GiB more than it
starts with, and asks torch for 3. All other sizes: as forkrun.py.
"""

import argparse
import resource
import sys
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import forkrun

SPARE = 2 * 2**30  # bytes


def plant(size: str, last: bool) -> None:
    """Make this rank fail if the micro-batch size asks for it."""
    if size == "8":
        limit = psutil.Process().memory_info().vms + SPARE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.empty(SPARE + 2**30, dtype=torch.uint8)
    if size == "4" and last:
        raise RuntimeError("planted")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--micro-batch-size", default="1")  # train.py's default, which is not given
    size = parser.parse_known_args(arguments)[0].micro_batch_size
    last = int(arguments[0]) - 1
    run_path = forkrun.runpy.run_path

    def planted(path: str, run_name: str):
        plant(size, int(forkrun.os.environ["RANK"]) == last)
        return run_path(path, run_name=run_name)

    forkrun.runpy.run_path = planted
    return forkrun.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
