"""Processor time of whole plans, with the start of Python, in turns with other versions.

    python benchmarks/planner/plan_speed.py --rounds 7 --table FILE.md [OTHER_CHECKOUT ...]

Two questions; user and system time together, so that what else runs on the machine counts less
than in seconds on a clock. Each question is a process of its own, as a user starts it, with
compiled modules from the round before. Other checkouts of the repository, in folders named as their
commit, take turns with this one.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.results_file import head

QUESTIONS = {
    "176b on 384 GPUs": "layouts --model 176b --gpu a100-80 --nodes 48 --global-batch-size 2048",
    "405B on 16,384 GPUs": "layouts --model llama-3.1-405b --gpu h100 --gpus 16384",
}


def seconds(checkout: Path, question: str, compiled: str) -> float:
    """Return the processor time of one question; compiled: the folder for compiled modules."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    changes = {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(
        [sys.executable, "plan.py", *question.split()],
        cwd=checkout,
        env={**os.environ, **changes},
        capture_output=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("others", nargs="*", type=Path, help="further checkouts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--table", type=Path, metavar="FILE.md")
    options = parser.parse_args()
    checkouts = [ROOT, *options.others]
    found: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as compiled:
        for number in range(options.rounds + 1):
            for which, checkout in enumerate(checkouts):
                for name, question in QUESTIONS.items():
                    took = seconds(checkout, question, compiled)
                    if number:  # the first round compiles
                        found.setdefault((which, name), []).append(took)
    command = f"python benchmarks/planner/plan_speed.py --rounds {options.rounds}"
    command = " ".join([command, *(other.name for other in options.others)])
    facts = "Seconds of user and system time, with the start of Python."
    lines = head("Processor time of plans", command, facts)
    lines += ["| question | checkout | least | median |", "| --- | --- | --- | --- |"]
    for (which, name), took in sorted(found.items(), key=lambda one: (one[0][1], one[0][0])):
        whose = checkouts[which].name if which else "this one"
        lines.append(f"| {name} | {whose} | {min(took):.2f} | {statistics.median(took):.2f} |")
    text = "\n".join(lines) + "\n"
    if options.table:
        options.table.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
