"""The average of weights (--ema) in random layouts against one rank, and what it costs a step.

    python benchmarks/layouts/average_layouts.py --keep RESULTS.jsonl [--minutes 5]

Draws LAYOUTS layouts, each with its own optimizer and model, and trains each for STEPS steps in
fp64. The largest relative difference of losses, gradient norms and sums of weights and averages
from the run on one rank is listed in benchmarks/results/averages.md. The cost is processor time of
steps with and without --ema, which take turns in one process; wall-clock time on a shared machine
would say nothing. Results are kept in RESULTS.jsonl: parts that are there are not made again, and
with --minutes none is begun after that.
"""

import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import golden_worker
import torch
from test_golden import distance, reference, run_cases, weight_difference

import data
import trainer
from benchmarks.layouts.drawn_layouts import draw_case, starts
from benchmarks.results_file import head, main_in_parts
from config import validation

RESULTS = ROOT / "benchmarks" / "results" / "averages.md"
LAYOUTS = {2: 20, 4: 32, 8: 8}  # by the number of ranks
AT_ONCE = {2: 20, 4: 16, 8: 8}  # layouts in one start of ranks
STEPS = 4
LIMIT = 1e-12
OPTIMIZERS = ("adamw", "sgd", "adamw", "muon", "adamw", "adafactor", "sgd")  # in turns
CHOICES = {
    "ema": (0.5, 0.9, 0.99),
    "zero": (0, 1, 2, 3, 3, 3),
    "overlap_param_gather": (False, True),
    "sequence_parallel": (False, True),
    "micro_batch_size": (1, 2),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
}
MODELS: dict[str, dict] = {
    "gelu": {"bias": True},
    "grouped": {"kv_heads": 4, "activation": "swiglu", "positions": "rotary", "bias": False},
    "experts": {"experts": 4, "balance": "bias", "activation": "swiglu", "bias": False},
    "latent": {"positions": "rotary", "norm": "rmsnorm", "bias": False, "kv_lora_rank": 12}
    | {"q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6},
}
SIZES = {"tp": (1, 2, 4), "pp": (1, 2, 2, 4), "cp": (1, 1, 2), "ep": (1, 2, 4)}
TIMED = {"layers": 4, "hidden": 256, "heads": 8, "seq_length": 256, "vocab_size": 8192}
TIMED |= {"global_batch_size": 16, "micro_batch_size": 8, "lr": 1e-4}
TURNS = 10  # steps of each kind, after one that is not counted
DECAY = 0.999


def drawn_case(ranks: int, number: int) -> dict:
    """The random layout with that number on that many ranks, which train.py takes."""
    model = list(MODELS)[number % len(MODELS)]

    def complete(values: dict, dp: int) -> dict:
        values["optimizer"] = OPTIMIZERS[number % len(OPTIMIZERS)]
        if model != "experts":
            del values["ep"]
        if values["optimizer"] == "adafactor" and model == "gelu":
            # The gradient of a key's bias is rounding, and Adafactor divides it by its size.
            values["qkv_bias"] = False
        case = MODELS[model] | values | {"layers": 4, "steps": STEPS, "precision": "fp64"}
        case["global_batch_size"] = max(4, dp * values["micro_batch_size"])
        return case

    return draw_case(ranks, f"{ranks}/{number}", CHOICES | SIZES, complete)


def run(name: str) -> list[dict]:
    """The rows of a part: ranks and first layout, `4/16`, or `time`."""
    if name == "time":
        return [{"name": name} | timed()]
    ranks, first = map(int, name.split("/"))
    numbers = range(first, min(first + AT_ONCE[ranks], LAYOUTS[ranks]))
    cases = [drawn_case(ranks, number) for number in numbers]
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(ranks, cases, Path(folder))
    rows = []
    for case, result in zip(cases, results, strict=True):
        one = reference(case)
        row = {"name": name, "ranks": ranks, "case": case, "off": distance(result, one)}
        row["average"] = weight_difference(result["averages"], one["averages"])
        # That the average is another tensor than the weights, which would be equal as well.
        row["moved"] = weight_difference(one["averages"], one["weights"])
        rows.append(row)
    return rows


def timed() -> dict:
    """Processor seconds of a step without and with --ema, and of the two updates, in turns."""
    torch.set_num_threads(1)
    states = {}
    for ema in (0.0, DECAY):
        config = validation.check(golden_worker.options(TIMED | {"ema": ema}), 1)
        states[ema] = trainer.build(config, None)
    samples = data.build(config).train
    steps: dict[float, list[float]] = {0.0: [], DECAY: []}
    for turn in range(TURNS + 1):
        # The one that is first in a turn is second in the next.
        for ema in (0.0, DECAY) if turn % 2 else (DECAY, 0.0):
            before = time.process_time()
            trainer.step(states[ema], samples, turn * TIMED["global_batch_size"], 1e-4)
            if turn:
                steps[ema].append(time.process_time() - before)
    rules = [update_set.rule for update_set in states[DECAY].optimizer.update_sets]
    averages, copies = [], []
    for turn in range(TURNS + 1):
        begin = time.process_time()
        for rule in rules:
            torch._foreach_lerp_(rule.averages, rule.masters, 1.0 - DECAY)
        middle = time.process_time()
        for rule in rules:
            torch._foreach_copy_(rule.averages, rule.masters)
        end = time.process_time()
        if turn:
            averages.append(middle - begin)
            copies.append(end - middle)
    for state in states.values():
        state.reader.close()
    return {
        "without": statistics.median(steps[0.0]),
        "with": statistics.median(steps[DECAY]),
        "ratios": [b / a for a, b in zip(steps[0.0], steps[DECAY], strict=True)],
        "average": statistics.median(averages),
        "copy": statistics.median(copies),
        "parameters": sum(master.numel() for rule in rules for master in rule.masters),
    }


def names() -> list[str]:
    """The names of all parts."""
    return [*starts(LAYOUTS, AT_ONCE), "time"]


def layout_lines(rows: list[dict]) -> list[str]:
    """The part of the results file about layouts."""
    lines = [
        "The largest relative difference from the run on one rank. Average: of a sum over each",
        "tensor of the average, relative to the largest of them. All: of these, of the same sums",
        f"of the weights, and of losses and gradient norms. The limit is {LIMIT:g}.",
        "",
        "| ranks | layouts | average | all | over the limit | farthest |",
        "| --: | --: | --: | --: | --: | --- |",
    ]
    for ranks in LAYOUTS:
        own = [row for row in rows if row["ranks"] == ranks]
        if not own:
            continue
        worst = max(own, key=lambda row: row["average"])
        over = sum(not row["off"] <= LIMIT for row in own)
        named = (*SIZES, "zero", "optimizer", "ema")
        farthest = ", ".join(f"{name} {worst['case'].get(name, 1)}" for name in named)
        off = max(row["off"] for row in own)
        cells = [ranks, len(own), f"{worst['average']:.1e}", f"{off:.1e}", over, farthest]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(f"{axis} {row['case'].get(axis, 1)}" for axis in SIZES)
        for option in ("zero", "optimizer", "overlap_param_gather", "schedule"):
            counts[f"{option} {row['case'][option]}"] += 1
        counts["experts"] += "experts" in row["case"]
        counts["latent attention"] += "kv_lora_rank" in row["case"]
    counted = ", ".join(f"{option}: {count}" for option, count in sorted(counts.items()))
    least = min(row["moved"] for row in rows)
    lines += ["", f"How many layouts have what: {counted}."]
    lines += [f"The average differs from the weights by {least:.1e} or more, measured alike."]
    return lines


def time_lines(rows: list[dict]) -> list[str]:
    """The part of the results file about time."""
    parameters = rows[0]["parameters"]
    lines = [
        "",
        "## Processor time of a step",
        "",
        "One rank, one thread, fp32, AdamW, a model of 4 blocks of 256, 8,192 tokens in the",
        f"vocabulary, 16 samples of 256 tokens a step, {parameters / 1e6:.2f}M parameters. Steps",
        f"with and without `--ema {DECAY}` take turns in one process, {TURNS} of each. The average",
        "alone, and a copy of the weights, were measured after them.",
        "",
        "| without, ms | with, ms | ratio, median of turns | ratios | average alone, ms | "
        "of the step |",
        "| --: | --: | --: | --- | --: | --: |",
    ]
    for row in rows:
        ratios = row["ratios"]
        cells = [f"{1e3 * row['without']:.0f}", f"{1e3 * row['with']:.0f}"]
        cells += [f"{statistics.median(ratios):.4f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
        cells += [f"{1e3 * row['average']:.2f}", f"{row['average'] / row['without']:.2%}"]
        lines.append(f"| {' | '.join(cells)} |")
    rate = 8 * parameters / statistics.median(row["copy"] for row in rows)
    predicted = 12 * parameters / rate
    step = statistics.median(row["without"] for row in rows)
    tokens = TIMED["global_batch_size"] * TIMED["seq_length"]
    lines += [
        "",
        "By count the average reads two numbers of 4 bytes for each parameter and writes one,",
        f"{12 * parameters / 1e6:.0f} MB. A copy moves {rate / 1e9:.1f} GB/s here: that predicts",
        f"{1e3 * predicted:.1f} ms, or {predicted / step:.2%} of a step of {tokens:,} tokens.",
        "More tokens in a step make the share smaller.",
    ]
    return lines


def report(rows: list[dict]) -> str:
    """The text of the results file."""
    command = "python benchmarks/layouts/average_layouts.py --keep RESULTS.jsonl"
    of_layouts = [row for row in rows if "case" in row]
    facts = f"{len(of_layouts)} of {sum(LAYOUTS.values())} layouts were run, {STEPS} steps each."
    lines = head("The average of weights in random layouts, and its cost", command, facts)
    if of_layouts:
        lines += layout_lines(of_layouts)
    times = [row for row in rows if row["name"] == "time"]
    if times:
        lines += time_lines(times)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main_in_parts(__doc__, RESULTS, names(), run, report)
