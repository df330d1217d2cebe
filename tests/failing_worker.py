"""One of several ranks fails on purpose: `mpirun -n 4 python THIS KIND RANK`."""

import sys
import time
from datetime import timedelta

from base import errors
from base.errors import UserError

with errors.installed():
    import torch

    from config.run_options import Run
    from config.schema import Layout
    from distributed.context import start
    from distributed.launch import discover
    from distributed.mesh import Mesh


def main() -> None:
    kind, culprit = sys.argv[1], int(sys.argv[2])
    launch = discover()
    if kind == "absent" and launch.rank == culprit:
        time.sleep(60)
    limit = timedelta(seconds=8 if kind == "absent" else 600)
    context = start(launch, Run(), meet_within=limit)
    with context.failing_loudly():
        world = Mesh(Layout(dp=context.size).axes, context).world
        world.all_reduce(torch.ones(3)).wait()
        if context.rank == culprit and kind == "raise":
            raise ValueError("planted")
        if kind == "mistake":
            raise UserError("planted: 3 does not divide 4")
        if context.rank == culprit and kind == "port":
            time.sleep(1)
        if kind != "port":
            world.all_reduce(torch.ones(10_000_000)).wait()
        print(f"rank {context.rank} of {context.size} {context.launch.launcher}")
    context.stop()


if __name__ == "__main__":
    main()
