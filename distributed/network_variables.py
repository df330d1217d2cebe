"""The network between nodes, and the environment variables that its libraries read.

    network: Slingshot (cxi0, cxi1, cxi2, cxi3), NCCL_SOCKET_IFNAME=hsn; not set: FI_CXI_..., ...

NCCL and RCCL reach InfiniBand by themselves. Slingshot and EFA need libfabric and its plugin for
NCCL; RoCE needs the index of a GID. A run sets none of these variables, because the right values
are a site's: it prints those that are set, and names those that sites usually set. VARIABLES is the
table in docs/clusters.md.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SLINGSHOT, EFA, ROCE, INFINIBAND, ETHERNET = "Slingshot", "EFA", "RoCE", "InfiniBand", "Ethernet"
# By network, the variables that sites usually set. For all networks: NCCL_SOCKET_IFNAME.
VARIABLES = {
    SLINGSHOT: (
        "NCCL_NET",
        "NCCL_CROSS_NIC",
        "NCCL_NET_GDR_LEVEL",
        "FI_CXI_DEFAULT_CQ_SIZE",
        "FI_CXI_DISABLE_HOST_REGISTER",
        "FI_CXI_RDZV_PROTO",
        "FI_MR_CACHE_MONITOR",
    ),
    EFA: ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA"),
    ROCE: ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC"),
    INFINIBAND: ("NCCL_IB_HCA",),
    ETHERNET: (),
}
EVERYWHERE = ("NCCL_SOCKET_IFNAME",)
OF_ROCM = ("HSA_FORCE_FINE_GRAIN_PCIE", "GPU_MAX_HW_QUEUES")  # with RCCL, on any network
PREFIXES = ("NCCL_", "RCCL_", "FI_")


def find_network(sysfs: str = "/sys") -> tuple[str, list[str]]:
    """Return the name of the fastest network of this node, and the names of its devices.

    sysfs: the folder of the kernel's files, for tests. A node without any has Ethernet and no
    device that NCCL needs by name.
    """
    folder = Path(sysfs) / "class"
    if cards := sorted(path.name for path in folder.glob("cxi/cxi*")):
        return SLINGSHOT, cards
    cards = sorted(path.name for path in folder.glob("infiniband/*"))
    drivers = {name: folder / "infiniband" / name / "device/driver" for name in cards}
    if efa := [name for name, driver in drivers.items() if driver.resolve().name == "efa"]:
        return EFA, efa
    for name in cards:
        for layer in sorted((folder / "infiniband" / name / "ports").glob("*/link_layer")):
            return (INFINIBAND if layer.read_text().strip() == INFINIBAND else ROCE), cards
    return ETHERNET, []


def describe(has_rocm: bool, env: Mapping[str, str] = os.environ, sysfs: str = "/sys") -> str:
    """Return a line on this node's network: devices, variables that are set, and the usual others.

    has_rocm: whether torch is built for AMD's GPUs. env: the environment variables.
    """
    network, cards = find_network(sysfs)
    usual = (*EVERYWHERE, *VARIABLES[network], *(OF_ROCM if has_rocm else ()))
    given = {n: v for n, v in sorted(env.items()) if n.startswith(PREFIXES) or n in usual}
    line = f"{network} ({', '.join(cards)})" if cards else network
    if given:
        line += ", " + ", ".join(f"{name}={value}" for name, value in given.items())
    if missing := [name for name in usual if name not in given]:
        line += f"; not set: {', '.join(missing)}"
    return line
