"""Measured rows: what was printed, as a model, a layout and a machine; and which rows cannot be.

A row is a line of a CSV file in the columns of `benchmarks/data/measured_rows.csv`. `cases` turns
rows into what `predict` takes, and `check` finds rows that contradict themselves or each other.
"""

import csv
import re
from dataclasses import dataclass, replace

from config.messages import UserError
from config.model_stats import FORMULAS, block_parameters, hardware_flops, model_flops, parameters
from config.schema import Layout, ModelShape, Training
from planner.hardware import Machine, names

# fmt: off
COLUMNS = (
    "row_id", "section", "gpu", "gpus", "size_b", "layers", "hidden", "heads", "ffn", "seq",
    "vocab", "dp", "tp", "pp", "mbs", "gbs", "zero_stage", "recompute", "precision", "optimizer",
    "status", "mem_gb", "sec_per_it", "tflops", "dp_clean", "gbs_clean", "sec_clean",
    "sec_derived", "formula", "dup_of", "quality", "note",
)
# fmt: on
# Columns that rows may have beside these: what tune.py varies and the notes did not.
OPTIONAL = ("kv_heads", "activation", "sequence_parallel", "schedule", "partition")
SHAPE = ("layers", "hidden", "heads", "vocab", "seq", "tp", "pp", "gpus")

# Interleaved chunks per stage that the source states elsewhere: (layers, pp) of Megatron's tables
# in examples/sc21/run_table_1.sh and arXiv 2205.05198. The H100 table does not: 4 is assumed.
INTERLEAVED = {(60, 4): 3, (80, 8): 2, (96, 8): 3, (96, 16): 2, (105, 35): 3}
RECOMPUTED = {"true": "full", "full": "full", "selective": "selective"}
REPAIRED, FP32_GRADIENTS, BLOCKING = "02-25", "02-28", "02-20"  # dates of 2022 on Jean Zay


@dataclass(frozen=True)
class Case:
    """A row as a question for the planner, and the answer that was measured."""

    id: str
    section: str
    model: ModelShape
    layout: Layout
    training: Training
    machine: str
    blocking: bool  # CUDA_LAUNCH_BLOCKING=1
    chunks: int
    seconds: float | None
    gigabytes: float | None
    status: str
    duplicate: bool
    invalid: bool  # marked so by whoever collected the rows

    @property
    def source(self) -> str:
        """The seed, or the table, that the row comes from."""
        return self.id.split("-")[0]

    def on(self, machine: Machine) -> Machine:
        """The machine with this row's software settings."""
        software = replace(machine.software, virtual_stages=self.chunks)
        if not self.blocking:
            software = replace(software, host_per_block=0.0)
        return replace(machine, software=software)


