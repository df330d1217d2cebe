"""The text of results/planted_faults.md."""

from typing import Any

from kept import machine
from planted_names import judged

TEXT = """# Faults that are planted, and what `runs.py diff` names

    python benchmarks/planted_faults.py --keep RESULTS.jsonl [--minutes 7]

Each row is a run with one fault (B), compared with a right run of the same model in another layout
(A). Both have 3 steps, of 8 samples of 16 tokens, 4 blocks of hidden 16, and every step is traced.
A fault at a call site replaces the result of one call site's collective (tests/plants.py); others
are written by hand (tests/planted_by_hand.py). Sites are recorded in right runs; sites of whole
numbers, from which the sizes of messages follow, are left out. A fault that changes no bit of the
losses, the traces and the weights does not count.

What counts as right, stated before the first measurement (benchmarks/planted_names.py has it as a
program):

- Step: the first step that diff names, of the losses or of a tensor, is the first step in which the
  fault changed a bit. If it changed weights after the update, the next step.
- Tensor: diff names the first traced tensor, in the order of execution, that is computed from an
  altered result: kind and name are equal. For the sums of losses and squares over all ranks it is
  right if diff names no tensor before the update.
- Culprit: the tensor is right, and the operation that was altered is among those that diff prints
  as lying between the last good tensor and the first wrong one.
"""


def report(
    rows: list[dict[str, Any]], planned: int, right: list[tuple[str, str, bool]], layouts: int
) -> str:
    """rows: those that count; planned: faults that were run; right: pairs of right runs, and
    whether diff accuses them; layouts: how many there are.
    """
    pairs = {(row["reference"], row["layout"]) for row in rows}
    results = [judged(row) for row in rows]
    total = len(rows)
    lines = [TEXT, f"{machine()}.", ""]
    dropped = planned - total
    lines += [f"{planned} faults were run; {dropped} changed nothing and were dropped. The other"]
    lines += [f"{total} are in {len(pairs)} pairs of {layouts} layouts.", ""]
    lines += ["| | right | of |", "| --- | --: | --: |"]
    for name in ("step", "tensor", "culprit"):
        lines.append(f"| {name} | {sum(each[name] for each in results)} | {total} |")
    accused = [f"{a} and {b}" for a, b, differs in right if differs]
    lines += ["", f"Of {len(right)} pairs of right runs, diff accuses {len(accused)}."]
    lines += accused
    lines += ["", "## Not right", "", "| fault | layouts | expected | found | not right |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row, result in zip(rows, results, strict=True):
        wrong = [name for name, good in result.items() if not good]
        if wrong:
            lines.append(_line(row, ", ".join(wrong)))
    lines += ["", "## All faults", "", "| fault | layouts | expected | found | not right |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += [_line(row, "") for row, good in zip(rows, results, strict=True) if all(good.values())]
    return "\n".join([*lines, ""])


def _line(row: dict[str, Any], wrong: str) -> str:
    plant = row["plant"]
    words = plant.get("by_hand")
    if not words:
        site = plant["site"].split(" < ")
        words = f"{plant['change']}: {site[0]}"
        if len(site) > 1:
            words += f" from {site[-1].split(' ', 1)[1]}"
        if plant["detail"]:
            first, *more = plant["detail"].split(",")
            words += f" ({first}{', ...' * bool(more)})"
    if plant["rank"] is not None:
        words += f", rank {plant['rank']} alone"
    wanted, tensor = row["expected"], row["tensor"]
    found = "no tensor"
    if tensor:
        found = f"{tensor['step']}: {tensor['kind']} {tensor['name']}"
    elif row["losses"]:
        found += f", {row['losses']['of']} of step {row['losses']['step']}"
    expected = f"{wanted['step']}: {wanted['kind']} {wanted['name']}; {wanted['operation']}"
    return f"| {words} | {row['reference']}, {row['layout']} | {expected} | {found} | {wrong} |"
