"""Tasks scored in random layouts, each compared with one rank; writes results/tasks.md.

    python benchmarks/layouts/task_layouts.py --keep RESULTS.jsonl

A layout has tp, pp, cp, dp, ep, ZeRO, sequence parallelism, a schedule, a micro-batch and kinds of
attention and positions by chance. In fp64 the log-likelihood of each of 23 random requests is that
of one rank, and so is the number of its tokens that are not the likeliest (tests/task_worker.py).
Then the pass over the tasks is timed beside an evaluation of as many tokens, in turns.

Results are kept in RESULTS.jsonl, so that the list can be made in parts, with --minutes.
"""

import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import golden_worker
import task_worker
from compare import relative_difference
from ranks import results_of

import data
import trainer
from benchmarks.layouts.drawn_layouts import draw_case, starts
from benchmarks.results_file import head, main_in_parts
from config import validation
from corpora.tasks import ScoringRequest, TaskSet
from inference.scoring import Scorer

RESULTS = ROOT / "benchmarks" / "results" / "tasks.md"
LAYOUTS = {2: 40, 4: 60, 8: 20}  # by the number of ranks
IN_A_START = 10  # layouts that are scored in one start of ranks
SECONDS = 1500  # after which the ranks of a start are ended
LIMIT = 1e-12
SHAPE = {"precision": "fp64", "layers": 4, "init_std": 0.3, "norm": "rmsnorm", "bias": False}
CHOICES = {
    "positions": ("learned", "rotary", "rotary", "alibi"),
    "heads": (4, 8),
    "kv_heads": (2, 4),
    "window": (0, 0, 5),
    "sinks": (False, False, True),
    "experts": (1, 4, 8),
    "experts_per_token": (2, 3),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "micro_batch_size": (1, 2, 4),
    "tied": (False, True),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
    "rotary_scaling": ("none", "longrope:6:1.2:1,1.5:2,3"),
}
SIZES = {"tp": (1, 2, 4), "pp": (1, 2, 4), "cp": (1, 2, 4), "ep": (1, 2, 4)}
# What one rank does without.
OF_LAYOUT = (*SIZES, "zero", "sequence_parallel", "schedule", "micro_batch_size")
TIMED = {"layers": 4, "hidden": 256, "heads": 8, "seq_length": 512, "vocab_size": 8192}
TIMED |= {"micro_batch_size": 2, "global_batch_size": 8}
PASSES = 7  # of each kind, in turns, after one that is not counted


def drawn_case(ranks: int, number: int) -> dict:
    """The random layout with that number on that many ranks, which train.py takes."""

    def complete(values: dict, dp: int) -> dict:
        if values["experts"] == 1:
            del values["experts_per_token"], values["ep"]
        if values["positions"] != "rotary" or values["heads"] != 8:
            del values["rotary_scaling"]
        batch = 4 * dp * values["micro_batch_size"]
        return SHAPE | values | {"global_batch_size": batch}

    return draw_case(ranks, f"{ranks}/{number}", CHOICES | SIZES, complete)


def run(name: str) -> list[dict]:
    """Score in IN_A_START layouts in one start; a row for each. name: ranks and first layout, or
    `time`.
    """
    if name == "time":
        return [timed()]
    ranks, first = map(int, name.split("/"))
    numbers = range(first, first + IN_A_START)
    cases = [drawn_case(ranks, number) for number in numbers]
    with tempfile.TemporaryDirectory() as folder:
        results = results_of("tests/task_worker.py", ranks, cases, Path(folder), SECONDS)
    rows = []
    for number, case, result in zip(numbers, cases, results, strict=True):
        single = {name: value for name, value in case.items() if name not in OF_LAYOUT}
        expected = task_worker.run_case(single, None)
        values = expected["log_likelihoods"]
        off = relative_difference(result["log_likelihoods"], values, max(map(abs, values)))
        rows.append({"name": name, "number": number, "case": case, "off": off})
        rows[-1]["misses"] = result["misses"] == expected["misses"]
    return rows


