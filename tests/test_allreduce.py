"""The bandwidth benchmark: if this failed, its rates and the calibration made of them would be
wrong.
"""

import csv
import math

import pytest
import ranks

from benchmarks.network import allreduce
from costs import hardware
from tools.checker import bandwidth, timed_collectives
from tools.checker.bandwidth import Measured, bus_factor, calibration, fit


def measured(operation="all-reduce", n=4, size=2**20, seconds=1.0, **more) -> Measured:
    values = {"group": "world", "together": False, "groups": 1, "crosses": False} | more
    return Measured(ranks=n, operation=operation, size=size, seconds=[seconds] * 3, **values)


def test_bandwidths_are_those_of_nccl_tests():
    """2 (n-1)/n for all-reduce, (n-1)/n for its halves, 1 for p2p; bytes of the whole buffer."""
    assert measured(n=8, size=8 * 10**9, seconds=2.0).algbw == 4e9
    assert measured(n=8, size=8 * 10**9, seconds=2.0).busbw == pytest.approx(4e9 * 1.75)
    assert bus_factor("reduce-scatter", 4) == bus_factor("all-gather", 4) == 0.75
    assert bus_factor("p2p", 2) == 1.0
    # The published figure of 8 A100s: 16 GiB at 234.9 GB/s busbw takes 128 ms.
    assert measured(n=8, size=2**34, seconds=0.128).busbw / 1e9 == pytest.approx(234.9, rel=0.01)


@pytest.mark.parametrize("operation", bandwidth.OPERATIONS)
def test_the_fit_finds_alpha_and_beta_again(operation):
    n, alpha, beta = 4, 3e-5, 2e9
    rows = []
    for power in range(15, 27):
        size = 2**power
        seconds = bandwidth.hops(operation, n) * alpha + bus_factor(operation, n) * size / beta
        rows.append(measured(operation, n, size, seconds))
    assert fit(rows) == pytest.approx((alpha, beta), rel=1e-6)


def test_calibration_reads_back_as_the_planner_has_it(tmp_path):
    """Within a node: of one rank. Across nodes: of the node, all its groups at once."""
    beta, alpha = 200e9, 1e-5
    rows = []
    for size in (2**20, 2**26):
        tp = 2 * 7 * alpha + 1.75 * size / beta
        rows.append(measured(n=8, size=size, seconds=tp, group="tp", together=True, groups=2))
        dp = 2 * alpha + size / (beta / 16)  # two nodes, 8 groups share a node's network
        rows.append(
            measured(n=2, size=size, seconds=dp, group="dp", together=True, groups=8, crosses=True)
        )
    entries = calibration(rows, per_node=8, nodes=2)
    assert entries["nvlink"]["beta"] == pytest.approx(beta)
    assert entries["network"]["beta"] == pytest.approx(beta / 2)
    path = tmp_path / "c.toml"
    path.write_text(bandwidth.calibration_text("NVIDIA A100-SXM4-80GB", entries))
    machine = hardware.load("a100-80", str(path))
    assert machine.nvlink.speed == pytest.approx(beta, rel=1e-3)
    assert machine.network.speed == pytest.approx(beta / 2, rel=1e-3)
    assert machine.network.latency == pytest.approx(alpha, rel=1e-3)


@pytest.mark.parametrize("count", [2, 3, 8, 9])
def test_pairs_meet_once_in_disjoint_rounds(count):
    rounds = timed_collectives.rounds_of_pairs(count)
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for one in rounds:
        assert len({rank for pair in one for rank in pair}) == 2 * len(one)


def test_slow_links_are_named():
    pairs = {("n1", "n2"): 10e9, ("n1", "n3"): 10e9, ("n2", "n3"): 4e9}
    assert bandwidth.slow_links(pairs) == ["slow link: n2 to n3: 4.000 GB/s, 40% of the median"]


def test_rates_below_those_of_the_links_are_explained():
    said = timed_collectives.limits_of_sms()
    assert "world 2, dp 16, pp 4;" in said  # tp has no limit


def test_line_rates(tmp_path):
    assert allreduce.line_rate(tmp_path) is None
    (tmp_path / "net/eth0").mkdir(parents=True)
    (tmp_path / "net/eth0/speed").write_text("25000\n")
    assert allreduce.line_rate(tmp_path) == (25e9, "card eth0")
    for port in range(2):
        folder = tmp_path / f"infiniband/hfi{port}/ports/1"
        folder.mkdir(parents=True)
        (folder / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert allreduce.line_rate(tmp_path)[0] == 200e9
    (tmp_path / "net/eth0/speed").write_text("-1\n")
    row = measured(seconds=1.0, size=10**9, n=2, crosses=True)
    assert bandwidth.columns(row, 16e9)["percent_of_line"] == "50.0"
    assert bandwidth.columns(measured(), 16e9)["percent_of_line"] == "-"


@pytest.mark.slow
def test_on_real_ranks(tmp_path):
    """Every group and operation has its rows, and files are written.

    Measured speeds are not tested: benchmarks/results has the comparison.
    """
    words = (
        "benchmarks/network/allreduce.py --device cpu --tp 2 --gpu cpu --rates --pairs --factor 128"
    )
    words += " --max-bytes 4194304 --seconds 0.5 --trials 10 --warm-ups 2"
    done = ranks.fork_ranks(4, *words.split(), "--out", str(tmp_path), timeout=120)
    assert done.status == 0, done.err
    with open(tmp_path / "allreduce.csv") as file:
        table = list(csv.DictReader(file))
    kinds = {(r["group"], r["together"], r["operation"]) for r in table}
    groups = {("world", "False"), *((g, t) for g in ("tp", "dp") for t in ("False", "True"))}
    assert {kind[:2] for kind in kinds} == groups
    assert len(kinds) == len(groups) * len(bandwidth.OPERATIONS)
    for row in table:
        factor = bus_factor(row["operation"], int(row["ranks"]))
        rate = factor * float(row["algbw_GBps"])
        assert float(row["busbw_GBps"]) == pytest.approx(rate, rel=1e-4)
    assert "6 pairs" in done.out
    machine = hardware.load("cpu", str(tmp_path / "calibration.toml"))
    assert machine.node == 4
    assert 0 < machine.nvlink.speed < math.inf
    assert 0 < machine.gemm_fraction < math.inf
