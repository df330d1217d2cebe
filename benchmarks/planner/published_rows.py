"""Published rows of measurements: read from CSV, and checked for contradictions.

A row is a line of a CSV file in the columns of `benchmarks/data/measured_rows.csv`; tune.py writes
its results in them too. `check` finds rows that contradict themselves or each other. Files with a
column `machine` state more, which stated_rows reads.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from architecture.model_stats import (
    FORMULAS,
    block_parameters,
    hardware_flops,
    model_flops,
    parameters,
)
from architecture.shape import ModelShape
from base.errors import UserError
from benchmarks.planner import row_table
from benchmarks.planner.row_table import Cells, Row, RowTable
from config.optimizers import OPTIMIZERS
from config.schema import SCHEDULES

# fmt: off
COLUMNS = (
    "row_id", "section", "gpu", "gpus", "size_b", "layers", "hidden", "heads", "ffn", "seq",
    "vocab", "dp", "tp", "pp", "mbs", "gbs", "zero_stage", "recompute", "precision", "optimizer",
    "status", "mem_gb", "sec_per_it", "tflops", "dp_clean", "gbs_clean", "sec_clean",
    "sec_derived", "formula", "dup_of", "quality", "note",
)
# Columns that rows may have besides: what tune.py varies and the published tables did not.
OPTIONAL = ("kv_heads", "activation", "sequence_parallel", "schedule", "partition")
# Columns for the reader of a table, and what tune.py says about its trials.
INFORMATION = (
    "source_file", "nodes", "tflops_clean", "trials", "sec_trials", "spread", "tokens_per_second",
    "mfu", "hfu", "predicted_sec", "mem_gb_per_stage",
)
# Columns of files that have all of them: what the other files leave to be known.
STATED = (
    "machine", "norm", "positions", "bias", "tied", "chunks", "mem_kind", "tokens_per_gpu",
    "inexpressible", "software",
)
STATED_OPTIONAL = ("engine", "cp", "fp8")
WHOLE = (
    "gpus", "layers", "hidden", "heads", "ffn", "seq", "vocab", "dp", "tp", "pp", "mbs", "gbs",
    "dp_clean", "gbs_clean", "nodes", "kv_heads", "chunks", "cp",
)
NUMBERS = (
    "size_b", "mem_gb", "sec_per_it", "tflops", "sec_clean", "sec_derived", "tflops_clean",
    "tokens_per_gpu", "predicted_sec",
)
# fmt: on
# What a row must have to describe a model and a layout.
SHAPE = ("layers", "hidden", "heads", "vocab", "seq", "tp", "pp", "gpus")
RECOMPUTATION = {"none": "none", "selective": "selective", "full": "full"}
RECOMPUTATION |= {"true": "full", "True": "full", "false": "none", "False": "none", "": "none"}
YES_NO = {"True": True, "true": True, "False": False, "false": False}
# fp16 where nothing is said, or was not certain; its optimizers are all Adam.
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp64": "fp64"}
UNCERTAIN = {"": "fp16", "fp16?": "fp16", "fp16/mixed": "fp16"}
ADAMS = ("", "adam", "adam (distributed)", "apex.FusedAdam", "apex.FusedAdam?", "torch.optim.Adam")
OPTIMIZER = {name: name for name in OPTIMIZERS} | dict.fromkeys(ADAMS, "adamw")
OPTIMIZER["adam8bit(bnb)"] = "adamw8bit"
STATUS = {"ok": "ok", "OOM": "OOM", "oom": "OOM", "hang": "failed", "fail": "failed"}
ZERO = {str(stage): stage for stage in range(4)}
# The words of a column, and what they mean.
WORDS = {
    "status": STATUS,
    "recompute": RECOMPUTATION,
    "precision": PRECISIONS | UNCERTAIN,
    "optimizer": OPTIMIZER,
    "zero_stage": {"": 1} | ZERO,
    "sequence_parallel": {"": None} | YES_NO,
    "schedule": {"": "1f1b"} | {name: name for name in SCHEDULES},
    "activation": {"": "gelu_tanh", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "swiglu": "swiglu"},
}
# Columns that make two rows the same configuration, beside those that each check names; and those
# of which a file may have none.
SAME = (
    "gpu", "layers", "hidden", "heads", "seq", "vocab", "tp", "pp", "zero_stage", "recompute",
    "precision",
)  # fmt: skip
SAME_IF_STATED = (*OPTIONAL, "machine", "engine", "software", "inexpressible", "chunks", "fp8")
KERNEL = "kernel="  # how a note begins that names an attention kernel
# Formulas that count the parameters of a nominal size in place of the shape's: billions.
NOMINAL = {"old-104B": 104.0, "old-1.3B": 1.3}
NEAR = 0.004  # share by which printed TFLOPs may differ from a formula, besides rounding


def read_table(path: str) -> RowTable:
    """The rows of a CSV file, with the mistakes in its numbers, and in its words if it does not
    state the machine. UserError if it cannot be read, or has other columns.
    """
    known = (*COLUMNS, *OPTIONAL, *INFORMATION, *STATED, *STATED_OPTIONAL)
    table = row_table.read(path, COLUMNS, known)
    states = "machine" in table.columns
    if not states and (more := [n for n in (*STATED, *STATED_OPTIONAL) if n in table.columns]):
        where = "are read in files that have a column machine too"
        raise UserError(f"{path}, line 1, columns: {', '.join(more)} {where}")
    lacks = [name for name in (*OPTIONAL, *STATED) if name not in table.columns]
    if states and lacks:
        has = f"{path} has a column machine"
        raise UserError(f"{has} and lacks the columns {', '.join(lacks)}")
    for row in table.rows:
        cells = Cells(row)
        _check_cells(cells, {} if states else WORDS)
        table.mistakes.extend(cells.mistakes)
    return table


def _check_cells(cells: Cells, words: dict[str, dict]) -> None:
    """Note the cells that hold no number where there is one, and words that are not known."""
    for column in WHOLE:
        cells.whole(column, empty=1)
    for column in NUMBERS:
        cells.number(column, empty=0.0)
    for column, known in words.items():
        if column in cells.row:
            cells.one_of(column, known)


def read(path: str) -> list[Row]:
    """The rows of a CSV file; UserError that lists all of its mistakes, if it has any."""
    table = read_table(path)
    table.refuse_mistakes()
    return table.rows


def read_tables(path: str) -> dict[str, list[str]]:
    """Row names by decision table; UserError if the file cannot be read or lacks a column."""
    header, rows = row_table.lines(path)
    for name in ("table", "row_id"):
        if name not in header:
            raise UserError(f"{path} lacks the column {name}")
    found: dict[str, list[str]] = {}
    for _, cells in rows:
        row = dict(zip(header, cells))
        found.setdefault(row["table"], []).append(row["row_id"])
    return found


def describes_run(row: dict[str, str]) -> bool:
    """Whether the row has a whole model and layout."""
    return all(row[column] for column in SHAPE)


def integer(row: dict[str, str], *columns: str) -> int | None:
    """The first of these columns that is not empty, as a number."""
    return next((int(float(row[column])) for column in columns if row[column]), None)


def recomputation(row: dict[str, str]) -> str:
    """The row's recomputation as Layout names it; UserError if it is none of RECOMPUTATION."""
    value = row["recompute"]
    if value not in RECOMPUTATION:
        known = ", ".join(name for name in RECOMPUTATION if name)
        raise UserError(f"row {row['row_id']}, column recompute: is {value!r}, not one of {known}")
    return RECOMPUTATION[value]


