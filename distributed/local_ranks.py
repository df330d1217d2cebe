"""Ranks that a program makes of itself: forks that meet over this machine's loopback network.

    prepare()                                  before torch is imported
    launch = become_rank(rank, size, port)     in a fork, then context.start(launch, run)

A fork shares the modules that its parent has imported, so that a rank costs little. The ranks meet
as torchrun's do, by the variables that torchrun would set.
"""

import os
import socket

from distributed.launch import Launch, discover


def prepare() -> None:
    """Give torch one thread on each rank, unless the user has set a number; before its import."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def become_rank(rank: int, size: int, port: int) -> Launch:
    """Set the variables with which this process is a rank of `size` on this machine.

    port: where the ranks meet, the same for all of them (`free_port`).
    """
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    values |= {"MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    return discover()


def free_port() -> int:
    """Return a port that no program of this machine uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
