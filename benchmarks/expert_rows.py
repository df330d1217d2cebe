"""The planner's error on public rows of mixtures of experts, each model held out of the fit.

    python benchmarks/expert_rows.py            # the figures of benchmarks/results/plan_moe.md

Reads benchmarks/data/moe_rows.csv, predicts every row whose source states what a plan needs, and
fits the constants FITTED on the rows of all other models before one is predicted. Rows that are set
aside are listed by their reason.
"""

import csv
import math
import statistics
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import engines
import row_engines
import source_accuracy
from expert_engines import ExpertEngine
from robust_fit import moved, slopes, solve
from stated_rows import StatedRow

from config.command_line import read_toml
from config.messages import Parser, UserError, sentences
from config.schema import Layout, ModelShape, Training
from planner import hardware

DATA = ROOT / "benchmarks" / "data"
FITTED = ("expert_tile", "expert_host", "expert_scans")
MACHINES = {"H100": "h100-megatron", "GB300": str(DATA / "machines" / "gb300.toml")}
# The share of a block's forward that recomputation of a module repeats: of its FLOPs.
AGAIN = {"mla_up_proj": 0.09, "mlp": 0.01, "moe": 0.6, "moe_act": 0.03, "layernorm": 0.03}
AGAIN |= {"core_attn": 0.1}
HIDDEN = 0.8  # share of the exchange behind other micro-batches, where a recipe overlaps it
PULL = 0.2
ROWS = {"norm": "rmsnorm", "positions": "rotary", "bias": False, "tied": False}


@dataclass(frozen=True)
class ExpertRow(StatedRow):
    """A row of a model with experts."""

    def on(
        self, machine: hardware.Machine, values: dict[str, float] | None = None
    ) -> hardware.Machine:
        """Return what StatedRow.on does, with ExpertEngine."""
        return engines.on(machine, self.facts, values, ExpertEngine)


def read(path: Path = DATA / "moe_rows.csv") -> tuple[list[ExpertRow], dict[str, list[str]]]:
    """The rows that can be predicted, and the names of the others by the reason."""
    models = read_toml(DATA / "moe_models.toml", "moe_models.toml")
    engine = row_engines.read_engines()
    rows, aside = [], {}
    with open(path, newline="") as file:
        for cells in csv.DictReader(file):
            if cells["aside"]:
                aside.setdefault(cells["aside"], []).append(cells["row"])
            else:
                rows.append(_row(cells, models[cells["model"]], engine))
    return rows, aside


def _row(cells: dict[str, str], model: dict[str, Any], engine: dict) -> ExpertRow:
    whole = {n: int(cells[n] or 1) for n in ("tp", "pp", "cp", "dp", "ep", "mbs", "gbs", "vp")}
    shape = ModelShape(**{"activation": "swiglu"} | ROWS | model["shape"] | {"seq_length": int(cells["seq"])})
    automodel = cells["source"].startswith("NeMo AutoModel")
    recompute = "full" if cells["recompute"] == "full" else "selective"
    layout = Layout(
        tp=whole["tp"], pp=whole["pp"], cp=whole["cp"], dp=whole["dp"], ep=whole["ep"],
        micro_batch_size=whole["mbs"], recompute=recompute, zero=1,
        partition="balanced", sequence_parallel=whole["tp"] > 1, schedule="1f1b",
    )
    training = Training(global_batch_size=whole["gbs"], precision="bf16")
    return ExpertRow(
        id=cells["row"], source=cells["model"].removesuffix("-L4"), section=cells["source"], kernel="",
        model=shape, layout=layout, training=training,
        machine=MACHINES.get(cells["gpu"], cells["gpu"].lower()),
        facts=_facts(cells, model, engine),
        seconds=_seconds(cells, model), gigabytes=None, memory_kind="", memory_of="", memory_ahead=0.0,
        status="ok", assumed=False, aside="",
    )


def _facts(cells, model, engine):
    blocks = model["shape"]["layers"]
    facts = engine["megatron-experts"]["software"] | {"graphs": cells["graphs"]}
    facts["fp8"] = cells["precision"] != "bf16"
    facts["fused_mlp"] = cells["graphs"] == "full"
    facts["virtual_stages"] = int(cells["vp"] or 1)
    facts["sent_once"] = cells["dispatcher"] != "alltoall" and not cells["source"].startswith("dgxc")
    facts["exchange_hidden"] = HIDDEN * (cells["overlap"] == "True")
    facts["balanced"] = cells["routing"] != "real"
    facts["again"] = sum(AGAIN[m] for m in cells["recompute"].split(",") if m in AGAIN)
    for name in ("scanned", "attention_layers"):
        if name in model:
            facts[name] = model[name] / blocks
    facts["latent"] = model.get("latent", 0)
    facts["layers"] = tuple((o, i, n / blocks) for o, i, n in model.get("matrices", ()))
    return facts


def _seconds(cells, model):
    if cells["seconds_per_step"]:
        return float(cells["seconds_per_step"])
    tokens = float(cells["tokens_per_s_per_gpu"] or 0)
    if not tokens:
        tokens = float(cells["tflops_per_gpu"]) / model["tflop_per_token"]
    return int(cells["gbs"]) * int(cells["seq"]) / (tokens * int(cells["gpus"]))


def errors(rows, values):
    found = source_accuracy.predict(rows, values, seconds_only=True)
    return [math.log(found[r.id].seconds / r.seconds) for r in rows]


def recipes(rows):
    """One row of those of each recipe, which versions of the program repeat: the one with the
    median time.
    """
    groups = {}
    for row in rows:
        key = row.source, row.section, row.machine, row.layout, row.training, row.facts["fp8"]
        groups.setdefault((*key, row.facts["graphs"], row.facts["again"]), []).append(row)
    found = []
    for group in groups.values():
        found.append(sorted(group, key=lambda row: row.seconds)[len(group) // 2])
    return found


def fit(rows, start, rounds=5):
    own = recipes(rows)

    def with_priors(values):
        expected = [PULL * math.log(values[name] / start[name]) for name in FITTED]
        return errors(own, values) + expected

    values = start
    for _ in range(rounds):
        step = solve(*slopes(with_priors, FITTED, values))
        values = moved(values, FITTED, [max(-0.7, min(0.7, part)) for part in step])
    return values


def main():
    rows, aside = read()
    values = {c.name: c.value for c in engines.constants()}
    for model in dict.fromkeys(r.source for r in rows):
        mine = [r for r in rows if r.source == model]
        fitted = fit([r for r in rows if r.source != model], values)
        off = errors(mine, fitted)
        print(model, len(mine), 'mean', statistics.mean(abs(math.exp(e) - 1) for e in off), {n: round(fitted[n], 3) for n in FITTED[:-1]}, fitted[FITTED[-1]])
        if len(sys.argv) > 1:
            for r, e in zip(mine, off):
                f = r.facts
                print('  ', r.id, r.section[:18], r.machine[-12:], r.layout.tp, r.layout.pp, r.layout.ep, 'vp', f['virtual_stages'], 'mbs', r.layout.micro_batch_size, 'fp8' if f['fp8'] else 'bf16', f['graphs'], r.layout.recompute, round(r.seconds, 2), f"{100*(math.exp(e)-1):+.0f}")


if __name__ == "__main__":
    with sentences():
        main()
