"""Measured rows of any machine and engine, read as stated; benchmarks/data/README.md has the
columns.

    found = read("benchmarks/data/public/aleph.csv")

A value that is not understood is an error with its line and column, never a default. A row that its
source calls invalid, with the reason, is set aside and counted.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from architecture.shape import ModelShape
from base.errors import UserError
from benchmarks.planner import published_rows, row_engines
from benchmarks.planner.published_rows import RECOMPUTATION, YES_NO
from benchmarks.planner.row_table import Cells, RowTable
from config.schema import SCHEDULES, Layout, Training
from costs import hardware
from tools.planner import engines

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "adamw8bit": "adamw8bit", "sgd": "sgd"}
ACTIVATIONS = {name: name for name in ("gelu", "gelu_tanh", "swiglu")}
NORMS = {name: name for name in ("layernorm", "rmsnorm")}
POSITIONS = {name: name for name in ("learned", "alibi", "rotary")}
SCHEDULE = {"": "1f1b"} | {name: name for name in SCHEDULES}
# A memory figure may count everything, the allocator's memory, or tensors alone.
MEMORY_KINDS = ("", "nvidia-smi", "reserved", "allocated")

INVALID = "invalid: "  # how the column `quality` begins that says why a row is set aside


@dataclass(frozen=True)
class StatedRow:
    """A row as a question for the planner, and the answer that was measured."""

    id: str
    source: str  # the file it is from
    section: str
    kernel: str  # the row's own word; empty if it has none
    model: ModelShape
    layout: Layout
    training: Training
    machine: str
    facts: dict[str, Any]  # fields of Engine that this engine and row set
    seconds: float | None
    gigabytes: float | None  # 1e9 bytes each
    memory_kind: str
    memory_of: str  # first: of the first stage's GPU; ends: of the first or last; empty: of any
    memory_ahead: float  # gigabytes in the figure that are free as soon as memory is short
    status: str
    assumed: bool  # the source does not state the layout
    aside: str  # why it is not compared; empty if it is

    @property
    def table(self) -> tuple:
        """Return the facts that all rows share among which a layout is chosen."""
        kept = self.layout.recompute, self.layout.sequence_parallel if "SP" in self.section else ""
        shape = self.model.layers, self.model.hidden, self.model.seq_length
        gpus = self.layout.tp * self.layout.pp * self.layout.dp * self.layout.cp
        zero = min(1, self.layout.zero) if self.source == "ultrascale" else ""
        batch = self.training.global_batch_size
        return (self.section, self.machine, self.kernel, kept, zero, shape, gpus, batch)

    def on(
        self, machine: hardware.Machine, values: dict[str, float] | None = None
    ) -> hardware.Machine:
        """The machine with this row's engine, whose fitted constants have these values."""
        return engines.on(machine, self.facts, values)


class Reading(NamedTuple):
    """The rows of a file that could be read, and the table that they are from."""

    rows: list[StatedRow]
    table: RowTable


def read(path: str) -> list[StatedRow]:
    """The rows of a CSV file; UserError that lists all of its mistakes, if it has any."""
    found = read_sound(path)
    found.table.refuse_mistakes()
    return found.rows


def read_sound(path: str) -> Reading:
    """The rows of a CSV file that have no mistake, and the mistakes of the others.

    Raises UserError if it cannot be read, or has other columns.
    """
    table = published_rows.read_table(path)
    reader, rows = RowReader(Path(path)), []
    for row in table.rows:
        cells = Cells(row)
        stated = reader.read(cells)
        if not cells.mistakes:
            rows.append(stated)
        table.mistakes.extend(cells.mistakes)
    table.mistakes[:] = dict.fromkeys(table.mistakes)  # numbers were read twice
    sound = {row["row_id"] for row in table.sound()}
    rows = [row for row in rows if row.id in sound]
    return Reading(rows, table)


def is_stated(path: str) -> bool:
    """Whether the file names each row's machine: the older tables do not."""
    return "machine" in published_rows.read_table(path).columns