def shape(row: dict[str, str]) -> ModelShape:
    """The model of a row.

    Every published model with a vocabulary of 250k has ALiBi and a normalised embedding; those of
    Megatron-LM's H100 table have an output matrix of their own.
    """
    vocab = integer(row, "vocab")
    return ModelShape(
        integer(row, "layers"),
        integer(row, "hidden"),
        integer(row, "heads"),
        kv_heads=int(row.get("kv_heads") or row["heads"]),
        ffn_hidden=integer(row, "ffn"),
        activation=row.get("activation") or "gelu_tanh",
        seq_length=integer(row, "seq"),
        vocab_size=vocab,
        positions="alibi" if vocab > 200000 else "learned",
        embedding_norm=vocab > 200000,
        tied="H100" not in row["gpu"],
    )


def tflops(row: dict[str, str], seconds: float, samples: int, formula: str) -> float:
    """TFLOP/s per GPU of a row by a published formula (a row's `formula`, or one of FORMULAS).

    Raises UserError if there is no such formula.
    """
    model, recompute = shape(row), recomputation(row)
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
    return flops / (seconds * integer(row, "gpus") * 1e12)


def rounding(printed: str) -> float:
    """The largest rounding error of a printed number: half of its last digit."""
    digits = printed.split(".")[1] if "." in printed and not printed.endswith(".0") else ""
    return 0.5 * 10.0 ** -len(digits)


