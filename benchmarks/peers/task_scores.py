"""Log-likelihoods and accuracies of tasks beside lm_eval's, of eight model families.

    python benchmarks/peers/task_scores.py --keep RESULTS.jsonl [--minutes 5]

Needs lm_eval (requirements-lm-eval.txt). For each family a random model with a tokenizer is made,
imported and exported again; lm_eval scores a task of 20 questions with four answers each on the
exported model, and sample.py scores it on the checkpoint, from the file that scripts/eval_tasks.py
makes and from the samples that lm_eval logs. All in fp32, with texts of several scripts, empty ends
and lines (tests/lm_eval_cases.py). Results are kept in RESULTS.jsonl, so that the list can be made
in parts, with --minutes.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from lm_eval_cases import FIXTURES, compare

from benchmarks.results_file import head, main_in_parts

RESULTS = ROOT / "benchmarks" / "results" / "task_scores.md"
LIMIT = 1e-4


def run(name: str) -> list[dict]:
    """A row for each file of the task; name: of the family's case in tests/test_families.py."""
    with tempfile.TemporaryDirectory() as folder:
        found = compare(name, Path(folder))
    versions = {package: version(package) for package in ("lm_eval", "transformers")}
    return [
        {"name": name, "file": file, **row, "versions": versions} for file, row in found.items()
    ]


def report(rows: list[dict]) -> str:
    """The text of the results file."""
    command = "python benchmarks/peers/task_scores.py --keep RESULTS.jsonl"
    over = sum(not row["off"] <= LIMIT for row in rows)
    facts = f"{len(rows)} of {2 * len(FIXTURES)} were made; {over} are off by more than {LIMIT:g}."
    lines = head("Scores of tasks beside lm_eval's", command, facts)
    if rows:
        used = ", ".join(f"{name} {number}" for name, number in rows[-1]["versions"].items())
        lines += [f"{used}, in an environment of their own."]
    lines += [
        "Random models, fp32, one task of 20 questions with four answers. lm_eval scores the",
        "exported model, sample.py the checkpoint. Off: the largest difference of log-likelihoods.",
        "Greedy: answers that only one of them calls the likeliest. Accuracies: ours / lm_eval's",
        "(`acc` and `acc_bytes`).",
        "",
        "| model | file of the task | answers | off | greedy | accuracy | normalised accuracy |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        cells = [
            row["name"],
            row["file"],
            row["requests"],
            f"{row['off']:.1e}",
            row["other_greedy"],
        ]
        cells += [f"{ours:.4f} / {theirs:.4f}" for ours, theirs in row["numbers"].values()]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    main_in_parts(__doc__, RESULTS, FIXTURES, run, report)
