"""The planner's error on public rows of mixtures of experts, each model held out of the fit.

    python benchmarks/planner/expert_rows.py  # the tables of benchmarks/results/plan_moe.md

Reads benchmarks/data/moe_rows.csv and predicts every row whose source states what a plan needs. The
constants PRIORS are fitted on the rows of all other models before a model is predicted. Rows that
are set aside are listed by their reason.
"""

import csv
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.planner import engines, row_engines
from benchmarks.planner.expert_engines import ExpertEngine
from benchmarks.planner.robust_fit import refit_without_each
from benchmarks.planner.source_accuracy import errors
from benchmarks.planner.stated_rows import StatedRow
from config.cli import Parser
from config.command_line import read_toml
from config.errors import sentences
from config.schema import Layout, ModelShape, Training
from planner import hardware

DATA = ROOT / "benchmarks" / "data"
# Values expected without any row, each of which pulls as PULL rows of this logarithm would.
PRIORS = {"expert_tile": 1e-6, "expert_host": 2e-5, "expert_scans": 8.0}
PULL = 0.2
MOST_STEP = 0.7  # of a constant's logarithm, in one of ROUNDS
ROUNDS = 5
MACHINES = {"H100": "h100-megatron", "GB300": str(DATA / "machines" / "gb300.toml")}
# The share of a block's forward that recomputation of a module repeats, from its FLOPs.
AGAIN = {"mla_up_proj": 0.09, "mlp": 0.01, "moe": 0.6, "moe_act": 0.03, "layernorm": 0.03}
AGAIN |= {"core_attn": 0.1}
HIDDEN = 0.8  # share of the exchange behind other micro-batches where a recipe overlaps it; assumed
ALIKE = {"norm": "rmsnorm", "positions": "rotary", "bias": False, "tied": False}
ALIKE |= {"activation": "swiglu"}


@dataclass(frozen=True)
class ExpertRow(StatedRow):
    """A row of a model with experts. source: the model, which is held out as a whole."""

    def on(
        self, machine: hardware.Machine, values: dict[str, float] | None = None
    ) -> hardware.Machine:
        """Return what StatedRow.on does, with ExpertEngine."""
        return engines.on(machine, self.facts, values, ExpertEngine)


def read(path: Path = DATA / "moe_rows.csv") -> tuple[list[ExpertRow], dict[str, list[str]]]:
    """The rows that can be predicted, and the names of the others by the reason."""
    models = read_toml(DATA / "moe_models.toml", "moe_models.toml")
    software = row_engines.read_engines()["megatron-experts"]["software"]
    rows, aside = [], {}
    with open(path, newline="") as file:
        for cells in csv.DictReader(file):
            if cells["aside"]:
                aside.setdefault(cells["aside"], []).append(cells["row"])
            else:
                rows.append(_row(cells, models[cells["model"]], software))
    return rows, aside


def _row(cells: dict[str, str], model: dict[str, Any], software: dict[str, Any]) -> ExpertRow:
    """A row of the file, whose numbers must be whole where a plan needs them."""
    shape = ALIKE | model["shape"] | {"seq_length": int(cells["seq"])}
    training = Training(global_batch_size=int(cells["gbs"]), precision="bf16")
    return ExpertRow(
        id=cells["row"],
        source=cells["model"].removesuffix("-L4"),
        section=cells["source"],
        kernel="",
        model=ModelShape(**shape),
        layout=_layout(cells),
        training=training,
        machine=MACHINES.get(cells["gpu"], cells["gpu"].lower()),
        facts=software | _facts(cells, model),
        seconds=_seconds(cells, model),
        gigabytes=None,
        memory_kind="",
        memory_of="",
        memory_ahead=0.0,
        status="ok",
        assumed=False,
        aside="",
    )


def _layout(cells: dict[str, str]) -> Layout:
    tp = int(cells["tp"])
    return Layout(
        tp=tp,
        pp=int(cells["pp"]),
        cp=int(cells["cp"] or 1),
        dp=int(cells["dp"]),
        ep=int(cells["ep"]),
        micro_batch_size=int(cells["mbs"]),
        recompute="full" if cells["recompute"] == "full" else "selective",
        partition="balanced",
        zero=1,
        sequence_parallel=tp > 1,
        schedule="1f1b",
    )


def _facts(cells: dict[str, str], model: dict[str, Any]) -> dict[str, Any]:
    """Fields of ExpertEngine that the row and its model set."""
    blocks = model["shape"]["layers"]
    facts: dict[str, Any] = {
        "graphs": cells["graphs"],
        "fused_mlp": cells["graphs"] == "full",
        "fp8": cells["precision"] != "bf16",
        "virtual_stages": int(cells["vp"] or 1),
        "sent_once": cells["dispatcher"] != "alltoall",
        "exchange_hidden": HIDDEN * (cells["overlap"] == "True"),
        "balanced": cells["routing"] != "real",
        "again": sum(AGAIN.get(module, 0.0) for module in cells["recompute"].split(",")),
        "latent": model.get("latent", 0),
    }
    for name in ("scanned", "attention_layers"):
        if name in model:
            facts[name] = model[name] / blocks
    matrices = model.get("matrices", ())
    facts["layers"] = tuple((outs, ins, number / blocks) for outs, ins, number in matrices)
    return facts


