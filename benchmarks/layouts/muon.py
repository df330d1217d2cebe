"""Muon over layouts: drawn layouts against one rank, the first update under tp, and its cost.

    python benchmarks/layouts/muon.py [--layouts 150] [--seed 2] [--out benchmarks/results/muon.md]

The cost is processor time on two CPU ranks, of Muon's and of AdamW's updates, beside the counts of
FLOPs; wall-clock time on a shared machine would say nothing.
"""

import argparse
import platform
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import golden_worker
import torch
from muon_layouts import MODES, ONE_STEP, drawn_jobs, largest_differences
from ranks import results_of

from config.model_stats import model_flops
from planner import muon_terms

COST = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "activation": "swiglu"}
COST |= {"ffn_hidden": 512, "seq_length": 256, "vocab_size": 512, "global_batch_size": 8}
COST |= {"micro_batch_size": 4, "steps": 20, "timed_steps": 4, "work": "timed"}


def layouts(count: int, seed: int, folder: Path) -> list[str]:
    """Return the rows of the drawn layouts."""
    rows = []
    for precision in ("fp64", "fp32"):
        for mode in MODES:
            jobs = [
                (ranks, case)
                for ranks, case in drawn_jobs(3 * count, precision, seed)
                if case["muon_qkv"] == mode
            ]
            losses, weights = largest_differences(jobs, folder)
            rows.append(f"| {precision} | {mode} | {len(jobs)} | {losses:.1e} | {weights:.1e} |")
            print(rows[-1], flush=True)
    return rows


def first_updates(folder: Path) -> list[str]:
    """Return the rows of the first update under tp 2."""
    rows = []
    jobs = [
        ONE_STEP | {"tp": 2, "zero": 0, "precision": p, "muon_qkv": m, "work": "compared"}
        for p in ("fp64", "fp32")
        for m in MODES
    ]
    for job, found in zip(jobs, results_of("tests/muon_worker.py", 2, jobs, folder)):
        gradients, updates = found["gradients"], found["updates"]
        rows.append(f"| {job['precision']} | {job['muon_qkv']} | {gradients:.1e} | {updates:.1e} |")
        print(rows[-1], flush=True)
    return rows


def cost(folder: Path) -> list[str]:
    """Return the rows of the processor time of an update, and of the FLOPs."""
    rows = []
    jobs = [
        COST | {"optimizer": name, "zero": zero, "tp": tp}
        for zero, tp in ((1, 1), (0, 1), (0, 2))
        for name in ("adamw", "muon")
    ]
    found = results_of("tests/muon_worker.py", 2, jobs, folder, 1500)
    for (job, adamw), (_, muon) in zip(zip(jobs[::2], found[::2]), zip(jobs[1::2], found[1::2])):
        layout = "tp 2" if job["tp"] == 2 else f"dp 2, ZeRO {job['zero']}"
        ratio = muon["update"] / adamw["update"]
        share = muon["update"] / muon["passes"]
        rows.append(
            f"| {layout} | {adamw['update'] * 1e3:.1f} | {muon['update'] * 1e3:.1f} | {ratio:.1f} |"
            f" {muon['passes'] * 1e3:.0f} | {share:.1%} |"
        )
        print(rows[-1], flush=True)
    return rows


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


def main() -> None:
    """Measure everything, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", type=int, default=150, help="of each mode and precision")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/muon.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = first_updates(folder)
        costs = cost(folder)
        drawn = layouts(options.layouts, options.seed, folder)
    lines = [
        "# Muon over layouts",
        "",
        f"    python benchmarks/layouts/muon.py --layouts {options.layouts} --seed {options.seed}",
        "",
        f"Machine: virtual machine, CPU ranks over gloo, one thread each; Python "
        f"{platform.python_version()}, torch {torch.__version__}. Other programs ran on it.",
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
        *drawn,
        "",
        "## The first update under tp 2 against tp 1",
        "",
        "The largest relative difference (Frobenius) over all matrices of two blocks. DeepSpeed's",
        "issue 8437 has the same figures for its Muon: gradients 7e-7, updates 0.39.",
        "",
        "| precision | q, k, v | gradients | updates |",
        "| --- | --- | --: | --: |",
        *first,
        "",
        "## Processor time of an update on two ranks, ms of both together",
        "",
        f"4 blocks, h 256, f 512, 2,048 tokens a step, fp32. {counted()}",
        "",
        "| layout | AdamW | Muon | ratio | passes | Muon of the passes |",
        "| --- | --: | --: | --: | --: | --: |",
        *costs,
        "",
    ]
    options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
