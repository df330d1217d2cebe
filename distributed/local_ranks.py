"""Ranks that a program makes of itself: forks that meet over this machine's loopback network.

    prepare()                                  before torch is imported
    launch = become_rank(rank, size, port)     in a fork, then context.start(launch, run)

A fork shares the modules that its parent has imported, so that a rank costs little. The ranks meet
as torchrun's do, by the variables that torchrun would set.
"""

import os
import random
import socket
from pathlib import Path
from typing import NamedTuple

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


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that no program of this machine uses now, for a server that starts later.

    A port that the kernel chooses (bind to 0) may be the next outgoing connection's, of any
    program, before the server is there. So it is one below those of outgoing connections.
    """
    drawn = random.SystemRandom()  # forks and programs with one seed draw different ports
    while True:
        port = drawn.randrange(10_000, _first_ephemeral_port())
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:  # in use
                continue
        return port


def _first_ephemeral_port() -> int:
    """Return the least port of outgoing connections, or 32768 where it leaves few below."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # no Linux
        return 32_768
    return first if first >= 12_000 else 32_768


# Variables of launchers, which would make a process take itself for one of the launcher's ranks.
# torchrun's say too that it has the store, where such ranks have one of their own.
OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "SLURM_STEP_", "SLURM_PROCID", "PRTE_")
TORCHRUNS = "TORCHELASTIC_"


class RankPlace(NamedTuple):
    """Where a rank of a world is that another launch's ranks start, one on each of them.

    rank: its number in the world. nodes: the node of every rank. address, port: where they meet.
    """

    rank: int
    nodes: list[str]
    address: str
    port: int


def environment_of_rank(place: RankPlace, folder: str) -> dict[str, str]:
    """Return the environment of a process that is a rank of its own world, and not of a launcher.

    The variables are torchrun's. folder: is put on the path of modules; "": nothing is.
    """
    kept = {n: v for n, v in os.environ.items() if not n.startswith((*OF_LAUNCHERS, TORCHRUNS))}
    node = place.nodes[place.rank]
    here = [rank for rank, other in enumerate(place.nodes) if other == node]
    values: dict[str, object] = {"RANK": place.rank, "WORLD_SIZE": len(place.nodes)}
    values |= {"LOCAL_RANK": here.index(place.rank), "LOCAL_WORLD_SIZE": len(here)}
    values |= {"MASTER_ADDR": place.address, "MASTER_PORT": place.port}
    values["TORCHELASTIC_RUN_ID"] = "none"
    if len(set(place.nodes)) == 1:
        values["GLOO_SOCKET_IFNAME"] = kept.get("GLOO_SOCKET_IFNAME", "lo")
    if folder:
        values["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, kept.get("PYTHONPATH")]))
    return kept | {name: str(value) for name, value in values.items()}


def become_rank_of(place: RankPlace) -> None:
    """Be a rank of its own world in a fork of a launcher's rank; sets variables."""
    values = environment_of_rank(place, "")
    os.environ.clear()
    os.environ.update(values)