class RowReader:
    """Reads the rows of one file. Paths of machine files in it start from its folder."""

    def __init__(self, path: Path):
        self.path = path
        self.engines = engines.programs()
        self.machines: dict[str, hardware.Machine | str] = {}  # or why there is none

    def read(self, cells: Cells) -> StatedRow:
        """The row; of no use if `cells` has noted mistakes."""
        engine = row_engines.engine_of(cells, self.engines)
        model, training = _shape(cells), _training(cells)
        layout, gpus = _layout(cells, engine, model), cells.whole("gpus")
        if not cells.mistakes:
            _check_sizes(cells, gpus, layout, training)
        machine = self._machine(cells, engine)
        facts = row_engines.facts(cells, engine, machine)
        if facts.get("fp8") and not self._has_fp8(machine):
            cells.wrong("fp8", f"{machine} has no fp8 arithmetic")
        observed = engine.get("memory", {})  # printed by the engine: it overrides guesses
        status, quality = cells.one_of("status", published_rows.STATUS), cells.text("quality")
        note = cells.text("note")
        has_kernel = note.startswith(published_rows.KERNEL)
        seconds = _seconds(cells)
        gigabytes, kind = _memory(cells, observed.get("kind", ""))
        if status == "ok" and seconds is None and gigabytes is None:
            cells.wrong("sec_per_it", "is empty, as is mem_gb, of a run whose status is ok")
        return StatedRow(
            id=cells.row["row_id"],
            source=self.path.stem,
            section=cells.text("section"),
            kernel=note.removeprefix(published_rows.KERNEL) if has_kernel else "",
            model=model,
            layout=layout,
            training=training,
            machine=machine,
            facts=facts,
            seconds=seconds,
            gigabytes=gigabytes,
            memory_kind=kind,
            memory_of=observed.get("stage", ""),
            memory_ahead=row_engines.memory_ahead(observed, model, layout, training),
            assumed=quality == "layout assumed",
            status=status,
            aside=quality.removeprefix(INVALID) if quality.startswith(INVALID) else "",
        )

    def _machine(self, cells: Cells, engine: dict[str, Any]) -> str:
        """The row's machine, a file of hardware/ or a path of one's own, or the machine of its
        engine's cluster with the same GPU.
        """
        name = cells.text("machine")
        if name.endswith(".toml"):
            name = str(self.path.parent / name)
        elif name not in hardware.names():
            known = ", ".join(hardware.names())
            cells.wrong(
                "machine", f"is {name!r}, no file that ends in .toml and not one of {known}"
            )
            return name
        name = engine.get("machines", {}).get(name, name)
        problem = self._loaded(name)
        if isinstance(problem, str):
            cells.wrong("machine", problem)
        return name

    def _loaded(self, name: str) -> "hardware.Machine | str":
        """The machine of that name, or why there is none."""
        if name not in self.machines:
            try:
                self.machines[name] = hardware.load(name)
            except UserError as error:
                self.machines[name] = str(error)
        return self.machines[name]

    def _has_fp8(self, name: str) -> bool:
        """Whether that machine has fp8 arithmetic; also True of one that is unknown."""
        machine = self.machines.get(name)
        return not isinstance(machine, hardware.Machine) or machine.fp8 > 0


def _layout(cells: Cells, engine: dict[str, Any], model: ModelShape) -> Layout:
    pp = cells.whole("pp")
    stated = Layout(
        tp=cells.whole("tp"),
        pp=pp,
        cp=cells.whole("cp", empty=1),
        dp=cells.whole("dp_clean" if cells.text("dp_clean") else "dp"),
        micro_batch_size=cells.whole("mbs"),
        recompute=cells.one_of("recompute", RECOMPUTATION),
        partition=cells.text("partition") or row_engines.partition(engine, model, pp),
        zero=cells.one_of("zero_stage", published_rows.ZERO),
        sequence_parallel=cells.one_of("sequence_parallel", YES_NO),
        schedule=cells.one_of("schedule", SCHEDULE),
    )
    does = engine.get("layout", {}) | (engine.get("layout-with-pp", {}) if pp > 1 else {})
    return replace(stated, **does)


def _check_sizes(cells: Cells, gpus: int, layout: Layout, training: Training) -> None:
    """Note a layout that does not make the GPUs, and a batch that it does not divide."""
    tp, pp, cp, dp = layout.tp, layout.pp, layout.cp, layout.dp
    if tp * pp * dp * cp != gpus:
        product = f"tp({tp}) * pp({pp}) * dp({dp})" + f" * cp({cp})" * (cp > 1)
        hint = f"; dp {gpus // (tp * pp * cp)} fits" if gpus % (tp * pp * cp) == 0 else ""
        cells.wrong("dp", f"{product} is not {gpus} GPUs{hint}")
        return
    batch, micro = training.global_batch_size, layout.micro_batch_size
    if batch % (micro * dp):
        cells.wrong("gbs", f"is {batch}, not a multiple of mbs({micro}) * dp({dp})")


def _seconds(cells: Cells) -> float | None:
    """Seconds of a step, corrected ones if there are any."""
    column = "sec_clean" if cells.text("sec_clean") else "sec_per_it"
    return cells.number(column) if cells.text(column) else None


def _memory(cells: Cells, observed: str) -> tuple[float | None, str]:
    """Gigabytes of the figure, and what it counts: as `observed` of the engine, else as stated."""
    stated = cells.text("mem_kind").rstrip("?")
    kind = observed or stated.replace(" GiB", "")
    if kind not in MEMORY_KINDS:
        cells.wrong("mem_kind", f"is {stated!r}, none of {', '.join(MEMORY_KINDS[1:])}")
    if not cells.text("mem_gb"):
        return None, kind
    unit = 2**30 / 1e9 if "GiB" in stated else 1.0
    return unit * cells.number("mem_gb"), kind


def _shape(cells: Cells) -> ModelShape:
    heads = cells.whole("heads")
    return ModelShape(
        cells.whole("layers"),
        cells.whole("hidden"),
        heads,
        kv_heads=cells.whole("kv_heads", empty=heads),
        ffn_hidden=cells.whole("ffn") if cells.text("ffn") else None,
        seq_length=cells.whole("seq"),
        vocab_size=cells.whole("vocab"),
        activation=cells.one_of("activation", ACTIVATIONS),
        norm=cells.one_of("norm", NORMS),
        positions=cells.one_of("positions", POSITIONS),
        bias=cells.one_of("bias", YES_NO),
        tied=cells.one_of("tied", YES_NO),
    )


def _training(cells: Cells) -> Training:
    return Training(
        global_batch_size=cells.whole("gbs_clean" if cells.text("gbs_clean") else "gbs"),
        precision=cells.one_of("precision", published_rows.PRECISIONS),
        optimizer=cells.one_of("optimizer", OPTIMIZERS),
    )
