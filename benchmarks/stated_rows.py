"""Measured rows of any machine and engine, read as stated: docs/planning.md has the columns.

    found = read("benchmarks/data/public/aleph.csv")

A value that is not understood is an error with its row and column, never a default. A row that uses
what the planner cannot say (fp8, context parallelism) is set aside because of that column, before
any prediction, and counted; so is one whose time another row of its file contradicts.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import published_rows

from config.command_line import read_toml
from config.messages import UserError, nearest
from config.schema import SCHEDULES, Layout, ModelShape, Training
from planner import hardware

ENGINES = Path(__file__).parent / "data" / "engines.toml"
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
YES_NO = {"True": True, "true": True, "False": False, "false": False}
RECOMPUTE = published_rows.RECOMPUTATION
STATUS = {"ok": "ok", "oom": "OOM", "crashed/oom": "OOM", "hang": "failed", "fail": "failed"}
PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "adamw8bit": "adamw8bit", "sgd": "sgd"}
# What a memory figure counts: everything, what the allocator holds, or tensors alone.
MEMORY_KINDS = ("", "nvidia-smi", "reserved", "allocated")
# Attention kernels as sources write them, and as `Software.attention` has them.
KERNELS = {
    "torch": "math",
    "fused": "fused",
    "flash_attentionv1.0.8": "flash1",
    "flash_attention2": "flash2",
    "flash_attention2 + RMS kernel": "flash2",
}
# What a row used beyond the columns: software facts, or None: the planner cannot say it.
USED: dict[str, dict[str, Any] | None] = {
    "fp8": None,
    "float8": None,
    "context parallel 2": None,
    "context parallel 4": None,
    "context parallel 8": None,
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


# A row that took longer than another one of its file allows by more than this factor is set aside.
# Of the files but the playbook's, 513 rows, none is above 1.09.
CONTRADICTED = 1.1


@dataclass(frozen=True)
class StatedRow:
    """A row as a question for the planner, and the answer that was measured."""

    id: str
    source: str  # the file it is from
    section: str
    kernel: str  # as the row writes it; empty if it does not
    model: ModelShape
    layout: Layout
    training: Training
    machine: str
    facts: dict[str, Any]  # fields of Software that this engine and row set
    seconds: float | None
    gigabytes: float | None  # of 1e9 bytes
    memory_kind: str
    memory_of: str  # first: of the first stage's GPU; empty: of the fullest one
    memory_ahead: float  # gigabytes in the figure that are free as soon as memory is short
    status: str
    ambiguous: bool  # the status stands for any crash
    assumed: bool  # the source does not state the layout
    aside: str  # why it is not compared; empty if it is

    @property
    def table(self) -> tuple:
        """What rows share among which a layout is chosen."""
        kept = self.layout.recompute, self.layout.sequence_parallel if "SP" in self.section else ""
        shape = self.model.layers, self.model.hidden, self.model.seq_length
        gpus = self.layout.tp * self.layout.pp * self.layout.dp
        zero = min(1, self.layout.zero) if self.source == "ultrascale" else ""
        batch = self.training.global_batch_size
        return (self.section, self.machine, self.kernel, kept, zero, shape, gpus, batch)

    @property
    def samples_in_flight(self) -> int:
        """Samples whose activations the first stage holds at once, in 1F1B."""
        return self.layout.micro_batch_size * min(self.count, self.layout.pp)

    @property
    def count(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.training.global_batch_size // (self.layout.micro_batch_size * self.layout.dp)

    @property
    def split(self) -> tuple:
        """What rows share that divide a model in the same way, but for dp and micro-batch."""
        layout = replace(self.layout, dp=1, micro_batch_size=1, partition="")
        return self.machine, self.kernel, layout

    def holds_no_more_than(self, other: "StatedRow") -> bool:
        """Whether a rank needs no more memory than one of a row with the same `split`: in no fewer
        replicas, which share the optimizer's state, with no larger micro-batches, no more samples
        in flight, and a model that is no larger in any of its sizes.
        """
        sizes, others = _sizes(self.model), _sizes(other.model)
        return (
            self.layout.dp >= other.layout.dp
            and self.layout.micro_batch_size <= other.layout.micro_batch_size
            and self.samples_in_flight <= other.samples_in_flight
            and all(own <= its for own, its in zip(sizes, others, strict=True))
        )

    def on(self, machine: hardware.Machine) -> hardware.Machine:
        """The machine with this row's engine."""
        return replace(machine, software=replace(machine.software, **self.facts))


def read(path: str) -> list[StatedRow]:
    """The rows of a CSV file; UserError naming row and column where a value is not understood."""
    engines = read_toml(ENGINES, "engines.toml")
    rows = [_row(r, Path(path).stem, engines) for r in published_rows.read(path)]
    return _without_contradicted(_without_crashes(rows))