def _seconds(cells: dict[str, str], model: dict[str, Any]) -> float:
    """Seconds of a step: as stated, else from tokens per second, else from TFLOP/s."""
    if cells["seconds_per_step"]:
        return float(cells["seconds_per_step"])
    if cells["tokens_per_s_per_gpu"]:
        tokens = float(cells["tokens_per_s_per_gpu"])
    else:
        tokens = float(cells["tflops_per_gpu"]) / model["tflop_per_token"]
    return int(cells["gbs"]) * int(cells["seq"]) / (tokens * int(cells["gpus"]))


# ---- Fitting -------------------------------------------------------------------------------------


def recipes(rows: list[ExpertRow]) -> list[ExpertRow]:
    """One row of each recipe, which versions of a program repeat: that of the median time."""
    groups: dict[tuple, list[ExpertRow]] = {}
    for row in rows:
        facts = row.facts["fp8"], row.facts["graphs"], row.facts["again"]
        key = row.source, row.section, row.machine, row.layout, row.training, facts
        groups.setdefault(key, []).append(row)
    ordered = [sorted(group, key=attrgetter("seconds")) for group in groups.values()]
    return [group[len(group) // 2] for group in ordered]


def held_out(rows: list[ExpertRow]) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """The constants and the errors by row of each model, from a fit on the other models' rows.

    Constants of PRIORS are fitted, on one row of each recipe.
    """
    names = tuple(PRIORS)
    start = {constant.name: constant.value for constant in engines.constants()} | PRIORS

    def with_priors(some: Sequence[ExpertRow], at: dict[str, float]) -> list[float]:
        pulls = [PULL * math.log(at[name] / PRIORS[name]) for name in names]
        return errors(some, "seconds", at) + pulls

    constants = refit_without_each(
        recipes(rows), lambda row: row.source, with_priors, names, start, ROUNDS, MOST_STEP
    )
    found = {}
    for model, values in constants.items():
        mine = [row for row in rows if row.source == model]
        off = [math.exp(error) - 1 for error in errors(mine, "seconds", values)]
        found[model] = values, {row.id: each for row, each in zip(mine, off, strict=True)}
    return found


# ---- The report ----------------------------------------------------------------------------------


def report(
    rows: list[ExpertRow],
    aside: dict[str, list[str]],
    found: dict[str, tuple[dict[str, float], dict[str, float]]],
) -> list[str]:
    """The figures of each model, of each recipe, and what is set aside, as lines of Markdown.

    found: the result of `held_out`.
    """
    names = " | ".join(PRIORS)
    lines = [f"| model, held out | rows | mean | median | largest | bias | {names} |"]
    lines.append("|---" * (6 + len(PRIORS)) + "|")
    for model, (values, off) in found.items():
        sizes = [abs(each) for each in off.values()]
        figures = statistics.mean(sizes), statistics.median(sizes), max(sizes)
        cells = [f"{100 * each:.1f}" for each in (*figures, statistics.mean(off.values()))]
        cells += [f"{values[name]:.3g}" for name in PRIORS]
        lines.append(f"| {model} | {len(off)} | {' | '.join(cells)} |")
    lines += ["", "| recipe | rows | seconds of a step | error in per cent |", "|---|---|---|---|"]
    every = {name: each for _, off in found.values() for name, each in off.items()}
    groups: dict[str, list[ExpertRow]] = {}
    for row in rows:
        groups.setdefault(_recipe(row), []).append(row)
    for recipe, group in groups.items():
        seconds = ", ".join(f"{row.seconds:.2f}" for row in group)
        off_of = ", ".join(f"{100 * every[row.id]:+.0f}" for row in group)
        lines.append(f"| {recipe} | {len(group)} | {seconds} | {off_of} |")
    lines += ["", f"Set aside, {sum(map(len, aside.values()))} rows:", ""]
    lines += [f"* {why} ({len(names)}): {', '.join(names)}" for why, names in aside.items()]
    return lines


def _recipe(row: ExpertRow) -> str:
    at, facts = row.layout, row.facts
    precision = "fp8" if facts["fp8"] else "bf16"
    machine = Path(row.machine).stem
    layout = f"tp {at.tp}, pp {at.pp}, ep {at.ep}, vp {facts['virtual_stages']}"
    batch = f"micro-batch {at.micro_batch_size}, batch {row.training.global_batch_size}"
    words = f"{row.source}, {machine}, {precision}, graphs {facts['graphs']}, {layout}, {batch}"
    return f"{words}; {row.section}"


def main(arguments: list[str]) -> None:
    """Print the report."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    rows, aside = read()
    print("\n".join(report(rows, aside, held_out(rows))))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
