"""The GPU of a rank: which one, and whether the torch that is installed can use it.

Only ranks that may take a GPU load this module: rendezvous.meet asks `are_usable`, calls `take`,
and compares the ranks' GPUs with `check_gpus` when all have met. A Place says where a rank runs;
its `gpu` identifies a GPU among all GPUs of the job (placement.py).
"""

import os
import re
from pathlib import Path
from typing import Any

from base.errors import ClusterError
from distributed.launch import Local
from distributed.placement import SHARE_FOR_TESTS, Place, shared_gpus


def are_usable(required: bool) -> bool:
    """Return whether torch sees a GPU on this node, so that this rank runs on a GPU.

    required: whether --device cuda was given. Raise UserError if torch sees no GPU although a GPU
    is required, or although the node has a GPU that this job may use.
    """
    import torch

    if torch.cuda.is_available():
        return True
    why = unusable_driver(torch.__version__, torch.version.cuda)
    if required:
        raise ClusterError(f"--device cuda: torch sees no CUDA device on this node{why}")
    check_unused_gpu(torch.version.cuda, why)
    return False


def take(local: Local, node: str, sharing: bool) -> tuple[Any, str]:
    """Make a GPU this rank's device; return its torch.device and its identifier in the job.

    node: the name of this node. sharing: whether several ranks may use one GPU. Raise UserError if
    the node has too few GPUs or torch has no kernels for the GPU.
    """
    import torch

    gpu = choose_gpu(local.rank, local.size, torch.cuda.device_count(), node, sharing)
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    check_kernels(device)
    return device, f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def visible() -> int:
    """Return the number of GPUs that this rank sees."""
    import torch

    return torch.cuda.device_count()


def nvidia_capability(device: Any) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, and (0, 0) for any other GPU.

    torch for ROCm reports the number of AMD's architecture in its place: (9, 0) for an MI250X
    (gfx90a), as for an H100. What depends on NVIDIA's hardware or libraries asks here.
    """
    import torch

    if torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def near_cores(device: Any, sysfs: str = "/sys") -> str | None:
    """Return the logical CPUs on a GPU's socket, as in 0-31,64-95; None if they are not known.

    device: a torch.device. sysfs: the folder of the kernel's files, for tests.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:  # this torch does not tell
        return None
    domain, bus, slot = parts
    path = Path(f"{sysfs}/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/local_cpulist")
    try:
        return path.read_text().strip() or None
    except OSError:  # not Linux, or a container without these files
        return None


def choose_gpu(local_rank: int, local_size: int, visible: int, node: str, sharing: bool) -> int:
    """Return the index of a rank's GPU among the GPUs that the rank sees.

    local_rank, local_size: the rank's number among the ranks of its node, and their number.
    visible: the number of GPUs that this rank sees; 1 if the launcher gives each rank one GPU
    (--gpus-per-task). sharing: whether several ranks may use one GPU; if not, raise UserError if
    the node has fewer GPUs than ranks.
    """
    if visible == 1:  # whether other ranks see the same GPU, `check_gpus` finds later
        return 0
    if local_size > visible and not sharing:
        raise ClusterError(
            f"{local_size} ranks on node {node} have {visible} GPUs; start at most {visible} "
            f"a node (train.py may share GPUs, with --backend gloo)"
        )
    return local_rank % visible


def share_gpu_for_tests(places: list[Place], rank: int) -> bool:
    """Let ranks share GPUs over NCCL in tests; return whether ranks do share GPUs.

    This happens only if the environment variable SHARE_FOR_TESTS is set. NCCL refuses two ranks on
    one GPU of one host, and knows hosts by NCCL_HOSTID. So each rank gets a host id of its own,
    and messages go over the loopback network and take milliseconds each. Called before the first
    process group is made.
    """
    if not os.environ.get(SHARE_FOR_TESTS) or not shared_gpus(places):
        return False
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    return True


def check_kernels(device: Any) -> None:
    """Raise UserError if the installed torch has no kernels for this GPU, a torch.device.

    A build of torch has kernels for some compute capabilities only; a small addition shows it.
    """
    import torch

    try:
        torch.ones(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        capability = torch.cuda.get_device_capability(device)
        # GPUs before Turing (7.5) have kernels only in torch's builds for CUDA 12.6.
        advice = "install a build of torch for it"
        if capability < (7, 5):
            advice = "install torch's build for CUDA 12.6 (+cu126)"
        major, minor = capability
        raise ClusterError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor} "
            f"(sm_{major}{minor}), but torch {torch.__version__} cannot run on it: "
            f"{str(error).splitlines()[0]}; {advice} (docs/install.md)"
        ) from None


def unusable_driver(
    version: str,
    cuda: str | None,
    path: str = "/proc/driver/nvidia/version",
) -> str:
    """Return the reason why torch sees no GPU, as the end of an error message.

    The text is empty if no NVIDIA driver is loaded on this node. version: torch's version. cuda:
    the CUDA version for which torch is built, None for a build for CPUs. path: the driver's file
    with its version, for tests.
    """
    try:
        with open(path) as file:
            words = file.read().split()
    except OSError:
        return ""
    # The file's first word like 550.54.14 is the version of the driver.
    driver = next((word for word in words if word[0].isdigit() and "." in word), "unknown")
    if cuda is None:
        return f", because torch {version} is built for CPUs; the driver here is {driver}"
    return (
        f"; the driver here is {driver}, and torch {version} is built for CUDA {cuda}: if that "
        f"needs a newer driver, install torch's build for CUDA 12.6 (docs/install.md)"
    )


def check_unused_gpu(cuda: str | None, why: str, devices: str = "/dev") -> None:
    """Raise UserError if `--device auto` would use the CPU though the node has a GPU.

    cuda: the CUDA version for which torch is built; None, for a build for CPUs, raises nothing.
    why: the result of `unusable_driver`. If CUDA_VISIBLE_DEVICES is set and names no GPU, the job
    was given no GPU, and nothing is raised.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    # In CUDA_VISIBLE_DEVICES a number, GPU-... or MIG-... names a GPU; an empty text or -1 names
    # none. A torch for CPUs, or a job that was given no GPU, may use the CPU without an error.
    if cuda is None or (shown is not None and not re.match(r"\s*(\d|GPU-|MIG-)", shown)):
        return
    gpus = sorted(path.name for path in Path(devices).glob("nvidia[0-9]*"))
    if gpus:
        raise ClusterError(
            f"--device auto: this node has {devices}/{gpus[0]}, but torch can use no GPU{why}; "
            f"to run on the CPU all the same, give --device cpu"
        )


def check_gpus(places: list[Place]) -> None:
    """Raise UserError, for the first GPU found, if several ranks have the same GPU.

    places: the place of every rank, in rank order. Called over NCCL, which allows one rank a GPU.
    """
    for gpu, ranks in shared_gpus(places).items():
        place = places[ranks[0]]
        on_node = sum(other.node == place.node for other in places)
        raise ClusterError(
            f"ranks {', '.join(map(str, ranks))} on node {place.node} have the same GPU "
            f"({gpu}), of {on_node} ranks there: give srun --gpus-per-node={on_node} "
            f"--gpu-bind=none (train.py may share GPUs, with --backend gloo)"
        )
