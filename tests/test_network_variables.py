"""The line on the network: if this failed, no run would say which variable it lacks."""

import pytest

from distributed import network_variables


def node(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("files", "network", "cards"),
    [
        ({}, "Ethernet", []),
        ({"cxi/cxi0": "", "cxi/cxi1": ""}, "Slingshot", ["cxi0", "cxi1"]),
        ({"infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n"}, "RoCE", ["mlx5_0"]),
        ({"infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n"}, "InfiniBand", ["mlx5_0"]),
    ],
)
def test_the_network_of_a_node(tmp_path, files, network, cards):
    assert network_variables.find_network(node(tmp_path, files)) == (network, cards)


def test_efa_is_known_by_its_driver(tmp_path):
    sysfs = node(tmp_path, {"infiniband/rdmap16s27/ports/1/link_layer": "Unspecified\n"})
    (tmp_path / "drivers/efa").mkdir(parents=True)
    (tmp_path / "class/infiniband/rdmap16s27/device").mkdir()
    (tmp_path / "class/infiniband/rdmap16s27/device/driver").symlink_to(tmp_path / "drivers/efa")
    assert network_variables.find_network(sysfs) == ("EFA", ["rdmap16s27"])


def test_the_line_has_what_is_set_and_what_is_not(tmp_path):
    sysfs = node(tmp_path, {"infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n"})
    env = {"NCCL_IB_TC": "106", "NCCL_DEBUG": "WARN", "PATH": "/bin", "GPU_MAX_HW_QUEUES": "8"}
    assert network_variables.describe(False, env, sysfs) == (
        "RoCE (mlx5_0), NCCL_DEBUG=WARN, NCCL_IB_TC=106; "
        "not set: NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_IB_GID_INDEX"
    )
    line = network_variables.describe(True, env, sysfs)
    assert "GPU_MAX_HW_QUEUES=8" in line
    assert line.endswith("HSA_FORCE_FINE_GRAIN_PCIE")


def test_the_docs_have_each_variable():
    with open("docs/clusters.md") as file:
        text = file.read()
    every = [*network_variables.EVERYWHERE, *network_variables.OF_ROCM]
    for names in network_variables.VARIABLES.values():
        every += names
    assert [name for name in every if f"`{name}" not in text] == []