# ------------------------------------------------------------------------------------------------
# Contradictions within a row
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A mistake in a row, as one sentence with its numbers."""

    row_id: str
    kind: str
    text: str


def check(rows: list[dict[str, str]]) -> list[Finding]:
    """All contradictions of the rows' printed values; corrected columns are not read."""
    found = []
    for row in rows:
        if describes_run(row):
            found += _check_layout(row) + _check_rate(row) + _check_size(row)
        elif row["status"] == "ok" and row["optimizer"]:
            found.append(Finding(row["row_id"], "topology", "no topology or shape: unusable"))
    for compare in (_mixed_formulas, _mixed_labels, _repeats, _memory_slopes, _outliers):
        found += compare(rows)
    return found


def _check_layout(row) -> list[Finding]:
    """tp x pp x dp against the GPUs, and stages against blocks."""
    tp, pp, dp, gpus = (integer(row, column) for column in ("tp", "pp", "dp", "gpus"))
    each = tp * pp * _context_ranks(row)
    found = []
    if dp and each * dp != gpus:
        context = f" * cp({row['cp']})" if _context_ranks(row) > 1 else ""
        text = f"tp({tp}) * pp({pp}) * dp({dp}){context} = {each * dp} is not {gpus} GPUs"
        hint = f"; dp {gpus // each} fits" if gpus % each == 0 else ""
        found.append(Finding(row["row_id"], "dp", text + hint))
    if pp > integer(row, "layers"):
        text = f"pp({pp}) is more stages than layers({row['layers']})"
        found.append(Finding(row["row_id"], "pp", text))
    return found


def _context_ranks(row) -> int:
    """Ranks that share the tokens of a sample."""
    return int(row.get("cp") or 1)


def _check_rate(row) -> list[Finding]:
    """The printed TFLOPs against the printed seconds, by the row's formula and by the other one."""
    samples = integer(row, "gbs")
    if not (row["sec_per_it"] and row["tflops"] and row["formula"] and samples):
        return []
    seconds, rate, known = float(row["sec_per_it"]), float(row["tflops"]), row["formula"].split()[0]
    slack = NEAR + rounding(row["tflops"]) / rate + rounding(row["sec_per_it"]) / seconds
    expected = tflops(row, seconds, samples, known)
    if abs(expected / rate - 1) <= slack:
        return []
    other = {"new": "old", "old": "new"}.get(known)
    if other and abs(tflops(row, seconds, samples, other) / rate - 1) <= slack:
        text = f"TFLOPs {rate} are of the {other} formula; the {known} one gives {expected:.2f}"
        return [Finding(row["row_id"], "formula", text)]
    text = f"{seconds} s at batch {samples} give {expected:.2f} TFLOPs, not {rate}"
    implied = rate / expected * samples
    if abs(implied - round(implied / 32) * 32) < 0.01 * implied:
        text += f"; a batch of {round(implied / 32) * 32} would"
    return [Finding(row["row_id"], "rate", text)]


def _check_size(row) -> list[Finding]:
    """The printed size against the parameters of the shape, with and without embeddings."""
    if not row["size_b"]:
        return []
    size, (whole, inner) = float(row["size_b"]), _billions(shape(row))
    if min(abs(size - whole), abs(size - inner)) <= 0.5 + 0.015 * size:
        return []
    text = f"{size:g}B is neither the {whole:.1f}B of the shape nor its {inner:.1f}B of blocks"
    return [Finding(row["row_id"], "size", text)]


def _billions(model: ModelShape) -> tuple[float, float]:
    """Billions of parameters of the model, and of its blocks alone."""
    return parameters(model) / 1e9, model.layers * block_parameters(model) / 1e9


# ------------------------------------------------------------------------------------------------
# Contradictions between rows
# ------------------------------------------------------------------------------------------------


def _sections(rows) -> list[list[dict[str, str]]]:
    return _groups([row for row in rows if describes_run(row)], lambda row: row["section"])


def _mixed_formulas(rows) -> list[Finding]:
    """Sections whose TFLOPs are of several formulas."""
    found = []
    for section in _sections(rows):
        first = section[0]
        for row in section:
            if row["formula"] and row["formula"] != first["formula"]:
                other = f"{first['row_id']} by {first['formula']}"
                text = f"TFLOPs by the {row['formula']} formula, {other}"
                found.append(Finding(row["row_id"], "formula", text))
    return found


