"""Computes from timed collectives their bandwidths, as nccl-tests defines them, alpha and beta.

    algbw = S / t        S: bytes of the whole buffer (all-gather, reduce-scatter: of all ranks')
    busbw = algbw x 2 (n-1)/n   all-reduce;  (n-1)/n   reduce-scatter, all-gather;  1   p2p

busbw is the rate of one link in one direction, for any number of ranks: comparable to a line rate.
GB and Gbit are powers of ten. `timed_collectives.py` measures them.
"""

import csv
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "p2p")
SLOW = 0.8  # a link below this share of the median link is named


@dataclass(frozen=True)
class Measured:
    """One operation on one kind of group at one size; seconds are of the slowest such group."""

    group: str  # world, tp, dp, pp
    together: bool  # all groups of that kind at once, or the first one alone
    ranks: int  # the size of each group
    groups: int  # that took part
    operation: str
    size: int  # bytes
    seconds: list[float]  # one number for each trial
    crosses: bool  # whether a group has ranks on several nodes

    @property
    def median(self) -> float:
        """Seconds of the middle trial."""
        return statistics.median(self.seconds)

    @property
    def algbw(self) -> float:
        """Bytes per second of the whole buffer."""
        return self.size / self.median

    @property
    def busbw(self) -> float:
        """Bytes per second over each rank's link, one way."""
        return self.algbw * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from algbw to busbw of an operation of OPERATIONS."""
    share = (ranks - 1) / ranks
    return {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share, "p2p": 1.0}[
        operation
    ]


def hops(operation: str, ranks: int) -> int:
    """Sequential messages of a ring, each of which costs alpha."""
    return {"all-reduce": 2 * (ranks - 1), "p2p": 1}.get(operation, ranks - 1)


def fit(rows: list[Measured]) -> tuple[float, float]:
    """Return alpha (seconds a message) and beta (bytes/s), fitted to rows of one operation.

    rows: of one kind of group, in several sizes. By least squares of the relative errors of
    t = hops alpha + factor S / beta; neither is negative. With a single size alpha is taken as 0.
    """
    first = rows[0]
    count, factor = hops(first.operation, first.ranks), bus_factor(first.operation, first.ranks)
    # In units of the measured time: alpha x + y / beta = 1.
    x = np.array([count / row.median for row in rows])
    y = np.array([factor * row.size / row.median for row in rows])
    if len({row.size for row in rows}) > 1:
        alpha, inverse = np.linalg.lstsq(np.stack([x, y / y.max()], 1), np.ones(len(rows)))[0]
        inverse /= y.max()
        if alpha >= 0 and inverse > 0:
            return float(alpha), float(1 / inverse)
        if alpha >= 0:  # only latency was measured: the largest rate bounds the bandwidth
            return float(x.sum() / (x @ x)), max(row.busbw for row in rows)
    return 0.0, float((y @ y) / y.sum())


def by_series(rows: list[Measured]) -> dict[tuple, list[Measured]]:
    """Return the rows by (group, together, operation): each list differs in size only."""
    found: dict[tuple, list[Measured]] = {}
    for row in rows:
        found.setdefault((row.group, row.together, row.operation), []).append(row)
    return found


def calibration(rows: list[Measured], per_node: int, nodes: int) -> dict[str, dict[str, float]]:
    """Return the measured ones of the [nvlink] and [network] entries for hardware.calibrate.

    nvlink: from all-reduces within a node, the tensor groups' if there are any, all at once.
    network: from groups across nodes; `beta` is then of a node, all its groups together.
    """
    found: dict[str, tuple[Any, dict[str, float]]] = {}
    series = by_series([row for row in rows if row.operation == "all-reduce"])
    for (name, together, _), own in series.items():
        first = own[0]
        alpha, beta = fit(own)
        sharing = 1.0
        if first.crosses and together:
            local = max(1, first.ranks // nodes)
            sharing = per_node / local
        entry = {"alpha": alpha, "beta": beta * sharing}
        place = "network" if first.crosses else "nvlink"
        rank = (together, name == "tp", name == "dp")  # prefer the one most like training
        if place not in found or rank > found[place][0]:
            found[place] = (rank, entry)
    return {place: entry for place, (_, entry) in found.items()}


def calibration_text(device: str, entries: dict) -> str:
    """Return the TOML file that `plan.py --calibration` and `tune.py --calibration` take."""
    lines = [f'device = "{device}"']
    lines += [f"{k} = {_number(v)}" for k, v in entries.items() if not isinstance(v, dict)]
    for name, table in entries.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]"] + [f"{k} = {_number(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def columns(row: Measured, line_rate: float | None) -> dict[str, object]:
    """Return the columns of a row of the table, by name; those with a unit have it in their name.

    line_rate: of a node's network, in bit/s; None: not known. Only groups that cross nodes are
    compared with it.
    """
    low, high = np.quantile(row.seconds, (0.1, 0.9))
    found: dict[str, object] = {
        "group": row.group,
        "together": row.together,
        "ranks": row.ranks,
        "groups": row.groups,
        "operation": row.operation,
        "bytes": row.size,
        "trials": len(row.seconds),
        "median_s": f"{row.median:.6g}",
        "p10_s": f"{low:.6g}",
        "p90_s": f"{high:.6g}",
    }
    for name, rate in (("algbw", row.algbw), ("busbw", row.busbw)):
        found[f"{name}_GBps"] = f"{rate / 1e9:.6g}"
        found[f"{name}_Gbps"] = f"{8 * rate / 1e9:.6g}"
    found["percent_of_line"] = "-"
    if line_rate and row.crosses:
        found["percent_of_line"] = f"{100 * 8 * row.busbw / line_rate:.1f}"
    return found


def line(row: dict[str, object]) -> str:
    """Return the columns of a row, or their names, as a line of the printed table."""
    shown = {name: value for name, value in row.items() if name not in ("together", "groups")}
    return " ".join(f"{value!s:>{max(11, len(name))}}" for name, value in shown.items())


def size_text(size: int) -> str:
    """Return a size as text, such as 32 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def slow_links(pairs: dict[tuple[str, str], float]) -> list[str]:
    """Return sentences on the pairs whose bytes/s are well below the median, slowest first."""
    if not pairs:
        return []
    middle = statistics.median(pairs.values())
    slow = sorted((rate, pair) for pair, rate in pairs.items() if rate < SLOW * middle)
    return [
        f"slow link: {a} to {b}: {rate / 1e9:.3f} GB/s, {rate / middle:.0%} of the median"
        for rate, (a, b) in slow
    ]


def write_csv(rows: list[dict[str, object]], path: Path) -> None:
    """Write the columns of all rows."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


# ------------------------------------------------------------------------------------------------
# The line rate
# ------------------------------------------------------------------------------------------------


def line_rate(root: Path = Path("/sys/class")) -> tuple[float, str] | None:
    """Return the bit/s of all network adapters of this node, and where that was read; or None.

    InfiniBand and Omni-Path ports if there are any, else the fastest network card that is up.
    """
    ports = sorted(root.glob("infiniband/*/ports/*/rate"))
    found = [re.match(r"([\d.]+) Gb/sec", path.read_text()) for path in ports]
    total = sum(float(match.group(1)) for match in found if match)
    if total:
        return total * 1e9, f"{len(ports)} ports under {root}/infiniband"
    speeds = {}
    for path in root.glob("net/*/speed"):
        try:
            speeds[path.parent.name] = int(path.read_text())
        except OSError:  # a card that is down or virtual has none
            continue
    card = max(speeds, key=lambda name: speeds[name], default=None)
    if card is None or speeds[card] <= 0:
        return None
    return speeds[card] * 1e6, f"card {card}"