def read(path: str) -> list[dict[str, str]]:
    """The rows of a CSV file; UserError if it has not the columns."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file: {error}") from None
    if not rows:
        raise UserError(f"{path} has no rows")
    missing = [name for name in COLUMNS if rows[0].get(name) is None]
    if missing:
        raise UserError(f"{path} has {len(rows)} rows and lacks the columns {', '.join(missing)}")
    return rows


def read_tables(path: str) -> dict[str, list[str]]:
    """Row names by decision table."""
    found: dict[str, list[str]] = {}
    try:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                found.setdefault(row["table"], []).append(row["row_id"])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except KeyError as error:
        raise UserError(f"{path} lacks the column {error.args[0]}") from None
    return found


def cases(rows: list[dict[str, str]], machine: str | None = None) -> list[Case]:
    """The rows that name a whole model and layout; `machine` overrides what rows say."""
    usable = [row for row in rows if all(row[key] for key in SHAPE) and _gbs(row)]
    return [_case(_mended(row, usable), machine) for row in usable]


def _mended(row: dict[str, str], rows: list[dict[str, str]]) -> dict[str, str]:
    """The second of two rows of one configuration, where the note says that it was MBS 1."""
    if "suggests the second is MBS=1" not in row["quality"]:
        return row
    twins = [r for r in rows if r["quality"] == row["quality"]]
    return row if row is twins[0] else row | {"mbs": "1"}


def _case(row: dict[str, str], machine: str | None) -> Case:
    date = _date(row)
    dp, micro = _integer(row, "dp_clean", "dp"), _integer(row, "mbs") or 1
    tp, pp, layers = _integer(row, "tp"), _integer(row, "pp"), _integer(row, "layers")
    note = row["quality"] + " " + row["note"]
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp or _integer(row, "gpus") // (tp * pp),
        micro_batch_size=micro,
        recompute=RECOMPUTED.get(row["recompute"].lower(), "none"),
        partition=row.get("partition") or _partition(layers, pp),
        zero=min(1, int(row["zero_stage"] or 1)),
        sequence_parallel=_sequence_parallel(row, tp),
        schedule=row.get("schedule") or "1f1b",
    )
    megatron, seconds = "Megatron" in row["section"], row["sec_clean"] or row["sec_derived"]
    return Case(
        id=row["row_id"],
        section=row["section"],
        model=shape(row),
        layout=layout,
        training=_training(row),
        machine=machine or _machine(row, date),
        blocking="async=no" in note or ("async=yes" not in note and not "" < date < BLOCKING),
        chunks=_chunks(layers, pp, row) if megatron else 1,
        seconds=float(seconds) if seconds else None,
        gigabytes=float(row["mem_gb"]) if row["mem_gb"] else None,
        status=row["status"],
        duplicate=bool(row["dup_of"]),
        invalid="invalid" in row["quality"] or "do not use" in row["quality"],
    )


def _partition(layers: int, pp: int) -> str:
    return "blocks" if layers % pp and (layers + 2) % pp == 0 else "layers"


def _sequence_parallel(row: dict[str, str], tp: int) -> bool:
    """As the row says; where it says nothing, what the source is known to have used."""
    said = row.get("sequence_parallel")
    if said:
        return said == "True"
    return tp > 1 and ("H100" in row["gpu"] or row["recompute"] == "selective")


def shape(row: dict[str, str]) -> ModelShape:
    """The model of a row; ALiBi and an embedding norm are what the 250k vocabulary came with."""
    vocab = _integer(row, "vocab")
    return ModelShape(
        _integer(row, "layers"),
        _integer(row, "hidden"),
        _integer(row, "heads"),
        kv_heads=int(row.get("kv_heads") or row["heads"]),
        ffn_hidden=_integer(row, "ffn"),
        activation=row.get("activation") or "gelu_tanh",
        seq_length=_integer(row, "seq"),
        vocab_size=vocab,
        positions="alibi" if vocab > 200000 else "learned",
        embedding_norm=vocab > 200000,
        tied="H100" not in row["gpu"],
    )


def _training(row: dict[str, str]) -> Training:
    return Training(
        global_batch_size=_gbs(row),
        precision=_precision(row),
        optimizer="adamw8bit" if "8bit" in row["optimizer"] else "adamw",
    )


def _precision(row: dict[str, str]) -> str:
    """As the row says, in fp16 if it says nothing."""
    return next((p for p in ("bf16", "fp32", "fp64") if row["precision"].startswith(p)), "fp16")


def _machine(row: dict[str, str], date: str) -> str:
    """Which machine a row was measured on, from its GPU, section and date."""
    gpu = row["gpu"]
    if gpu.startswith("V100"):
        return f"jean-zay-{gpu.lower()}"
    megatron = "Megatron" in row["section"]
    if megatron and gpu.startswith("H100"):
        return "h100-megatron"
    name = gpu.lower().removesuffix("gb")
    if name != "a100-80":
        return name if name in names() else name.split("-")[0]
    if megatron:
        return "selene-2022" if row["recompute"] == "selective" else "selene"
    if "" < date < REPAIRED:
        return "jean-zay-a100-unrepaired"
    late = date == "" or date >= FP32_GRADIENTS
    return "jean-zay-a100-bf16" if late and row["precision"] == "bf16" else "jean-zay-a100"


def _chunks(layers: int, pp: int, row: dict[str, str]) -> int:
    return 4 if pp > 1 and "H100" in row["gpu"] else INTERLEAVED.get((layers, pp), 1)


def _date(row: dict[str, str]) -> str:
    """Month and day of a row of early 2022, or the empty string."""
    found = re.search(r"\b(0[1-9]|1[0-2])-([0-3]\d)\b", row["note"] + " " + row["quality"])
    return found.group(0) if found else ""


def _integer(row: dict[str, str], *keys: str) -> int | None:
    for key in keys:
        if row[key]:
            return int(float(row[key]))
    return None


def _gbs(row: dict[str, str]) -> int | None:
    return _integer(row, "gbs_clean", "gbs")


# ------------------------------------------------------------------------------------------------
# Rows that cannot be
# ------------------------------------------------------------------------------------------------

SAME = ("gpu", "layers", "hidden", "heads", "tp", "pp", "zero_stage", "recompute", "precision")
NOMINAL = {"old-104B": 104.0, "old-1.3B": 1.3}  # tables that print TFLOPs of a nominal size
NEAR = 0.004  # a printed TFLOPs agrees with a formula within this share, or half its last digit


@dataclass(frozen=True)
class Finding:
    """What is wrong with a row, in one sentence with its numbers."""

    row_id: str
    kind: str
    text: str


def check(rows: list[dict[str, str]]) -> list[Finding]:
    """Everything that the printed values of the rows contradict; repaired columns are not read."""
    found = []
    for row in rows:
        if all(row[key] for key in SHAPE):
            for test in (_placement, _rate, _size):
                found += test(row)
        elif row["status"] == "ok" and row["optimizer"]:
            found.append(Finding(row["row_id"], "topology", "no topology or shape: unusable"))
    return found + _mixed(rows) + _repeats(rows) + _slopes(rows) + _spikes(rows)


def _placement(row) -> list[Finding]:
    """tp x pp x dp against the GPUs, and stages against blocks."""
    tp, pp, dp, gpus = (_integer(row, key) for key in ("tp", "pp", "dp", "gpus"))
    found = []
    if dp and tp * pp * dp != gpus:
        text = f"tp({tp}) * pp({pp}) * dp({dp}) = {tp * pp * dp} is not {gpus} GPUs"
        hint = f"; dp {gpus // (tp * pp)} fits" if gpus % (tp * pp) == 0 else ""
        found.append(Finding(row["row_id"], "dp", text + hint))
    if pp > _integer(row, "layers"):
        text = f"pp({pp}) is more stages than layers({row['layers']})"
        found.append(Finding(row["row_id"], "pp", text))
    return found


def tflops(row: dict[str, str], seconds: float, samples: int, formula: str) -> float:
    """TFLOP/s per GPU of a row by a published formula (a row's `formula`, or one of FORMULAS)."""
    model, gpus = shape(row), _integer(row, "gpus")
    recompute = RECOMPUTED.get(row["recompute"].lower(), "none")
    if formula in NOMINAL:
        passes = 8.0 if recompute == "full" else 6.0
        flops = passes * NOMINAL[formula] * 1e9 * model.seq_length * samples
    elif formula == "model-flops":
        flops = model_flops(model, samples, "megatron-2021")
    else:
        name = {"old": "bigscience", "new": "megatron-2021"}.get(formula, formula)
        if name not in FORMULAS:
            raise UserError(f"row {row['row_id']} has the formula {formula!r}, which is not known")
        flops = hardware_flops(model, samples, recompute, name)
    return flops / (seconds * gpus * 1e12)


def _rate(row) -> list[Finding]:
    """The printed TFLOPs against the printed seconds, by the row's formula and by neighbours."""
    if not (row["sec_per_it"] and row["tflops"] and row["formula"] and _integer(row, "gbs")):
        return []
    seconds, rate, samples = float(row["sec_per_it"]), float(row["tflops"]), _integer(row, "gbs")
    known = row["formula"].split()[0]
    if _near(tflops(row, seconds, samples, known), row["tflops"], row["sec_per_it"]):
        return []
    expected = tflops(row, seconds, samples, known)
    other = {"new": "old", "old": "new"}.get(known)
    if other and _near(tflops(row, seconds, samples, other), row["tflops"], row["sec_per_it"]):
        text = f"TFLOPs {rate} are of the {other} formula; the {known} one gives {expected:.2f}"
        return [Finding(row["row_id"], "formula", text)]
    ratio = rate / expected
    text = f"{seconds} s at batch {samples} give {expected:.2f} TFLOPs, not {rate}"
    if abs(ratio * samples - round(ratio * samples / 32) * 32) < 0.01 * samples * ratio:
        text += f"; a batch of {round(ratio * samples / 32) * 32} would"
    return [Finding(row["row_id"], "rate", text)]


def _near(value: float, printed: str, companion: str) -> bool:
    """Whether `value` could have been printed so, given the digits of both printed numbers."""
    target = float(printed)
    slack = _half_digit(printed) / target + _half_digit(companion) / float(companion)
    return abs(value / target - 1) <= NEAR + slack


def _half_digit(text: str) -> float:
    digits = text.split(".")[1] if "." in text and not text.endswith(".0") else ""
    return 0.5 * 10.0 ** -len(digits)


def _size(row) -> list[Finding]:
    """The printed size against the parameters of the shape, with and without embeddings."""
    if not row["size_b"]:
        return []
    size = float(row["size_b"])
    whole, inner = _counts(shape(row))
    slack = 0.5 + 0.015 * size
    if min(abs(size - whole), abs(size - inner)) > slack:
        text = f"{size:g}B is neither the {whole:.1f}B of the shape nor its {inner:.1f}B of blocks"
        return [Finding(row["row_id"], "size", text)]
    return []


def _mixed(rows) -> list[Finding]:
    """Sections in which rows differ in formula, or in what their size label counts."""
    found, first, counted = [], {}, {}
    for row in rows:
        if not all(row[key] for key in SHAPE):
            continue
        before = first.setdefault(row["section"], row)
        if row["formula"] and row["formula"] != before["formula"]:
            other = f"{before['row_id']} by {before['formula']}"
            text = f"TFLOPs by the {row['formula']} formula, {other}"
            found.append(Finding(row["row_id"], "formula", text))
        if row["size_b"] and not row["dup_of"]:
            counted.setdefault(row["section"], []).append((row, _label(row)))
    for rows_of in counted.values():
        labels = {label for _, label in rows_of}
        if {"all", "blocks"} <= labels:
            for row, label in rows_of:
                if label == "blocks":
                    text = f"{row['size_b']}B counts no embeddings, other sizes of the table do"
                    found.append(Finding(row["row_id"], "label", text))
    return found


def _label(row) -> str:
    """What a size label counts: all parameters, blocks only, or one cannot tell."""
    whole, inner = _counts(shape(row))
    size = float(row["size_b"])
    if whole - inner > 2 and abs(size - whole) <= 0.7:
        return "all"
    return "blocks" if whole - inner > 2 and abs(size - inner) <= 0.7 else "unclear"


def _counts(model: ModelShape) -> tuple[float, float]:
    """Billions of parameters of the model, and of its blocks alone."""
    return parameters(model) / 1e9, model.layers * block_parameters(model) / 1e9


def _key(row, *more: str) -> tuple:
    printed = tuple(row[name].rstrip("?") for name in (*SAME, *more))
    return (*printed, *(row.get(name) or "" for name in OPTIONAL))


def _repeats(rows) -> list[Finding]:
    """The same configuration twice: verbatim, or with numbers further apart than noise."""
    seen: dict[tuple, list] = {}
    for row in rows:
        if row["tp"] and _seconds(row):
            seen.setdefault(_key(row, "gpus", "mbs", "gbs", "optimizer"), []).append(row)
    found = []
    for group in seen.values():
        first = group[0]
        for index, row in enumerate(group[1:], start=1):
            mine, before = _seconds(row), _seconds(first)
            twin = next((r for r in group[:index] if _printed(r) == _printed(row)), None)
            if (row["sec_per_it"], row["tflops"]) == (first["tflops"], first["sec_per_it"]):
                text = f"seconds and TFLOPs of {first['row_id']}, swapped: {mine}, {row['tflops']}"
                found.append(Finding(row["row_id"], "swapped", text))
            elif twin:
                text = f"repeats {twin['row_id']} word for word"
                found.append(Finding(row["row_id"], "repeat", text))
            elif abs(mine / before - 1) > 0.02 or _apart(row, first):
                text = (
                    f"the configuration of {first['row_id']} again: {mine:.2f} s and "
                    f"{row['mem_gb'] or '?'} GB, not {before:.2f} s and {first['mem_gb'] or '?'} GB"
                )
                found.append(Finding(row["row_id"], "disagree", text))
    return found


def _printed(row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("sec_per_it", "tflops", "mem_gb"))


def _seconds(row) -> float | None:
    """The printed seconds, or those that the printed TFLOPs mean."""
    if row["sec_per_it"]:
        return float(row["sec_per_it"])
    if not (row["tflops"] and row["formula"] and _integer(row, "gbs")):
        return None
    return tflops(row, 1.0, _integer(row, "gbs"), row["formula"]) / float(row["tflops"])


def _apart(row, other) -> bool:
    both = row["mem_gb"] and other["mem_gb"]
    return bool(both) and abs(float(row["mem_gb"]) / float(other["mem_gb"]) - 1) > 0.1


def _slopes(rows) -> list[Finding]:
    """More memory at a smaller micro-batch, all else equal."""
    groups: dict[tuple, list] = {}
    for row in rows:
        if row["mem_gb"] and row["mbs"] and row["tp"]:
            groups.setdefault(_key(row, "gpus", "gbs"), []).append(row)
    found = []
    for group in groups.values():
        for row in group:
            for other in group:
                less = int(row["mbs"]) < int(other["mbs"])
                if less and float(row["mem_gb"]) > float(other["mem_gb"]) + 1:
                    text = (
                        f"{row['mem_gb']} GB at micro-batch {row['mbs']}, but "
                        f"{other['mem_gb']} GB at {other['mbs']} ({other['row_id']})"
                    )
                    found.append(Finding(row["row_id"], "memory", text))
                    break
    return found


def _spikes(rows) -> list[Finding]:
    """A smaller batch that takes as long as a larger one: slots are m + pp - 1."""
    groups: dict[tuple, list] = {}
    for row in rows:
        if row["sec_per_it"] and row["mbs"] and row["dp"] and _integer(row, "gbs"):
            groups.setdefault((*_key(row, "gpus", "mbs", "dp"), row["section"][:5]), []).append(row)
    found = []
    for group in groups.values():
        for row in group:
            for other in group:
                mine, theirs = _integer(row, "gbs"), _integer(other, "gbs")
                ratio = _slots(row) / _slots(other)
                grown = float(row["sec_per_it"]) / float(other["sec_per_it"]) / ratio
                if mine < theirs and not 1 / 1.15 < grown < 1.15:
                    text = (
                        f"batch {mine} takes {row['sec_per_it']} s, but {theirs} takes "
                        f"{other['sec_per_it']} s: {100 * (grown - 1):+.0f} % beside its slots"
                    )
                    found.append(Finding(row["row_id"], "outlier", text))
                    break
    return found


def _slots(row) -> float:
    count = _integer(row, "gbs") / (_integer(row, "mbs") * _integer(row, "dp"))
    return count + _integer(row, "pp") - 1
