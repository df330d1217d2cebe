"""Predictions of runs that nobody has measured in public, so that anybody can check them later.

    python benchmarks/planner/bets.py > benchmarks/results/bets.md

Each question is asked of `plan.py layouts`, and its first three lines are the bet: seconds of a
step, what it keeps within in four of five runs, and between which times it lies in nine of ten.
"""

import datetime
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import plan
from base.cli import Parser
from base.errors import sentences

LINES = 3  # of each answer
# The heading of each bet, and its question.
BETS = {
    "Llama 3.1 8B with train.py on 2 x 8 H100 over 8 x 400 Gb/s": (
        "layouts --model llama-3.1-8b --gpu h100 --nodes 2 --network ndr-8x400 "
        "--global-batch-size 128"
    ),
    "Llama 3.1 70B with train.py on 8 x 8 H200 over RoCE": (
        "layouts --model llama-3.1-70b --gpu h200 --nodes 8 --network roce-8x400 "
        "--global-batch-size 256"
    ),
    "Qwen3 32B with torchtitan on 4 x 8 B200": (
        "layouts --for torchtitan --model qwen3-32b --gpu b200 --nodes 4 --network ndr-8x400 "
        "--global-batch-size 256"
    ),
    "Llama 3 70B with Megatron Bridge on 64 GB200 of one NVL72": (
        "layouts --for bridge --model llama-3-70b --gpu gb200 --nodes 16 --global-batch-size 256"
    ),
    "Llama 3 8B with Megatron-LM on 8 x 8 MI300X over RoCE": (
        "layouts --for megatron --model llama-3-8b --gpu mi300x --nodes 8 --network roce-8x400 "
        "--global-batch-size 256"
    ),
}


def bet(heading: str, question: str) -> list[str]:
    """Return the lines of one bet: its question, its table and the first layout's command."""
    data = plan.ask(question.split()).data
    lines = [f"## {heading}", "", f"    python plan.py {question}", ""]
    lines += ["| layout | s/step | 80 % | between (9 of 10) | tokens/s |", "|---|---|---|---|---|"]
    for row in data["ranked"][:LINES]:
        low, high = row["interval_seconds"]
        cells = [
            f"`{' '.join(row['flags'])}`",
            f"{row['step_seconds']:.2f}",
            f"{row['quantile_seconds']:.2f}",
        ]
        cells += [f"{low:.2f} to {high:.2f}", f"{row['tokens_per_second']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    command = shlex.join([*data["launcher"], *data["command"]])
    return [*lines, "", "The first, on the batch and samples above:", "", f"    {command}", ""]


def main(arguments: list[str]) -> None:
    """Print the page."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    today = datetime.date.today().isoformat()
    lines = ["# Bets: predictions of runs that nobody has measured in public", ""]
    lines += ["    python benchmarks/planner/bets.py > benchmarks/results/bets.md", ""]
    lines += [
        f"{today}, commit {commit.stdout.strip()}; synthetic data, bf16; no measured row of these "
        "runs is in the repository (nobody searched everywhere). A bet is won",
        "if the median step of the command, after the first ten, is between the two times, and of "
        "all lines four in five are within their 80 %.",
        "",
    ]
    for heading, question in BETS.items():
        lines += bet(heading, question)
    print("\n".join(lines).rstrip())


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
