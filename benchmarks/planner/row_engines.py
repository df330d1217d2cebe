"""Facts of a row's training program that its columns lack: from engines.toml, and from the
row's own `software`, `inexpressible` and `note`.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from architecture.shape import ModelShape
from base.errors import nearest
from benchmarks.planner.published_rows import KERNEL, YES_NO
from benchmarks.planner.row_table import Cells
from config.schema import Layout, Training
from tools.planner.engines import ProgramSoftware

# The engine of rows that have no column `engine`, by the letters that their names begin with.
PREFIXES = {
    "AA": "aleph",
    "DG": "nemo-2025",
    "FM": "fms-fsdp",
    "MF": "llm-foundry",
    "NL": "nemo-2023",
    "TT": "torchtitan",
    "UP": "nanotron",
}
# Attention kernels as sources write them, and as `ProgramSoftware.attention` has them.
KERNELS = {
    "torch": "math",
    "fused": "fused",
    "flash_attentionv1.0.8": "flash1",
    "flash_attention2": "flash2",
    "flash_attention2 + RMS kernel": "flash2",
}
# Software facts of a row beyond its columns.
USED: dict[str, dict[str, Any]] = {
    "fp8": {"fp8": True},
    "float8": {"fp8": True},
    "torch.compile": {"fused_norms": True, "fused_elementwise": True},
    "async TP": {"overlap_tensor": 0.4},
    "HSDP": {},
    "interleaving": {},
    "zero 3 with tp": {},
    "zero 3 with tp and pp": {},
    "selective op AC": {"keeps_products": True},
    "per op SAC": {"keeps_products": True},
    "selective layer AC": {"recompute_share": 0.5},
    "selective AC (share of blocks not stated)": {"recompute_share": 0.5},
}


def engine_of(cells: Cells, engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The table of a row's engine."""
    name = cells.text("engine") or PREFIXES.get(cells.row["row_id"].split("-")[0], "trine")
    if name not in engines:
        cells.wrong("engine", f"is {name!r}, not one of {', '.join(engines)}")
    return engines.get(name, {})


def facts(cells: Cells, engine: dict[str, Any], machine: str) -> dict[str, Any]:
    """Software of the row's engine on that machine, over it what the row states."""
    gpu = Path(machine).stem.split("-")[0]
    found = engine.get("software", {}) | engine.get(gpu, {})
    found |= engine.get(f"zero-{cells.text('zero_stage')}", {})
    chunks = cells.whole("chunks")
    if chunks > 1:
        found["virtual_stages"] = chunks
    kernel = cells.text("note").removeprefix(KERNEL)
    if cells.text("note").startswith(KERNEL):
        if kernel not in KERNELS:
            cells.wrong("note", f"has the kernel {kernel!r}, not one of {', '.join(KERNELS)}")
        found |= {"attention": KERNELS.get(kernel), "fused_norms": "RMS" in kernel}
    for name in _parts(cells.text("inexpressible"), ";"):
        if name.startswith("context parallel"):
            cells.wrong("inexpressible", f"has {name!r}: its ranks go into the column cp")
        elif name not in USED:
            cells.wrong("inexpressible", f"has {name!r}; known: {', '.join(USED)}")
        found |= USED.get(name, {})
    if cells.text("fp8") and cells.one_of("fp8", YES_NO, otherwise=False):
        found["fp8"] = True
    if " PURE" in cells.text("note"):  # llm-foundry: gradients are reduced in half precision
        found["wire_bytes"] = 2
    return found | _stated_software(cells)


def _stated_software(cells: Cells) -> dict[str, Any]:
    """The column `software`: key=value, key=value, with the names of `ProgramSoftware`."""
    types: dict[str, Callable] = {f.name: type(f.default) for f in fields(ProgramSoftware)}
    found: dict[str, Any] = {}
    for part in _parts(cells.text("software"), ","):
        name, _, value = part.partition("=")
        if name == "attention" and cells.text("note").startswith(KERNEL):
            continue  # the kernel says more
        if name not in types:
            hint = nearest(name, list(types)) or f"; known: {', '.join(types)}"
            cells.wrong("software", f"has {name!r}{hint}")
            continue
        try:
            found[name] = YES_NO[value] if types[name] is bool else types[name](value)
        except (KeyError, ValueError):
            cells.wrong("software", f"has {part!r}")
    return found


def _parts(text: str, separator: str) -> list[str]:
    """The parts of a text that are not empty, without spaces around them."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def partition(engine: dict[str, Any], model: ModelShape, pp: int) -> str:
    """The blocks of each stage as `--partition` has them."""
    if engine.get("partition") == "by products":
        return ",".join(map(str, _by_products(model, pp)))
    return engine.get("partition") or ("layers" if model.layers % pp == 0 else "balanced")


def _by_products(model: ModelShape, pp: int) -> list[int]:
    """nanotron's rule: a stage is full with the block at which the products of all blocks up to
    there reach its share of them and of the output matrix. Later stages may have no block.
    """
    block = 4 * model.hidden**2 + 3 * model.hidden * model.ffn_hidden
    whole = model.layers * block + model.vocab_size * model.hidden
    counts, stage, sum_ = [0] * pp, 0, 0
    for _ in range(model.layers):
        counts[stage], sum_ = counts[stage] + 1, sum_ + block
        stage += stage < pp - 1 and sum_ >= whole * (stage + 1) / pp
    return counts


def memory_ahead(
    observed: dict[str, Any], model: ModelShape, layout: Layout, training: Training
) -> float:
    """Gigabytes of whole activations that tensor ranks have passed to collectives which did not
    run yet: the host is ahead of a GPU that waits for no other stage. Of a step with a single
    micro-batch those of a forward, two a block: what a backward passes takes what it frees.
    """
    if layout.tp == 1 or layout.pp > 1:
        return 0.0
    most = observed.get("ahead", 0)
    if training.global_batch_size == layout.micro_batch_size * layout.dp:
        most = min(most, 2 * model.layers)
    return 2e-9 * most * model.seq_length * layout.micro_batch_size * model.hidden