def _sizes(model: ModelShape) -> tuple[int, ...]:
    widths = model.hidden, model.qkv_width, model.attention_width, model.ffn_hidden
    return (model.layers, model.seq_length, model.vocab_size, *widths)


def _without_crashes(rows: list[StatedRow]) -> list[StatedRow]:
    """The rows, less those labelled out of memory of which another row that ran held as much or
    more. Of rows whose label stands for every crash alone.
    """
    ran: dict[tuple, list[StatedRow]] = {}
    for row in rows:
        if row.status == "ok":
            ran.setdefault(row.split, []).append(row)
    return [
        replace(row, status="failed")
        if row.ambiguous and any(row.holds_no_more_than(other) for other in ran.get(row.split, ()))
        else row
        for row in rows
    ]


def _without_contradicted(rows: list[StatedRow]) -> list[StatedRow]:
    """The rows; set aside are those whose time another one contradicts that differs in dp and
    micro-batch size alone: a row whose micro-batches are no larger takes no longer than the other,
    or by the ratio of their numbers of micro-batches if it has more. Only measured times count.
    """
    alike: dict[tuple, list[StatedRow]] = {}
    for row in rows:
        if row.status == "ok" and row.seconds and not row.aside:
            key = row.split, row.model, row.training, str(sorted(row.facts.items()))
            alike.setdefault(key, []).append(row)
    wrong: dict[str, str] = {}
    for group in alike.values():
        for row, other in itertools.permutations(group, 2):
            if row.layout.micro_batch_size > other.layout.micro_batch_size:
                continue
            most = max(1.0, row.count / other.count) * other.seconds
            if row.seconds > CONTRADICTED * most:
                wrong[row.id] = f"contradicted by {other.id}"
    return [replace(row, aside=wrong[row.id]) if row.id in wrong else row for row in rows]


def is_stated(path: str) -> bool:
    """Whether the file names each row's machine: the older tables do not."""
    return "machine" in published_rows.read(path)[0]


def _row(row: dict[str, str], source: str, engines: dict[str, dict]) -> StatedRow:
    gpus, tp, pp = (_whole(row, name) for name in ("gpus", "tp", "pp"))
    dp = _whole(row, "dp_clean" if row["dp_clean"] else "dp")
    if tp * pp * dp != gpus:
        raise _error(row, "dp", f"tp({tp}) * pp({pp}) * dp({dp}) is not {gpus} GPUs")
    engine, model = engines[_engine(row, engines)], _shape(row)
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch_size=_whole(row, "mbs"),
        recompute=_one_of(row, "recompute", RECOMPUTE),
        partition=row["partition"] or _partition(engine, model, pp),
        zero=_one_of(row, "zero_stage", {str(stage): stage for stage in range(4)}),
        sequence_parallel=_one_of(row, "sequence_parallel", YES_NO),
        schedule=_one_of(row, "schedule", {"": "1f1b"} | {name: name for name in SCHEDULES}),
    )
    facts, aside = _facts(row, engines)
    training = _training(row)
    seconds = row["sec_clean"] or row["sec_per_it"]
    observed = engine.get("memory", {})  # what the engine's program prints, over a file's guess
    kind = observed.get("kind") or row["mem_kind"].rstrip("?").replace(" GiB", "")
    if kind not in MEMORY_KINDS:
        raise _error(row, "mem_kind", f"is none of {', '.join(MEMORY_KINDS[1:])}")
    unit = 2**30 / 1e9 if "GiB" in row["mem_kind"] else 1.0
    status = _one_of(row, "status", STATUS, lower=True)
    return StatedRow(
        id=row["row_id"],
        source=source,
        section=row["section"],
        kernel=row["note"].removeprefix("kernel=") if row["note"].startswith("kernel=") else "",
        model=model,
        layout=layout,
        training=training,
        machine=_machine(row, engines),
        facts=facts,
        seconds=_number(row, "sec_per_it", seconds) if seconds else None,
        gigabytes=unit * _number(row, "mem_gb", row["mem_gb"]) if row["mem_gb"] else None,
        memory_kind=kind,
        memory_of=observed.get("stage", ""),
        memory_ahead=_ahead(observed, model, layout, training),
        ambiguous=row["status"] == "crashed/oom",
        assumed=row["quality"] == "layout assumed",
        status="failed" if status == "OOM" and _refused(row, engine, layout) else status,
        aside=aside,
    )


def _partition(engine: dict[str, Any], model: ModelShape, pp: int) -> str:
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


def _ahead(observed: dict, model: ModelShape, layout: Layout, training: Training) -> float:
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


def _refused(row: dict[str, str], engine: dict[str, Any], layout: Layout) -> bool:
    """Whether the engine ends with another error than of memory: too few micro-batches."""
    count = _whole(row, "gbs") // (layout.micro_batch_size * layout.dp)
    return engine.get("needs_full_pipeline", False) and count < layout.pp - 1


