"""The public rows of mixtures of experts as questions for the planner.

    rows, aside = read()

Reads benchmarks/data/moe_rows.csv, in columns of its own, with the models of moe_models.toml.
"""

import csv
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from architecture.shape import ModelShape
from benchmarks.planner.stated_rows import StatedRow
from config.command_line import read_toml
from config.schema import Layout, Training
from costs import hardware
from tools.planner import engines
from tools.planner.expert_engines import AGAIN, ExpertEngine

DATA = ROOT / "benchmarks" / "data"
MACHINES = {"H100": "h100-megatron", "H200": "h200-megatron"}
RAN_OUT = "no time: it ran out of memory"
# Sources whose programs shard weights: FSDP.
SHARDED = ("NeMo AutoModel performance summary", "PithTrain issue 79 (TorchTitan)")
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
    """The rows that can be predicted, and the names of the others by the reason.

    A row that ran out of memory has no seconds.
    """
    models = read_toml(DATA / "moe_models.toml", "moe_models.toml")
    software = engines.programs()["megatron-experts"]["software"]
    rows, aside = [], {}
    with open(path, newline="") as file:
        for cells in csv.DictReader(file):
            if cells["aside"] and cells["aside"] != RAN_OUT:
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
        layout=_layout(cells, model),
        training=training,
        machine=MACHINES.get(cells["gpu"], cells["gpu"].lower()),
        facts=software | _facts(cells, model),
        seconds=None if cells["aside"] == RAN_OUT else _seconds(cells, model),
        gigabytes=None,
        memory_kind="",
        memory_of="",
        memory_ahead=0.0,
        status="OOM" if cells["aside"] == RAN_OUT else "ok",
        assumed=False,
        aside="",
    )


def _layout(cells: dict[str, str], model: dict[str, Any]) -> Layout:
    tp, pp = int(cells["tp"]), int(cells["pp"])
    divides = model["shape"]["layers"] % pp == 0
    return Layout(
        tp=tp,
        pp=pp,
        cp=int(cells["cp"] or 1),
        dp=int(cells["dp"]),
        ep=int(cells["ep"]),
        micro_batch_size=int(cells["mbs"]),
        recompute="full" if cells["recompute"] == "full" else "selective",
        partition=model.get("partition") or ("layers" if divides else "balanced"),
        zero=3 if cells["source"] in SHARDED else 1,
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
        "recomputed": tuple(name for name in cells["recompute"].split(",") if name in AGAIN),
        "latent": model.get("latent", 0),
        "latent_ffn": model.get("latent_ffn", 0),
    }
    for name in ("scanned", "attention_layers"):
        if name in model:
            facts[name] = model[name] / blocks
    for fact, name in (("layers", "matrices"), ("further", "further")):
        found = model.get(name, ())
        facts[fact] = tuple((outs, ins, number / blocks) for outs, ins, number in found)
    return facts | model.get("software", {})


def _seconds(cells: dict[str, str], model: dict[str, Any]) -> float:
    """Seconds of a step: as stated, else from tokens per second, else from TFLOP/s."""
    if cells["seconds_per_step"]:
        return float(cells["seconds_per_step"])
    if cells["tokens_per_s_per_gpu"]:
        tokens = float(cells["tokens_per_s_per_gpu"])
    else:
        tokens = float(cells["tflops_per_gpu"]) / model["tflop_per_token"]
    return int(cells["gbs"]) * int(cells["seq"]) / (tokens * int(cells["gpus"]))


def recipes(rows: list[ExpertRow]) -> list[ExpertRow]:
    """One row of each recipe that ran, which versions of a program repeat: of the median time."""
    groups: dict[tuple, list[ExpertRow]] = {}
    for row in (row for row in rows if row.seconds):
        facts = row.facts["fp8"], row.facts["graphs"], row.facts["recomputed"]
        key = row.source, row.section, row.machine, row.layout, row.training, facts
        groups.setdefault(key, []).append(row)
    ordered = [sorted(group, key=attrgetter("seconds")) for group in groups.values()]
    return [group[len(group) // 2] for group in ordered]
