"""Prints the state of this rank when torch.distributed starts, for tests/test_cluster.py."""

import json
import threading

import torch
import torch.distributed as dist

from config.run_options import Run
from config.schema import Layout
from distributed.context import start
from distributed.launch import discover
from distributed.mesh import Mesh

connect, seen = dist.init_process_group, {}


def watched(*arguments, **options):
    """init_process_group, after a look around."""
    seen["watched"] = "watchdog" in {thread.name for thread in threading.enumerate()}
    seen["deterministic"] = torch.are_deterministic_algorithms_enabled()
    seen["fills"] = torch.utils.deterministic.fill_uninitialized_memory
    seen["device_id"] = str(options.get("device_id"))
    connect(*arguments, **options)


dist.init_process_group = watched
context = start(discover(), Run(out="/nonexistent", device="cpu", deterministic=True))
mesh = Mesh(Layout(dp=context.size).axes, context)
seen["world is torch's"] = mesh.world.handle is dist.group.WORLD
seen["groups"] = len(dist.distributed_c10d._world.pg_names)
if context.rank == 0:
    print(json.dumps(seen), flush=True)
context.stop()
