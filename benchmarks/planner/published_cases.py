"""The published rows as questions for the planner: which machine, software and layout each had.

    found = cases(published_rows.read("benchmarks/data/measured_rows.csv"))

What the tables do not state is taken from their notes; benchmarks/data/README.md lists where the
notes can be read in several ways. Rows that tune.py wrote need none of it.
"""

import re
from typing import Any

from benchmarks.planner import published_rows
from benchmarks.planner.published_rows import WORDS, integer
from benchmarks.planner.stated_rows import StatedRow
from config.schema import Layout, Training
from costs import hardware
from tools.planner import engines

# Virtual stages that the source states elsewhere: (layers, pp) of Megatron's tables in
# examples/sc21/run_table_1.sh and arXiv 2205.05198. The H100 table states none: 4 is assumed.
VIRTUAL_STAGES = {(60, 4): 3, (80, 8): 2, (96, 8): 3, (96, 16): 2, (105, 35): 3}
# Month and day of 2022 from which Jean Zay's A100 nodes were repaired, gradients were summed in
# fp32, and CUDA_LAUNCH_BLOCKING=1 was needed.
REPAIRED, FP32_GRADIENTS, BLOCKING = "02-25", "02-28", "02-20"

# Why a row is further from its prediction than plan_accuracy.FAR.
EXPLAINED = {
    "001-L447": "an outlier of the measurement: batch 1568 took as long as 2048, which has 28 % "
    "more slots; its neighbour at pp 12 scales as predicted",
    "002-L032": "tp 2 inside a V100 node cost 1.3 ms per 8 MB all-reduce, 6 GB/s: through the "
    "host, not over NVLink; seed 000, same nodes, months later, shows NVLink at tp 2 and 4",
    "002-L048": "as 002-L032: the same slow tensor group; its memory is above that of tp 1 halved",
    "001-L305": "printed as 65 GB at micro-batch 2, below 56 GB at 4: a typing error for 45",
}


def cases(rows: list[dict[str, str]]) -> list[StatedRow]:
    """The rows with a whole model, layout and batch. Repeated and invalid ones are set aside."""
    programs = engines.programs()
    usable = [row for row in rows if published_rows.describes_run(row) and _batch(row)]
    return [_case(_corrected(row, usable), programs) for row in usable]


def _corrected(row: dict[str, str], rows: list[dict[str, str]]) -> dict[str, str]:
    """The second of two rows with one configuration, with MBS 1 where the note says so."""
    if "suggests the second is MBS=1" not in row["quality"]:
        return row
    twins = [r for r in rows if r["quality"] == row["quality"]]
    return row if row is twins[0] else row | {"mbs": "1"}


def _case(row: dict[str, str], programs: dict[str, dict[str, Any]]) -> StatedRow:
    date = _date(row)
    dp, micro = integer(row, "dp_clean", "dp"), integer(row, "mbs") or 1
    tp, pp, layers = integer(row, "tp"), integer(row, "pp"), integer(row, "layers")
    note = row["quality"] + " " + row["note"]
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp or integer(row, "gpus") // (tp * pp),
        micro_batch_size=micro,
        recompute=published_rows.recomputation(row),
        partition=row.get("partition") or _partition(layers, pp),
        zero=WORDS["zero_stage"][row["zero_stage"]],
        sequence_parallel=_sequence_parallel(row, tp),
        schedule=WORDS["schedule"][row.get("schedule", "")],
    )
    training = Training(
        global_batch_size=_batch(row),
        precision=WORDS["precision"][row["precision"]],
        optimizer=WORDS["optimizer"][row["optimizer"]],
    )
    machine, engine = _machine(row, date)
    facts = dict(programs[engine]["software"]) if engine else {}
    if "Megatron" in row["section"]:
        assumed = pp > 1 and "H100" in row["gpu"]
        facts["virtual_stages"] = 4 if assumed else VIRTUAL_STAGES.get((layers, pp), 1)
    # Without CUDA_LAUNCH_BLOCKING=1 the GPU does not wait for the host.
    if not ("async=no" in note or ("async=yes" not in note and not "" < date < BLOCKING)):
        facts["host_per_block"] = 0.0
    seconds, source = row["sec_clean"] or row["sec_derived"], row["row_id"].split("-")[0]
    marked = "invalid" in row["quality"] or "do not use" in row["quality"]
    return StatedRow(
        id=row["row_id"],
        source=source,
        section=row["section"],
        kernel="",
        model=published_rows.shape(row),
        layout=layout,
        training=training,
        machine=machine,
        facts=facts,
        seconds=float(seconds) if seconds else None,
        gigabytes=float(row["mem_gb"]) if row["mem_gb"] else None,
        memory_kind="",
        # Seed 002 observed one node of two: it prints 15 GB, and an OOM at twice the micro-batch.
        memory_of="first" if source == "002" else "ends",
        memory_ahead=0.0,
        status=row["status"],
        assumed=False,
        aside="repeated or invalid" if row["dup_of"] or marked else "",
    )


def _partition(layers: int, pp: int) -> str:
    return "blocks" if layers % pp and (layers + 2) % pp == 0 else "layers"


def _sequence_parallel(row: dict[str, str], tp: int) -> bool:
    """Return the row's value, or without one the value that the source is known to have used."""
    stated = WORDS["sequence_parallel"][row.get("sequence_parallel", "")]
    if stated is not None:
        return stated
    return tp > 1 and ("H100" in row["gpu"] or row["recompute"] == "selective")


def _machine(row: dict[str, str], date: str) -> tuple[str, str]:
    """Machine and engine that a row was measured with, from its GPU, section and date."""
    gpu = row["gpu"]
    if gpu.startswith("V100"):
        return f"jean-zay-{gpu.lower()}", "megatron-deepspeed-2021"
    megatron = "Megatron" in row["section"]
    if megatron and gpu.startswith("H100"):
        return "h100-megatron", "megatron-core-0-8"
    name = gpu.lower().removesuffix("gb")
    if name != "a100-80":
        return name if name in hardware.names() else name.split("-")[0], ""
    if megatron:
        return "selene", "megatron-2022" if row["recompute"] == "selective" else "megatron-2021"
    if "" < date < REPAIRED:
        return "jean-zay-a100-unrepaired", "megatron-deepspeed-2022"
    late = date == "" or date >= FP32_GRADIENTS
    return "jean-zay-a100", "megatron-deepspeed-2022" + "-bf16" * (
        late and row["precision"] == "bf16"
    )


def _date(row: dict[str, str]) -> str:
    """Month and day of a row of early 2022, or the empty string."""
    found = re.search(r"\b(0[1-9]|1[0-2])-([0-3]\d)\b", row["note"] + " " + row["quality"])
    return found.group(0) if found else ""


def _batch(row: dict[str, str]) -> int | None:
    return integer(row, "gbs_clean", "gbs")