def _machine(row: dict[str, str], engines: dict[str, dict]) -> str:
    """The row's machine, or that of its engine's cluster with the same GPU."""
    name = _one_of(row, "machine", {name: name for name in hardware.names()})
    return engines[_engine(row, engines)].get("machines", {}).get(name, name)


def _engine(row: dict[str, str], engines: dict[str, dict]) -> str:
    engine = row.get("engine") or PREFIXES.get(row["row_id"].split("-")[0], "trine")
    if engine not in engines:
        raise _error(row, "engine", f"is {engine!r}, not one of {', '.join(engines)}")
    return engine


def _facts(row: dict[str, str], engines: dict[str, dict]) -> tuple[dict[str, Any], str]:
    """Software of the row's engine, over it what the row states; and why the row is set aside."""
    engine = engines[_engine(row, engines)]
    facts = engine.get("software", {}) | engine.get(row["machine"].split("-")[0], {})
    facts |= engine.get(f"zero-{row['zero_stage']}", {})
    chunks = _whole(row, "chunks")
    if chunks > 1:
        facts["virtual_stages"] = chunks
    if row["note"].startswith("kernel="):
        kernel = row["note"].removeprefix("kernel=")
        if kernel not in KERNELS:
            raise _error(row, "note", f"has the kernel {kernel!r}, not one of {', '.join(KERNELS)}")
        facts |= {"attention": KERNELS[kernel], "fused_norms": "RMS" in kernel}
    aside = ""
    for name in filter(None, (part.strip() for part in row["inexpressible"].split(";"))):
        if name not in USED:
            raise _error(row, "inexpressible", f"has {name!r}; known: {', '.join(USED)}")
        found = USED[name]
        aside = aside or (name if found is None else "")
        facts |= found or {}
    if " PURE" in row["note"]:  # llm-foundry: gradients are reduced in half precision
        facts["wire_bytes"] = 2
    return facts | _stated_software(row), aside


def _stated_software(row: dict[str, str]) -> dict[str, Any]:
    """The column `software`: key=value, key=value, with the names of `Software`."""
    types: dict[str, Callable] = {f.name: type(f.default) for f in fields(hardware.Software)}
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in row["software"].split(","))):
        name, _, value = part.partition("=")
        if name == "attention" and row["note"].startswith("kernel="):
            continue  # the kernel says more
        if name not in types:
            hint = nearest(name, list(types)) or f"; known: {', '.join(types)}"
            raise _error(row, "software", f"has {name!r}{hint}")
        try:
            found[name] = YES_NO[value] if types[name] is bool else types[name](value)
        except (KeyError, ValueError):
            raise _error(row, "software", f"has {part!r}") from None
    return found


def _shape(row: dict[str, str]) -> ModelShape:
    return ModelShape(
        _whole(row, "layers"),
        _whole(row, "hidden"),
        _whole(row, "heads"),
        kv_heads=_whole(row, "kv_heads") if row["kv_heads"] else None,
        ffn_hidden=_whole(row, "ffn") if row["ffn"] else None,
        seq_length=_whole(row, "seq"),
        vocab_size=_whole(row, "vocab"),
        activation=_one_of(row, "activation", {n: n for n in ("gelu", "gelu_tanh", "swiglu")}),
        norm=_one_of(row, "norm", {n: n for n in ("layernorm", "rmsnorm")}),
        positions=_one_of(row, "positions", {n: n for n in ("learned", "alibi", "rotary")}),
        bias=_one_of(row, "bias", YES_NO),
        tied=_one_of(row, "tied", YES_NO),
    )


def _training(row: dict[str, str]) -> Training:
    return Training(
        global_batch_size=_whole(row, "gbs_clean" if row["gbs_clean"] else "gbs"),
        precision=_one_of(row, "precision", {name: name for name in PRECISIONS}),
        optimizer=_one_of(row, "optimizer", OPTIMIZERS),
    )


def _one_of(row: dict[str, str], column: str, known: dict[str, Any], lower: bool = False) -> Any:
    value = row.get(column) or ""
    value = value.lower() if lower or column == "recompute" else value
    if value not in known:
        raise _error(row, column, f"is {value!r}, not one of {', '.join(map(str, known))}")
    return known[value]


def _whole(row: dict[str, str], column: str) -> int:
    number = _number(row, column, row.get(column) or "")
    if number != int(number) or number < 1:
        raise _error(row, column, f"is {row[column]!r}, not a whole number above 0")
    return int(number)


def _number(row: dict[str, str], column: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise _error(row, column, f"is {value!r}, not a number")
    return number


def _error(row: dict[str, str], column: str, text: str) -> UserError:
    return UserError(f"row {row['row_id']}, column {column}: {text}")
