"""The bytes between nodes of experts on several nodes: one copy of a token to a node, or k rows.

    python benchmarks/network/dispatch.py  # writes benchmarks/results/dispatch.md

Runs one MoE layer, forward and backward, on CPU ranks that are taken to be on several nodes, and
counts what each rank sends to ranks of other nodes and of its own. Experts are drawn evenly, so
that the counts can be compared with the planner's closed form. The second table has the error of a
layer in bf16 from the same in fp64 with a copy for each expert.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import node_dispatch_worker
from ranks import results_of

from architecture.dispatch import LEAST_SPARED, TopK, copies_elsewhere, rows_elsewhere, sends_once
from benchmarks.results_file import machine
from costs.time_terms import BESIDE

RESULTS = ROOT / "benchmarks" / "results" / "dispatch.md"
SECONDS = 1800
TOKENS, HIDDEN = 128, 512  # of each rank
# Experts, k, groups, groups of a token, nodes, ranks of a node.
CASES = {
    "128 experts, top-8": (128, 8, 1, 1, 4, 8),
    "the same on 2 nodes": (128, 8, 1, 1, 2, 8),
    "256, top-8 of 4 of 8 groups": (256, 8, 8, 4, 8, 4),
    "64, top-6": (64, 6, 1, 1, 4, 4),
    "64, top-4": (64, 4, 1, 1, 2, 4),
    "8, top-2": (8, 2, 1, 1, 2, 4),
    "16, top-2": (16, 2, 1, 1, 4, 4),
}
PARTS = ("output", "input", "router", "up", "down")


def job_of(case: str) -> node_dispatch_worker.Job:
    """The layer of a case, in bf16."""
    experts, k, groups, best, nodes, ranks = CASES[case]
    return node_dispatch_worker.Job(
        nodes="".join(chr(ord("a") + node) * ranks for node in range(nodes)),
        tokens=[TOKENS] * (nodes * ranks),
        experts=experts,
        k=k,
        hidden=HIDDEN,
        groups=groups,
        groups_per_token=best,
        precision="bfloat16",
        evenly=True,
    )


def run(case: str) -> dict:
    """Run a case in a start of ranks of its own."""
    job = job_of(case)
    with tempfile.TemporaryDirectory() as folder:
        worker, ranks = "tests/node_dispatch_worker.py", len(job.nodes)
        [result] = results_of(worker, ranks, [job._asdict()], Path(folder), SECONDS)
    return result


def predicted(case: str) -> tuple[float, float]:
    """Bytes that a token sends to other nodes and back, forward and backward, each way."""
    experts, k, groups, best, nodes, _ = CASES[case]
    row = 2 * HIDDEN
    copies = copies_elsewhere(TopK(experts, k, groups, best), nodes)
    return 4 * rows_elsewhere(k, nodes) * row, copies * (4 * row + 2 * BESIDE * k)


def bytes_row(case: str, result: dict) -> str:
    """A row of the first table."""
    *_, nodes, ranks = CASES[case]
    tokens = TOKENS * nodes * ranks
    often, once = (result[way]["across"] / tokens for way in ("often", "once"))
    plan_often, plan_once = predicted(case)
    within = [f"{result[way]['within'] / tokens:,.0f}" for way in ("often", "once")]
    takes = "yes" if sends_once(node_dispatch_worker.model_of(job_of(case)), nodes) else "no"
    cells = [case, f"{nodes} x {ranks}", f"{often:,.0f}", f"{once:,.0f}"]
    cells += [f"{once / often:.3f}", f"{plan_once / plan_often:.3f}", *within, takes]
    return f"| {' | '.join(cells)} |"


def error_row(case: str, result: dict) -> str:
    """A row of the second table: with a copy for each expert, and with one to a node."""
    cells = [
        f"{result['often_errors'][part]:.2e}, {result['once_errors'][part]:.2e}" for part in PARTS
    ]
    return f"| {case} | {' | '.join(cells)} |"


def report(results: dict[str, dict]) -> str:
    """The text of the results file."""
    rows = [bytes_row(*item) for item in results.items()]
    errors = [error_row(*item) for item in results.items()]
    lines = [
        "# One copy of a token to a node",
        "",
        "    python benchmarks/network/dispatch.py",
        "",
        f"{machine()}. One MoE layer on",
        f"CPU ranks, {TOKENS} tokens of each rank, hidden size {HIDDEN}, bf16, both passes.",
        "Experts of a token are drawn evenly. Nodes are names: no network is measured.",
        "",
        "Counted bytes that a token sends to ranks of other nodes, there and back, forward and",
        "backward, with numbers of rows: k rows as often as it has experts there, or one copy.",
        "Planned: the quotient by the closed form of dispatch.py, without numbers of rows.",
        f"Taken: whether a run sends one copy, which is where a share of {LEAST_SPARED} is spared.",
        "",
        "| experts | nodes x ranks | k rows | one copy | quotient | planned "
        "| inside nodes, k rows | one copy | taken |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --- |",
        *rows,
        "",
        "Root mean square of the error from fp64 over that of the values, in bf16: with k rows,",
        "with one copy. input, router, up, down: gradients.",
        "",
        f"| experts | {' | '.join(PARTS)} |",
        f"| --- | {' | '.join('---' for _ in PARTS)} |",
        *errors,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all cases and write the results file."""
    RESULTS.write_text(report({case: run(case) for case in CASES}))


if __name__ == "__main__":
    main()
