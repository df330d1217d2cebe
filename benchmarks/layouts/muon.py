"""Muon over layouts: drawn layouts against one rank, the first update under tp, and its cost.

    python benchmarks/layouts/muon.py --keep RESULTS.jsonl

The cost is processor time on two CPU ranks, of Muon's and of AdamW's updates, beside the counts of
FLOPs; wall-clock time on a shared machine would say nothing. Results are kept in RESULTS.jsonl, so
that the list can be made in parts, with --minutes.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import golden_worker
from muon_layouts import MODES, ONE_STEP, drawn_jobs, largest_differences
from ranks import results_of

from architecture.model_stats import model_flops
from benchmarks.results_file import head, main_in_parts
from costs import muon_terms

RESULTS = ROOT / "benchmarks" / "results" / "muon.md"
LAYOUTS = 150  # of each mode and precision
SEED = 2
IN_A_START = 30  # layouts of two or four ranks, in a start of each
PRECISIONS = ("fp64", "fp32")
COST = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "activation": "swiglu"}
COST |= {"ffn_hidden": 512, "seq_length": 256, "vocab_size": 512, "global_batch_size": 8}
COST |= {"micro_batch_size": 4, "steps": 20, "timed_steps": 4, "work": "timed"}


def run(name: str) -> list[dict]:
    """Return the rows of a part: `first`, `cost`, or a start of layouts such as `fp64/joint/30`."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        if name == "first":
            return [{"name": name} | row for row in first_updates(folder)]
        if name == "cost":
            return [{"name": name} | row for row in cost(folder)]
        precision, mode, first = name.split("/")
        every = drawn_jobs(3 * LAYOUTS, precision, SEED)
        jobs = [(ranks, case) for ranks, case in every if case["muon_qkv"] == mode]
        jobs = jobs[int(first) : int(first) + IN_A_START]
        losses, weights = largest_differences(jobs, folder)
    row = {"name": name, "precision": precision, "mode": mode, "layouts": len(jobs)}
    return [row | {"losses": losses, "weights": weights}]


def first_updates(folder: Path) -> list[dict]:
    """Return the differences of the first update under tp 2."""
    jobs = [
        ONE_STEP | {"tp": 2, "zero": 0, "precision": p, "muon_qkv": m, "work": "compared"}
        for p in PRECISIONS
        for m in MODES
    ]
    found = results_of("tests/muon_worker.py", 2, jobs, folder)
    return [
        {"precision": job["precision"], "mode": job["muon_qkv"]} | differences
        for job, differences in zip(jobs, found, strict=True)
    ]


def cost(folder: Path) -> list[dict]:
    """Return the processor seconds of an update, by layout, with AdamW and with Muon."""
    layouts = {"dp 2, ZeRO 1": (1, 1), "dp 2, ZeRO 0": (0, 1), "tp 2": (0, 2)}
    jobs = [
        COST | {"optimizer": name, "zero": zero, "tp": tp}
        for zero, tp in layouts.values()
        for name in ("adamw", "muon")
    ]
    found = results_of("tests/muon_worker.py", 2, jobs, folder, 1500)
    return [
        {"layout": layout, "adamw": adamw["update"]} | muon
        for layout, adamw, muon in zip(layouts, found[::2], found[1::2], strict=True)
    ]


def counted() -> str:
    """Return the FLOPs of a step's passes and of its iterations, in words."""
    options = {k: v for k, v in COST.items() if k not in ("work", "timed_steps")}
    config = golden_worker.options(options)
    model = config.model
    passes = model_flops(model, config.training.global_batch_size)
    iterations = model.layers * sum(
        count * muon_terms.newton_schulz_flops(rows, columns)
        for count, rows, columns in muon_terms.matrices_of_block(model, "split")
    )
    return (
        f"By count the passes of a step have {passes / 1e9:.1f} GFLOP, and the iterations "
        f"{iterations / 1e9:.1f} GFLOP, which is {iterations / passes:.1%}."
    )


def names() -> list[str]:
    """The names of all parts."""
    starts = range(0, LAYOUTS, IN_A_START)
    return [
        "first",
        "cost",
        *(f"{p}/{mode}/{first}" for p in PRECISIONS for mode in MODES for first in starts),
    ]


def layout_lines(rows: list[dict]) -> list[str]:
    """The table of the drawn layouts."""
    lines = []
    for precision in PRECISIONS:
        for mode in MODES:
            own = [row for row in rows if row["name"].startswith(f"{precision}/{mode}/")]
            if own:
                count = sum(row["layouts"] for row in own)
                losses, weights = (max(row[key] for row in own) for key in ("losses", "weights"))
                lines.append(f"| {precision} | {mode} | {count} | {losses:.1e} | {weights:.1e} |")
    return lines


def cost_line(row: dict) -> str:
    """A line of the table of costs."""
    adamw, muon, passes = (1e3 * row[key] for key in ("adamw", "update", "passes"))
    numbers = [f"{adamw:.1f}", f"{muon:.1f}", f"{muon / adamw:.1f}", f"{passes:.0f}"]
    return f"| {' | '.join([row['layout'], *numbers, f'{muon / passes:.1%}'])} |"


def report(rows: list[dict]) -> str:
    """The text of the results file."""
    drawn = [row for row in rows if "/" in row["name"]]
    done = sum(row["layouts"] for row in drawn)
    asked = LAYOUTS * len(MODES) * len(PRECISIONS)
    facts = f"{done} of {asked} layouts were run: {LAYOUTS} of each kind. One thread a rank."
    command = "python benchmarks/layouts/muon.py --keep RESULTS.jsonl"
    lines = head("Muon over layouts", command, facts)
    lines += [
        "Other programs ran on the machine.",
        "",
        "## Drawn layouts against one rank, ten steps",
        "",
        "Of two and four ranks: tp, pp, cp, dp, ep, ZeRO 0 to 2, sequence parallelism, three",
        "schedules, recomputation; models with grouped queries and SwiGLU, with GELU and biases,",
        "with latent attention, and with experts. Losses and norms: the largest relative",
        "difference of any step. Weights:",
        "of a sum over each tensor, relative to the largest of them.",
        "",
        "| precision | q, k, v | layouts | losses and norms | weights |",
        "| --- | --- | --: | --: | --: |",
        *layout_lines(drawn),
        "",
        "## The first update under tp 2 against tp 1",
        "",
        "The largest relative difference (Frobenius) over all matrices of two blocks. DeepSpeed's",
        "issue 8437 has the same figures for its Muon: gradients 7e-7, updates 0.39.",
        "",
        "| precision | q, k, v | gradients | updates |",
        "| --- | --- | --: | --: |",
    ]
    for row in rows:
        if row["name"] == "first":
            numbers = f"{row['gradients']:.1e} | {row['updates']:.1e}"
            lines.append(f"| {row['precision']} | {row['mode']} | {numbers} |")
    lines += [
        "",
        "## Processor time of an update on two ranks, ms of both together",
        "",
        f"4 blocks, h 256, f 512, 2,048 tokens a step, fp32. {counted()}",
        "",
        "| layout | AdamW | Muon | ratio | passes | Muon of the passes |",
        "| --- | --: | --: | --: | --: | --: |",
        *(cost_line(row) for row in rows if row["name"] == "cost"),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main_in_parts(__doc__, RESULTS, names(), run, report)
