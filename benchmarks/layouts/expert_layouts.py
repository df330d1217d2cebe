"""How far random layouts of a model with experts are from one rank.

    python benchmarks/layouts/expert_layouts.py --keep FILE.jsonl [--minutes 5] [--ranks 16]

Draws LAYOUTS layouts, each with its own model, router and balance,
and runs ten steps of each twice. In fp64 the layout records the experts of every token, as one rank
does: the two files must be equal. In fp32 it takes those that one rank chose. The largest relative
difference of losses, gradient norms and weights is listed in benchmarks/results/experts.md.

Models with `--block post-norm` amplify rounding. Their rows say also how far the run on one rank
moves if each of its initial weights moves by one unit in its last place: the response.

Results are kept in RESULTS.jsonl, a row for each layout, so that the list can be made in parts:
rows that are there are not made again, and with --minutes none is begun after that. --ranks and
--first: only layouts on these numbers of ranks, from this number on.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import golden_worker
from test_experts import SHAPE, routed_comparison
from test_golden import effect_of_rounding

from benchmarks.layouts.drawn_layouts import draw_case
from benchmarks.results_file import add_options, from_options, machine

RESULTS = ROOT / "benchmarks" / "results" / "experts.md"
LAYOUTS = {2: 120, 4: 140, 8: 100, 16: 40}  # by the number of ranks
FIRST_SEED = 10_000  # the suite's own layouts have seeds below 1,000
STEPS = 10
SECONDS = 3600  # after which the ranks of a layout are ended
LIMITS = {"fp64": 1e-13, "fp32": 1e-6}


CHOICES = {
    "activation": ("swiglu", "gelu"),
    "experts": (4, 8),
    "experts_per_token": (1, 2, 3),
    "expert_ffn_hidden": (128, 128, 24),
    "first_dense_layers": (0, 0, 1),
    "expert_interval": (1, 1, 2),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "micro_batch_size": (1, 2),
    "recompute": ("none", "selective", "full"),
    "router": ("softmax", "sigmoid"),
    "router_normalised": (False, True),
    "router_scale": (1.0, 2.5),
    "router_groups": (1, 1, 2),
    "router_groups_per_token": (1, 1, 2),
    "shared_ffn_hidden": (0, 16),
    "shared_gate": (False, True),
    "balance": ("none", "bias", "sequence", "global"),
    "router_z_loss": (0.0, 0.01),
    "tied": (False, True),
    "overlap_param_gather": (False, True),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
    "block": ("pre-norm", "pre-norm", "post-norm", "parallel"),
    "qk_norm": ("none", "none", "head", "full"),
    "reset_attention": (False, False, True),
    "ramp": (False, False, False, True),
    "optimizer": ("adamw", "adamw", "sgd", "adafactor"),
}
SIZES = {"tp": (1, 2, 4), "pp": (1, 2, 4), "cp": (1, 1, 2), "ep": (1, 2, 4, 8)}


def drawn_case(ranks: int, seed: int) -> dict:
    """A random layout of that many ranks that train.py takes."""

    def complete(values: dict, dp: int) -> dict:
        batch = max(4, dp * values["micro_batch_size"])
        case = SHAPE | values | {"balance_rate": 0.05, "global_batch_size": batch}
        if case["experts_per_token"] == 1:
            case["router_normalised"] = False  # the weight of the only expert would always be 1
        if case.pop("ramp"):
            share = dp * case["micro_batch_size"]
            case |= {"rampup_batch_size": [share, share, 6 * share], "global_batch_size": 3 * share}
            case |= {"lr_warmup_samples": 10 * share, "steps": golden_worker.STEPS}
        if case["reset_attention"]:
            case["eod_token"] = 3
        return case

    return draw_case(ranks, 1000 * ranks + seed, CHOICES | SIZES, complete)


def names(worlds: list[int], first: int) -> Iterator[str]:
    """The names of the layouts on these numbers of ranks: `16/3` is number 3 on 16 ranks."""
    for ranks in worlds:
        for number in range(first, LAYOUTS[ranks]):
            yield f"{ranks}/{number}"


def run(name: str) -> list[dict]:
    """Run a layout; a row with its differences and, of a post-norm model, its responses."""
    ranks, number = map(int, name.split("/"))
    case = drawn_case(ranks, FIRST_SEED + number) | {"steps": STEPS}
    with tempfile.TemporaryDirectory() as folder:
        [row] = routed_comparison(ranks, [case], Path(folder), SECONDS)
        if case["block"] == "post-norm":
            row["fp64_response"] = effect_of_rounding(case)
            pinned = {"precision": "fp32", "pin_routing": f"{folder}/0_fp32.npy"}
            row["fp32_response"] = effect_of_rounding(case | pinned)
    del row["case"]
    return [row | {"name": name, "block": case["block"], "layout": layout_of(case)}]


def layout_of(case: dict) -> str:
    """The layout in words: tp 2, pp 1, ..."""
    return ", ".join(f"{name} {case[name]}" for name in ("tp", "pp", "cp", "ep", "zero"))


def report(rows: list[dict]) -> str:
    """The text of the results file."""
    post_norm = [row for row in rows if row["block"] == "post-norm"]
    others = [row for row in rows if row["block"] != "post-norm"]
    excesses = [f"{largest_excess(rows, name):.2f} in {name}" for name in LIMITS]
    lines = [
        "# Experts in random layouts, against one rank",
        "",
        "    python benchmarks/layouts/expert_layouts.py --keep RESULTS.jsonl",
        "",
        f"{machine()}. {STEPS} steps of each layout; the largest",
        "relative difference of a loss, gradient norm or sum of weights. Elsewhere: tokens that a",
        "layout sends to other experts than one rank does, in fp64, counted in each block and",
        f"step. In fp32 the choices of one rank are taken. {len(rows)} of {sum(LAYOUTS.values())}",
        "layouts were run.",
        "",
        *table_of(others),
        "",
        "Models with `--block post-norm` amplify rounding here. So their differences are also",
        "divided by the response: how far the run on one rank moves if each of its initial weights",
        "is moved by one unit in its last place.",
        "",
        *table_of(post_norm),
        "",
        "Over response: the largest quotient of a layout. Of all layouts the largest difference,",
        "over the response or the limit (1e-13 in fp64, 1e-6 in fp32), whichever is larger, is",
        f"{excesses[0]} and {excesses[1]}.",
    ]
    return "\n".join(lines) + "\n"


def largest_excess(rows: list[dict], precision: str) -> float:
    """The largest difference of a layout, over its response or the limit if that is larger."""
    return max(
        row[precision] / max(LIMITS[precision], row.get(f"{precision}_response", 0.0))
        for row in rows
    )


def table_of(rows: list[dict]) -> list[str]:
    """The lines of a table of layouts, by the number of ranks."""
    lines = [
        "| ranks | layouts | fp64 | over response | fp32, pinned | over response "
        "| elsewhere, of tokens | farthest in fp64 |",
        "| --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for ranks in LAYOUTS:
        layouts = [row for row in rows if row["name"].startswith(f"{ranks}/")]
        if not layouts:
            continue
        worst = max(layouts, key=lambda row: row["fp64"])
        cells = [str(ranks), str(len(layouts))]
        for precision in LIMITS:
            cells.append(f"{max(row[precision] for row in layouts):.1e}")
            quotients = [
                row[precision] / row[f"{precision}_response"]
                for row in layouts
                if f"{precision}_response" in row
            ]
            cells.append(f"{max(quotients):.2f}" if quotients else "")
        elsewhere = sum(row["elsewhere"] for row in layouts)
        tokens = sum(row["tokens"] for row in layouts)
        cells += [f"{elsewhere} of {tokens:,}", worst["layout"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Run what is not kept yet, and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--ranks", type=int, choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    kept = from_options(given)
    done = {row["name"] for row in kept.rows()}
    kept.run(run, [name for name in names(given.ranks, given.first) if name not in done])
    RESULTS.write_text(report(kept.rows()))


if __name__ == "__main__":
    main()
