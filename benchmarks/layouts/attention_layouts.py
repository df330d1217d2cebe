"""How far random layouts of models whose blocks attend in different ways are from one rank.

    python benchmarks/layouts/attention_layouts.py --keep RESULTS.jsonl [--minutes 5]

Draws LAYOUTS layouts, each with its own pattern of windows and rotary positions, sinks, softcaps,
documents or prefixes, and trains each for STEPS steps in fp64. The largest relative difference of
losses, gradient norms and sums of weights from the run on one rank is listed in
benchmarks/results/attention.md. Results are kept in RESULTS.jsonl, a row for each layout: rows that
are there are not made again, and with --minutes none is begun after that.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_golden import POSITIONS, distance, reference, run_cases

from benchmarks.layouts.drawn_layouts import draw_case, starts
from benchmarks.results_file import head, main_in_parts

RESULTS = ROOT / "benchmarks" / "results" / "attention.md"
LAYOUTS = {2: 80, 4: 100, 8: 20}  # by the number of ranks
AT_ONCE = 20  # layouts in one start of ranks
STEPS = 3
LIMIT = 1e-12
CHOICES = {
    "heads": (4, 8),
    "kv_heads": (1, 2, 4),
    "window": (1, 3, 5, 9),
    "window_blocks": ("all", "1:1", "3:1", "1:2", "0,1,1,0"),
    "rotary_blocks": ("all", "all", "3:1", "1:1", "0,1,1,1"),
    "window_rotary_base": (10000.0, 500.0),
    "rotary_scaling": ("none", "linear:4", "yarn:8:32:1:8:1.2:1", "llama3:8:1:4:8"),
    "sinks": (False, True),
    "attention_softcap": (0.0, 0.0, 2.0),
    "logit_softcap": (0.0, 0.0, 3.0),
    "query_scalar": (None, 3.0),
    "qk_norm": ("none", "none", "head", "full"),
    "block": ("pre-norm", "pre-norm", "sandwich", "parallel"),
    "norm_plus_one": (False, True),
    "activation": ("swiglu", "geglu", "clamped_swiglu"),
    "embedding_scaled": (False, True),
    "objective": ("causal", "causal", "prefix"),
    "reset_attention": (False, True),
    "reset_positions": (False, True),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "micro_batch_size": (1, 2),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
}
SIZES = {"tp": (1, 1, 2), "pp": (1, 1, 2), "cp": (1, 2, 2, 4)}


def drawn_case(ranks: int, seed: int) -> dict:
    """A random layout of that many ranks that train.py takes; most of them have cp."""

    def complete(values: dict, dp: int) -> dict:
        case = POSITIONS["rotary"] | values | {"layers": 4, "steps": STEPS, "precision": "fp64"}
        case["global_batch_size"] = max(4, dp * values["micro_batch_size"])
        if case["reset_attention"] or case["reset_positions"]:
            case["eod_token"] = 3
        return case

    return draw_case(ranks, 1000 * ranks + seed, CHOICES | SIZES, complete)


def run(name: str) -> list[dict]:
    """Train AT_ONCE layouts in one start; a row for each. name: ranks and first seed, `4/20`."""
    ranks, first = map(int, name.split("/"))
    seeds = range(first, min(first + AT_ONCE, LAYOUTS[ranks]))
    cases = [drawn_case(ranks, seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(ranks, cases, Path(folder))
    return [
        {"name": name, "ranks": ranks, "off": distance(result, reference(case)), "case": case}
        for case, result in zip(cases, results, strict=True)
    ]


def report(rows: list[dict]) -> str:
    """The text of the results file."""
    command = "python benchmarks/layouts/attention_layouts.py --keep RESULTS.jsonl"
    facts = f"{len(rows)} of {sum(LAYOUTS.values())} layouts were run, {STEPS} steps each, in fp64."
    lines = head("Attention by block in random layouts, against one rank", command, facts)
    lines += [
        "The largest relative difference of a loss, gradient norm or sum of weights from the run",
        f"on one rank; the limit is {LIMIT:g}.",
        "",
        "| ranks | layouts | with cp | largest difference | over the limit | farthest |",
        "| --: | --: | --: | --: | --: | --- |",
    ]
    for ranks in LAYOUTS:
        here = [row for row in rows if row["ranks"] == ranks]
        if not here:
            continue
        worst = max(here, key=lambda row: row["off"])
        with_cp = sum(row["case"]["cp"] > 1 for row in here)
        over = sum(row["off"] > LIMIT for row in here)
        named = ("tp", "pp", "cp", "zero", "block", "sinks", "attention_softcap", "window_blocks")
        farthest = ", ".join(f"{name} {worst['case'][name]}" for name in named)
        cells = [ranks, len(here), with_cp, f"{worst['off']:.1e}", over, farthest]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def names() -> list[str]:
    """Return the names of all parts: ranks and the first layout, such as `4/20`."""
    return starts(LAYOUTS, AT_ONCE)


if __name__ == "__main__":
    main_in_parts(__doc__, RESULTS, names(), run, report)
