"""Computes from timed collectives their bandwidths, as nccl-tests defines them, alpha and beta.

    algbw = S / t        S: bytes of the whole buffer (all-gather, reduce-scatter: of all ranks')
    busbw = algbw x 2 (n-1)/n   all-reduce;  (n-1)/n   reduce-scatter, all-gather;  1   p2p

busbw is the rate of one link in one direction, for any number of ranks: comparable to a line rate.
GB and Gbit are powers of ten. Pure arithmetic; `benchmarks/allreduce.py` measures.
"""

import csv
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "p2p")
MOST_LINES = 8  # the plot has at most this number of lines
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
    """busbw over algbw, for an operation of OPERATIONS."""
    share = (ranks - 1) / ranks
    return {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share, "p2p": 1.0}[
        operation
    ]


def hops(operation: str, ranks: int) -> int:
    """Sequential messages of a ring, each of which costs alpha."""
    return {"all-reduce": 2 * (ranks - 1), "p2p": 1}.get(operation, ranks - 1)


def fit(rows: list[Measured]) -> tuple[float, float]:
    """alpha (seconds a message) and beta (bytes/s) of rows of one operation on one kind of group.

    Least squares of relative errors of t = hops alpha + factor S / beta; neither is negative. With
    a single size alpha is taken as 0.
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
    """Rows that differ in size only, by (group, together, operation)."""
    found: dict[tuple, list[Measured]] = {}
    for row in rows:
        found.setdefault((row.group, row.together, row.operation), []).append(row)
    return found


def calibration(rows: list[Measured], per_node: int, nodes: int) -> dict[str, dict[str, float]]:
    """The [nvlink] and [network] entries for hardware.calibrate, as far as they were measured.

    nvlink: from all-reduces within a node, the tensor groups' if there are any, all at once.
    network: from groups across nodes; `beta` is then of a node, all its groups together.
    """
    found = {}
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
    """The TOML file that `plan.py --calibration` and `tune.py --calibration` take."""
    lines = [f'device = "{device}"']
    lines += [f"{k} = {_number(v)}" for k, v in entries.items() if not isinstance(v, dict)]
    for name, table in entries.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]"] + [f"{k} = {_number(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


# ------------------------------------------------------------------------------------------------
# Tables and plot
# ------------------------------------------------------------------------------------------------

HEAD = (
    "group          ranks operation            size   trials    median ms  (10 to 90 %)      "
    "algbw GB/s  Gbit/s    busbw GB/s  Gbit/s  of line"
)


def line(row: Measured, line_rate: float | None) -> str:
    """One row as text; `line_rate` in bit/s of a node, None if not known."""
    low, high = quantiles(row.seconds)
    name = row.group + (f" x {row.groups}" if row.together and row.groups > 1 else "")
    share = percent(row, line_rate)
    return (
        f"{name:14} {row.ranks:5} {row.operation:15} {size_text(row.size):>9} {len(row.seconds):8}"
        f" {1e3 * row.median:12.3f}  ({1e3 * low:.3f} to {1e3 * high:.3f})".ljust(92)
        + f"{row.algbw / 1e9:9.3f}{8 * row.algbw / 1e9:8.2f}    {row.busbw / 1e9:9.3f}"
        f"{8 * row.busbw / 1e9:8.2f}  {share}"
    )


def percent(row: Measured, line_rate: float | None) -> str:
    """busbw over the line rate of a node, for groups that cross nodes; else a dash."""
    if line_rate is None or not row.crosses:
        return "      -"
    return f"{100 * 8 * row.busbw / line_rate:6.1f}%"


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """The 10th and 90th percentile, by the nearest rank."""
    order = sorted(seconds)
    last = len(order) - 1
    return order[math.floor(0.1 * last)], order[math.ceil(0.9 * last)]


def size_text(size: int) -> str:
    """A size as text, such as 32 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def slow_links(pairs: dict[tuple[str, str], float]) -> list[str]:
    """Sentences on the pairs whose bytes/s are well below the median, slowest first."""
    if not pairs:
        return []
    middle = statistics.median(pairs.values())
    slow = sorted((rate, pair) for pair, rate in pairs.items() if rate < SLOW * middle)
    return [
        f"slow link: {a} to {b}: {rate / 1e9:.3f} GB/s, {rate / middle:.0%} of the median"
        for rate, (a, b) in slow
    ]


def write_csv(rows: list[Measured], line_rate: float | None, path: Path) -> None:
    """One line a row; rates in GB/s and Gbit/s."""
    names = ("group", "together", "ranks", "groups", "operation", "bytes", "trials", "median_s")
    names += ("p10_s", "p90_s", "algbw_GBps", "algbw_Gbps", "busbw_GBps", "busbw_Gbps")
    names += ("line_rate_Gbps", "percent_of_line")
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for r in rows:
            low, high = quantiles(r.seconds)
            first = (r.group, r.together, r.ranks, r.groups, r.operation, r.size, len(r.seconds))
            rates = [f"{v / 1e9:.6g}" for v in (r.algbw, 8 * r.algbw, r.busbw, 8 * r.busbw)]
            line_gbps = "" if line_rate is None else f"{line_rate / 1e9:g}"
            share = percent(r, line_rate).strip(" %-")
            times = [f"{v:.6g}" for v in (r.median, low, high)]
            writer.writerow([*first, *times, *rates, line_gbps, share])


def plot(rows: list[Measured], line_rate: float | None, path: Path) -> None:
    """busbw over size, a line for each operation and group; of more than MOST_LINES the first
    operations, and a sentence on how many are in the table alone.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    styles = dict(zip(OPERATIONS, (("-", "o"), ("--", "s"), (":", "^"), ("-.", "x"))))
    names = list(dict.fromkeys((row.group, row.together) for row in rows))
    series = sorted(by_series(rows).items(), key=lambda each: OPERATIONS.index(each[0][2]))
    has_line = line_rate is not None and any(row.crosses for row in rows)
    shown = series[: MOST_LINES - has_line]
    for (group, together, operation), own in shown:
        color = f"C{names.index((group, together)) % 10}"
        label = f"{group}{', all at once' if together else ''}: {operation}"
        sizes, rates = [row.size for row in own], [row.busbw / 1e9 for row in own]
        line, marker = styles[operation]
        axes.plot(sizes, rates, line, marker=marker, markersize=4, color=color, label=label)
    if has_line and line_rate:
        axes.axhline(line_rate / 8e9, color="gray", linewidth=0.8, label="line rate of a node")
    if len(series) > len(shown):
        axes.set_title(f"{len(series) - len(shown)} more lines are in the table", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("busbw, GB/s")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
