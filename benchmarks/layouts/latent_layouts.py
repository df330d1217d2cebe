"""Random layouts with latent attention, each compared with one rank; writes results/mla.md.

    python benchmarks/layouts/latent_layouts.py --keep RESULTS.jsonl

The model has multi-head latent attention, shared experts and a dense first block, as DeepSeek-V2
and Moonlight. A layout has tp, pp, cp, dp, ep, ZeRO, sequence parallelism, recomputation and a
schedule by chance. In fp64 its losses, gradient norms and weights after STEPS steps are those of
one rank, and so is the matrix that makes the shared rotary key by itself. Then mistakes are
planted in layouts with tp (tests/latent_worker.py), and the same comparison must find each.

Results are kept in RESULTS.jsonl, so that the list can be made in parts, with --minutes.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from compare import relative_difference
from latent_worker import FAULTS
from ranks import results_of
from test_golden import distance, reference

from benchmarks.layouts.drawn_layouts import draw_case, starts
from benchmarks.results_file import head, main_in_parts

RESULTS = ROOT / "benchmarks" / "results" / "mla.md"
LAYOUTS = {2: 50, 4: 80, 8: 20}  # by the number of ranks
IN_A_START = 10  # layouts that are trained in one start of ranks
FIRST_OF_FAULTS = (0, 10, 20, 30)  # of the starts in which a mistake is planted
STEPS = 4
SECONDS = 1500  # after which the ranks of a start are ended
LIMIT = 1e-12
SHAPE = {
    "precision": "fp64",
    "positions": "rotary",
    "norm": "rmsnorm",
    "bias": False,
    "activation": "swiglu",
    "layers": 3,
    "steps": STEPS,
}
CHOICES = {
    "heads": (2, 4, 8),
    "kv_lora_rank": (12, 16),
    "q_lora_rank": (0, 10),
    "qk_nope_head_dim": (6, 8),
    "qk_rope_head_dim": (4, 6),
    "v_head_dim": (8, 10, 16),
    "experts": (1, 4, 8),
    "experts_per_token": (2, 3),
    "first_dense_layers": (0, 1),
    "shared_ffn_hidden": (0, 16, 32),
    "router": ("softmax", "sigmoid"),
    "router_normalised": (False, True),
    "router_scale": (1.0, 2.446),
    "router_groups": (1, 2),
    "balance": ("none", "bias", "sequence"),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "micro_batch_size": (1, 2),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
    "reset_attention": (False, False, True),
    "optimizer": ("adamw", "adamw", "sgd"),
}
OF_EXPERTS = ("first_dense_layers", "router", "router_normalised", "router_scale", "balance")
OF_EXPERTS += ("experts_per_token", "shared_ffn_hidden", "router_groups", "ep")
SIZES = {"tp": (1, 2, 4), "pp": (1, 2), "cp": (1, 2, 4), "ep": (1, 2, 4)}


def drawn_case(ranks: int, number: int) -> dict:
    """The random layout with that number on that many ranks, which train.py takes."""

    def complete(values: dict, dp: int) -> dict:
        if values["experts"] == 1:
            values = {name: v for name, v in values.items() if name not in OF_EXPERTS}
        case = SHAPE | values | {"global_batch_size": max(4, 2 * dp * values["micro_batch_size"])}
        if case["reset_attention"]:
            case |= {"eod_token": 3, "vocab_size": 13}  # so that documents end often
        return case

    return draw_case(ranks, f"{ranks}/{number}", CHOICES | SIZES, complete)


def run(name: str) -> list[dict]:
    """Train IN_A_START layouts in one start; a row for each.

    name: the number of ranks, the first layout's number, and perhaps a fault: `4/20/latent lost`.
    """
    ranks, first, *fault = name.split("/")
    numbers = range(int(first), int(first) + IN_A_START)
    cases = [drawn_case(int(ranks), number) for number in numbers]
    if fault:
        cases = [case for case in cases if case["tp"] > 1]
    expected = [reference(case) for case in cases]
    jobs = [case | {"fault": fault[0]} if fault else case for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        results = results_of("tests/latent_worker.py", int(ranks), jobs, Path(folder), SECONDS)
    rows = []
    for number, case, result, wanted in zip(numbers, cases, results, expected, strict=False):
        layout = {axis: case.get(axis, 1) for axis in ("tp", "pp", "cp", "ep", "zero")}
        row = {"name": name, "number": number, "layout": layout, "all": distance(result, wanted)}
        row |= {"kv_a": kv_a_difference(result, wanted), "unequal": bool(result["unequal"])}
        row |= {k: case.get(k) for k in ("schedule", "sequence_parallel", "recompute", "heads")}
        rows.append(row | {"documents": case["reset_attention"], "queries": case["q_lora_rank"]})
    return rows


def kv_a_difference(result: dict, expected: dict) -> float:
    """Largest relative difference of the weights that make the latent and the shared key."""
    names = [name for name in expected["weights"] if ".kv_a.weight" in name]
    ours, theirs = ([run["weights"][name] for name in names] for run in (result, expected))
    return relative_difference(ours, theirs, max(map(abs, theirs)))


def names() -> list[str]:
    """The names of all starts: all layouts, then a start for each fault."""
    planted = [f"4/{first}/{fault}" for fault in FAULTS for first in FIRST_OF_FAULTS]
    return starts(LAYOUTS, IN_A_START) + planted


def report(rows: list[dict]) -> str:
    """The text of the results file."""
    right = [row for row in rows if row["name"].count("/") == 1]
    facts = (
        f"{len(right)} of {sum(LAYOUTS.values())} layouts were run, {STEPS} steps each, in fp64."
    )
    command = "python benchmarks/layouts/latent_layouts.py --keep RESULTS.jsonl"
    lines = head("Latent attention in random layouts, against one rank", command, facts)
    lines += [
        "All: the largest relative difference of a loss, gradient norm or sum of weights. kv_a: of",
        "the weights that make the latent and the rotary key that all heads share, alone. A layout",
        f"with unequal replicas counts as above the limit, {LIMIT:g}.",
        "",
        "| ranks | layouts | all | kv_a | above the limit | farthest |",
        "| --: | --: | --: | --: | --: | --- |",
    ]
    for ranks in LAYOUTS:
        own = [row for row in right if row["name"].startswith(f"{ranks}/")]
        if own:
            worst = max(own, key=lambda row: row["all"])
            layout = ", ".join(f"{axis} {size}" for axis, size in worst["layout"].items())
            above = sum(max(row["all"], row["kv_a"]) > LIMIT or row["unequal"] for row in own)
            cells = [str(ranks), str(len(own)), f"{worst['all']:.1e}"]
            cells += [f"{max(row['kv_a'] for row in own):.1e}", str(above), layout]
            lines.append(f"| {' | '.join(cells)} |")
    counts = Counter(f"{axis} {row['layout'][axis]}" for row in right for axis in SIZES)
    for name in ("schedule", "recompute", "sequence_parallel", "documents"):
        counts.update(f"{name} {row[name]}" for row in right)
    counted = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
    lines += ["", f"How many layouts have what: {counted}."]
    return "\n".join(lines + planted_lines(rows)) + "\n"


def planted_lines(rows: list[dict]) -> list[str]:
    """The lines on planted mistakes; none if no such layout was run."""
    if all(row["name"].count("/") == 1 for row in rows):
        return []
    lines = [
        "",
        "## Mistakes planted in layouts of 4 ranks with tp",
        "",
        "Found: another number than that of one rank, or unequal replicas. With sequence",
        "parallelism replicas stay equal, so that only the comparison finds the mistake.",
        "",
        "| gradient | layouts | found | by unequal replicas | least difference of the others |",
        "| --- | --: | --: | --: | --: |",
    ]
    for fault in FAULTS:
        own = [row for row in rows if row["name"].endswith(f"/{fault}")]
        unequal = [row for row in own if row["unequal"]]
        other = [row["all"] for row in own if not row["unequal"]]
        found = len(unequal) + sum(off > LIMIT for off in other)
        least = f"{min(other):.1e}" if other else ""
        lines.append(f"| {fault} | {len(own)} | {found} | {len(unequal)} | {least} |")
    return lines


if __name__ == "__main__":
    main_in_parts(__doc__, RESULTS, names(), run, report)