def timed() -> dict:
    """Tokens per second of a pass over tasks and of an evaluation, on one rank, in turns."""
    config = validation.check(golden_worker.options(TIMED), 1)
    state = trainer.build_model(config)
    draw = random.Random(1)
    requests = []
    while sum(len(request.ids) - 1 for request in requests) < 40 * 512:
        size = draw.randint(20, 160)
        ids = [draw.randrange(8192) for _ in range(size)]
        requests.append(ScoringRequest(ids, size - draw.randint(1, 12)))
    found = TaskSet([], requests)
    scorer = Scorer(state.pipeline, state.factory, config, found)
    samples = data.Synthetic(8192, 512, seed=1)
    rates: dict[str, list[float]] = {"tasks": [], "evaluation": []}
    for number in range(PASSES + 1):
        for kind, tokens, act in (
            ("tasks", found.tokens, scorer.score),
            ("evaluation", 40 * 512, lambda: trainer.evaluate(state, samples, 40)),
        ):
            began = time.perf_counter()
            act()
            if number:
                rates[kind].append(tokens / (time.perf_counter() - began))
    state.reader.close()
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    ratios = [a / b for a, b in zip(rates["tasks"], rates["evaluation"], strict=True)]
    filled = found.tokens / (512 * len(scorer.packed.samples))
    return {"name": "time", **medians, "ratio": statistics.median(ratios), "filled": filled}


def names() -> list[str]:
    """The names of all starts."""
    return [*starts(LAYOUTS, IN_A_START), "time"]


def report(rows: list[dict]) -> str:
    """The text of the results file."""
    scored = [row for row in rows if "case" in row]
    facts = f"{len(scored)} of {sum(LAYOUTS.values())} layouts were run, in fp64."
    command = "python benchmarks/layouts/task_layouts.py --keep RESULTS.jsonl"
    lines = head("Tasks scored in random layouts, against one rank", command, facts)
    lines += [
        "Off: the largest difference of a request's log-likelihood from that of one rank, relative",
        "to the largest of one rank. Likeliest: layouts in which exactly the same tokens are the",
        "likeliest.",
        "",
        f"| ranks | layouts | off | above {LIMIT:g} | likeliest | farthest |",
        "| --: | --: | --: | --: | --: | --- |",
    ]
    for ranks in LAYOUTS:
        own = [row for row in scored if row["name"].startswith(f"{ranks}/")]
        if own:
            worst = max(own, key=lambda row: row["off"])
            layout = ", ".join(f"{axis} {worst['case'].get(axis, 1)}" for axis in SIZES)
            above = sum(not row["off"] <= LIMIT for row in own)
            same = sum(row["misses"] for row in own)
            cells = [ranks, len(own), f"{worst['off']:.1e}", above, same, layout]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    counts: Counter[str] = Counter()
    for row in scored:
        case = row["case"]
        counts.update(f"{axis} {case.get(axis, 1)}" for axis in SIZES)
        for option in ("schedule", "positions", "sequence_parallel", "zero"):
            counts[f"{option} {case.get(option)}"] += 1
        counts["experts"] += case["experts"] > 1
        counts["windows"] += case["window"] > 0
        counts["longrope"] += "longrope" in case.get("rotary_scaling", "")
    counted = ", ".join(f"{option}: {count}" for option, count in sorted(counts.items()))
    lines += ["", f"How many layouts have what: {counted}."]
    for row in rows:
        if row["name"] == "time":
            lines += [
                "",
                "## Time",
                "",
                "One rank, fp32, a model of 4 blocks of 256, samples of 512 tokens, "
                f"{PASSES} passes",
                "of each kind in turns. Only tokens of requests count, not what fills samples.",
                "",
                "| | tokens/s |",
                "| --- | --: |",
                f"| tasks, requests of 20 to 160 tokens | {row['tasks']:,.0f} |",
                f"| evaluation of as many tokens | {row['evaluation']:,.0f} |",
                f"| ratio, median of turns | {row['ratio']:.2f} |",
                "",
                f"Requests fill {row['filled']:.1%} of the samples.",
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main_in_parts(__doc__, RESULTS, names(), run, report)
