"""corrupted_worker.py, with a faulty rank that sees the difference later than the other ranks.

    mpirun -n 3 python tests/late_worker.py drift RANK STEP,STEP,... train.py's arguments

Without an agreement of the ranks another one would fail first, and would be named for the fault.
"""

import sys
import time

import corrupted_worker

from distributed.launch import discover
from telemetry import replica_check

SECONDS = 2.0  # the watchdog's monitor decides one second after the first failure

compare = replica_check.differing_replicas


def compare_late(*arguments):
    differences = compare(*arguments)
    time.sleep(SECONDS if differences else 0.0)
    return differences


if __name__ == "__main__":
    if discover().rank == int(sys.argv[2]):
        replica_check.differing_replicas = compare_late
    corrupted_worker.main()
