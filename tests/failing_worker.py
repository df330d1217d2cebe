"""A rank that fails on purpose: `mpirun -n 4 python THIS KIND RANK`."""

import resource
import sys
import time
from datetime import timedelta

import torch

import watchdog
from cluster import start
from config import Layout, Run, UserError
from launch import discover
from parallel import Mesh


def main() -> None:
    kind, culprit = sys.argv[1], int(sys.argv[2])
    launch = discover()
    if kind == "absent" and launch.rank == culprit:
        time.sleep(60)
    if kind == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
        watchdog.OTHER_FILES = 997
    limit = timedelta(seconds=8 if kind == "absent" else 600)
    cluster = start(launch, Run(), meet_within=limit)
    with cluster.failing_loudly():
        world = Mesh(Layout(dp=cluster.size), cluster).world
        world.all_reduce(torch.ones(3)).wait()
        if cluster.rank == culprit and kind == "raise":
            raise ValueError("planted")
        if kind == "mistake":
            raise UserError("planted: 3 does not divide 4")
        if cluster.rank == culprit and kind == "port":
            time.sleep(1)
        if kind != "port":
            world.all_reduce(torch.ones(10_000_000)).wait()
        print(f"rank {cluster.rank} of {cluster.size} {cluster.launch.launcher}")
    cluster.stop()


if __name__ == "__main__":
    main()