def _mixed_labels(rows) -> list[Finding]:
    """Sections whose size labels count all parameters in some rows, and only blocks in others."""
    found = []
    for section in _sections(rows):
        labelled = [(row, _label(row)) for row in section if row["size_b"] and not row["dup_of"]]
        if {"all", "blocks"} <= {label for _, label in labelled}:
            for row, label in labelled:
                if label == "blocks":
                    text = f"{row['size_b']}B counts no embeddings, other sizes of the table do"
                    found.append(Finding(row["row_id"], "label", text))
    return found


def _label(row) -> str:
    """Return which parameters a size label counts: all, the blocks' alone, or unknown."""
    size, (whole, inner) = float(row["size_b"]), _billions(shape(row))
    if whole - inner > 2 and abs(size - whole) <= 0.7:
        return "all"
    return "blocks" if whole - inner > 2 and abs(size - inner) <= 0.7 else "unclear"


def _groups(rows, key: Callable[[dict[str, str]], Hashable]) -> list[list[dict[str, str]]]:
    """Rows with equal keys, in their order."""
    groups: dict[Hashable, list] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _configuration(row, *columns: str) -> tuple[str, ...]:
    """The row's SAME and SAME_IF_STATED columns, these, its cp and its attention kernel."""
    printed = tuple(row[column].rstrip("?") for column in (*SAME, *columns))
    stated = (row.get(column) or "" for column in SAME_IF_STATED)
    kernel = row["note"] if row["note"].startswith(KERNEL) else ""
    return (*printed, *stated, str(_context_ranks(row)), kernel)


def _repeats(rows) -> list[Finding]:
    """The same configuration twice: verbatim, or with numbers further apart than noise."""
    measured = [row for row in rows if row["tp"] and _seconds(row)]
    groups = _groups(measured, lambda row: _configuration(row, "gpus", "mbs", "gbs", "optimizer"))
    found = []
    for group in groups:
        first = group[0]
        for index, row in enumerate(group[1:], start=1):
            mine, before = _seconds(row), _seconds(first)
            equal = next((r for r in group[:index] if _printed(r) == _printed(row)), None)
            if (row["sec_per_it"], row["tflops"]) == (first["tflops"], first["sec_per_it"]):
                text = f"seconds and TFLOPs of {first['row_id']}, swapped: {mine}, {row['tflops']}"
                found.append(Finding(row["row_id"], "swapped", text))
            elif equal:
                text = f"repeats {equal['row_id']} word for word"
                found.append(Finding(row["row_id"], "repeat", text))
            elif abs(mine / before - 1) > 0.02 or _memory_differs(row, first):
                text = (
                    f"the configuration of {first['row_id']} again: {mine:.2f} s and "
                    f"{row['mem_gb'] or '?'} GB, not {before:.2f} s and {first['mem_gb'] or '?'} GB"
                )
                found.append(Finding(row["row_id"], "disagree", text))
    return found


def _printed(row) -> tuple[str, ...]:
    return tuple(row[column] for column in ("sec_per_it", "tflops", "mem_gb"))


def _seconds(row) -> float | None:
    """The printed seconds, or those that the printed TFLOPs mean."""
    if row["sec_per_it"]:
        return float(row["sec_per_it"])
    if not (row["tflops"] and row["formula"] and integer(row, "gbs")):
        return None
    return tflops(row, 1.0, integer(row, "gbs"), row["formula"]) / float(row["tflops"])


def _memory_differs(row, other) -> bool:
    both = row["mem_gb"] and other["mem_gb"]
    return bool(both) and abs(float(row["mem_gb"]) / float(other["mem_gb"]) - 1) > 0.1


def _memory_slopes(rows) -> list[Finding]:
    """More memory at a smaller micro-batch, all else equal."""
    measured = [row for row in rows if row["mem_gb"] and row["mbs"] and row["tp"]]
    found = []
    for group in _groups(measured, lambda row: _configuration(row, "gpus", "gbs")):
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


def _outliers(rows) -> list[Finding]:
    """A smaller batch that takes as long as a larger one: slots are m + pp - 1."""
    needed = ("sec_per_it", "mbs", "dp", "gbs")
    measured = [row for row in rows if all(row[column] for column in needed)]
    found = []
    for group in _groups(
        measured, lambda row: (*_configuration(row, "gpus", "mbs", "dp"), row["section"][:5])
    ):
        for row in group:
            for other in group:
                mine, theirs = integer(row, "gbs"), integer(other, "gbs")
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
    count = integer(row, "gbs") / (integer(row, "mbs") * integer(row, "dp"))
    return count + integer(row, "pp") - 1
