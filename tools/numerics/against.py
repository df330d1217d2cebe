"""Is a run the known one? `python runs.py against recipes/NAME RUN`, in any layout.

    found = compare(Path("recipes/dense-1m"), Path("runs/mine"))     a dictionary, for --json
    print(text(found))

A recipe has folders seed-1, seed-2, ... with the run.json and the metrics.jsonl of runs that differ
in the seed alone, and corpus.sha256. A run is compared in two ways. With a seed of the recipe each
step has the known loss, but for rounding, as long as rounding stays small. With any seed its losses
follow the same law: the mean of each tenth of the run, and each evaluation, are as far from the
mean of the seeds as another seed would be.

The law: of n seeds a number has the mean m. Its relative spread is s, pooled over all numbers, with
(n - 1) degrees of freedom each, because a few seeds tell little about one number. Another seed is
outside of m (1 +- T s sqrt(1 + 1/n)) once in thousands of numbers.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from base.errors import FileError, RunError
from config.schema import GROUPS
from tools.numerics.diff import compare_records, compare_traces, evaluations
from tools.numerics.record import Record, differing, options, read_steps

T = 4.0  # of a normal variable once in 16,000
TENTHS = 10
TOKENIZER = ".json"  # in the checksums of a recipe
# From the largest difference of the steps before to the next one, rounding grows by less than JUMP:
# else the losses have jumped.
JUMP = 10.0
BEFORE = 10  # steps
AFTER = 3  # steps in which two runs are near again, if one norm was off by rounding alone
# Options of a run that change its losses by rounding alone; those of the layout do too.
ROUNDING = {"precision", "grad_dtype", "muon_dtype", "loss_scale", "device", "backend", "compile"}
ROUNDING |= {"deterministic", *(field.name for field in fields(GROUPS["layout"]))}
# Options of the group `data` that say where the corpus is and what is evaluated.
FREE = {"data", "cache", "eval_every", "eval_samples", "eval_data", "eval_tasks", "eval_ema"}


def compare(recipe: Path, run: Path) -> dict[str, Any]:
    """Return whether the run in a folder is that of a recipe, as a dictionary for --json.

    verdict: "equal" to rounding, "law" if it is equal in law, else "other". options: those that
    decide a loss and differ, each with the recipe's and the run's value; rounding: those that
    differ and change the last bits alone. data: why the corpus is another one. first: the first
    step or number that the known run does not have. Raise UserError if a folder is none of a recipe
    or of a run.
    """
    folders = sorted(recipe.glob("seed-*"))
    if len(folders) < 2:
        raise RunError(f"{recipe} has {len(folders)} folders seed-N: a recipe has at least two")
    known = [read_steps(folder) for folder in folders]
    record = read_steps(run)
    ours = options(record.facts)
    of_known = options(known[0].facts)
    without = (
        FREE | {"batch_tokens", "seed"} | _names("run") | _versions(ours) | _versions(of_known)
    )
    unequal = differing([of_known, ours])
    result: dict[str, Any] = {
        "recipe": str(recipe),
        "run": str(run),
        "seed": ours["seed"],
        "step": record.steps[-1]["iteration"],
        "steps": known[0].steps[-1]["iteration"],
        "options": [
            [name, *both]
            for name, both in unequal.items()
            if name not in without and name not in ROUNDING
        ],
        "rounding": [[name, *both] for name, both in unequal.items() if name in ROUNDING],
        "data": _other_corpus(recipe, record),
        "notes": record.notes,
        "first": None,
        "tensor": None,
    }
    result["law"] = _outside(known, record)
    same = [each for each in known if each.facts["config"]["training"]["seed"] == ours["seed"]]
    by_step = _compare_steps(same[0], record, result["data"]) if same else None
    if by_step:
        result |= by_step
    elif result["law"]:
        result["first"] = result["law"][0]
    is_of_recipe = not (result["options"] or result["data"] or result["law"])
    if is_of_recipe and by_step and by_step["first"] is None:
        result["verdict"] = "equal"
    elif is_of_recipe and not (by_step and by_step["jumps"]):
        result["verdict"] = "law"
    else:
        result["verdict"] = "other"
    result["differs"] = result["verdict"] == "other"
    return result


def _names(group: str) -> set[str]:
    """Return the names of the options of a group."""
    return {field.name for field in fields(GROUPS[group])}


def _versions(table: dict[str, Any]) -> set[str]:
    """Return the names in a table of options that are versions of programs."""
    known = set().union(*map(_names, GROUPS))
    return table.keys() - known


def _other_corpus(recipe: Path, record: Record) -> str | None:
    """Return how the corpus of a run is not that of a recipe; None: it is, or is not there.

    Its checksums stand beside it, where prepare_data.py has put them.
    """
    path = recipe / "corpus.sha256"
    wanted = _checksums(path)
    if not wanted.keys() >= {".bin", ".idx"}:
        raise RunError(
            f"{path} has no checksums of a .bin and an .idx: a recipe says of which bytes its "
            "corpus is"
        )
    for word in record.facts["config"].get("data", {}).get("data") or ():
        beside = Path(f"{word}.sha256")
        if not beside.is_file():
            continue
        has = _checksums(beside)
        which = next((kind for kind in (".bin", ".idx") if has.get(kind) != wanted[kind]), None)
        if which is None:
            continue
        text = (
            f"{word}{which} has the checksum {has.get(which, 'none'):.12}, the recipe's corpus "
            f"{wanted[which]:.12}"
        )
        tokenizer = Path(f"{word}.tokenizer.json")
        if TOKENIZER not in wanted or not tokenizer.is_file():
            return text
        with tokenizer.open("rb") as file:
            is_same = hashlib.file_digest(file, "sha256").hexdigest() == wanted[TOKENIZER]
        return f"{text}: {'other texts, of the same' if is_same else 'it has another'} tokenizer"
    return None


def _checksums(path: Path) -> dict[str, str]:
    """Return the checksums in a file of `sha256sum` by the ending of the names.

    These are .bin and .idx, and in a recipe .json, of the tokenizer.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    words = [line.split() for line in lines if line.strip()]
    return {Path(each[-1]).suffix: each[0] for each in words if len(each) == 2}


def _compare_steps(known: Record, record: Record, other_corpus: str | None) -> dict[str, Any]:
    """Return the first difference of two runs of one seed, as `compare` has it.

    other_corpus: how the files of the corpus differ, if that is known.

    first: the first step whose loss or norm differs by more than rounding explains. jumps: whether
    the step before was much closer, as after a fault; rounding grows from step to step.
    """
    found = compare_records([known, record], [str(known.folder), str(record.folder)])
    while _is_one_norm(known, record, found["losses"]):
        step = found["losses"]["step"]
        known, record = _without_step(known, step), _without_step(record, step)
        found = compare_records([known, record], [str(known.folder), str(record.folder)])
    data = found["data"] and f"sample {found['data']['sample']} of the run is another text"
    first = found["losses"] or found["evaluations"]
    result = {"first": first, "jumps": bool(first) and _jumps(known, record, first)}
    if data:
        result |= {"data": other_corpus or data, "jumps": True}
    if first:
        result["tensor"] = compare_traces([known, record])["tensor"]
    return result


def _is_one_norm(known: Record, record: Record, first: dict[str, Any] | None) -> bool:
    """Return whether a gradient norm differs and the AFTER steps that follow are near again.

    Where gradients nearly cancel, rounding moves the norm of a step and little of the weights; what
    changes a run changes the steps that follow too.
    """
    if not first or first["of"] != "grad_norm":
        return False
    steps = range(first["step"] + 1, first["step"] + 1 + AFTER)
    offs = [off for name in ("loss", "grad_norm") for off in _offs(known, record, name, steps)]
    return len(offs) == 2 * AFTER and max(offs) * JUMP < first["relative"]


def _without_step(record: Record, step: int) -> Record:
    """Return a run without the row of a step."""
    return replace(record, steps=[row for row in record.steps if row["iteration"] != step])


def _offs(known: Record, record: Record, name: str, steps: range) -> list[float]:
    """Return the relative differences of a number of these steps that both runs have."""
    rows = [{row["iteration"]: row for row in each.steps} for each in (known, record)]
    offs = []
    for step in steps:
        a, b = (of_run.get(step, {}).get(name) for of_run in rows)
        if a is not None and b is not None:
            offs.append(abs(a - b) / max(abs(a), 1e-30))
    return offs


def _jumps(known: Record, record: Record, first: dict[str, Any]) -> bool:
    """Return whether the runs were much closer in all steps before the first that differs.

    One step alone may be close by chance, where the losses or norms of the two cross.
    """
    name = first["of"] if first["of"] in ("loss", "grad_norm") else "loss"  # of an evaluation
    offs = _offs(known, record, name, range(first["step"] - BEFORE, first["step"]))
    # NaN without such a step, and then they have jumped.
    return not first["relative"] < JUMP * max(offs, default=math.nan)


def _outside(known: list[Record], record: Record) -> list[dict[str, Any]]:
    """Return the numbers of a run that no seed of the recipe would have, the earliest first."""
    numbers = [dict(_numbers(each, known[0])) for each in known]
    of_run = dict(_numbers(record, known[0]))
    shared = [key for key in numbers[0] if all(key in each for each in numbers)]
    means = {key: sum(each[key] for each in numbers) / len(numbers) for key in shared}
    squares = [(each[key] / means[key] - 1) ** 2 for each in numbers for key in shared]
    freedom = len(shared) * (len(numbers) - 1)
    if not freedom:
        raise RunError(f"{known[0].folder} has too few steps to be compared")
    spread = math.sqrt(sum(squares) / freedom)
    band = T * spread * math.sqrt(1 + 1 / len(numbers))
    outside = []
    for step, name in shared:
        value = of_run.get((step, name))
        mean = means[step, name]
        if value is not None and not abs(value / mean - 1) <= band:  # also if it is NaN
            outside.append(
                {"step": step, "of": name, "value": value, "mean": mean, "band": band * mean}
            )
    return sorted(outside, key=lambda row: row["step"])


def _numbers(record: Record, known: Record) -> Iterator[tuple[tuple[int, str], float]]:
    """Yield the mean loss of each tenth of a run that is done, and its evaluations, by last step.

    known: a run of the recipe, whose length is divided.
    """
    total = known.steps[-1]["iteration"]
    losses = {row["iteration"]: row["loss"] for row in record.steps}
    for tenth in range(TENTHS):
        part = range(total * tenth // TENTHS + 1, total * (tenth + 1) // TENTHS + 1)
        if part and all(step in losses for step in part):
            mean = sum(losses[step] for step in part) / len(part)
            yield (part[-1], f"the mean loss of steps {part[0]} to {part[-1]}"), mean
    for step, evaluated in evaluations(record.rows).items():
        for name, value in evaluated.items():
            yield (step, f"the {name.removesuffix('_loss')} loss"), value


# ---- The text ------------------------------------------------------------------------------------

VERDICTS = {
    "equal": "equal to rounding: this is the known run",
    "law": "equal in law: another draw of the known run",
    "other": "not the known run",
}


def text(found: dict[str, Any]) -> str:
    """Return one screen of text; found: the result of `compare`."""
    until = f"{found['step']} of {found['steps']} steps" if found["step"] < found["steps"] else ""
    lines = [f"{VERDICTS[found['verdict']]}{f', in {until}' if until else ''}"]
    if found["data"]:
        lines.append(f"  data    {found['data']}")
    for name, recipe, run in found["options"]:
        lines.append(f"  option  {name} is {run}, in the recipe {recipe}")
    first = found["first"]
    if first and "values" in first:
        known, ours = first["values"]
        how = "from here on another run" if found["differs"] else "rounding has grown until here"
        lines.append(
            f"  step {first['step']}: {first['of']} is {ours:.7g}, of that seed {known:.7g}; "
            f"rounding of one step explains {first['explained']:.1e} of it, seen "
            f"{first['relative']:.1e}: {how}"
        )
    for row in found["law"][:3]:
        lines.append(
            f"  step {row['step']}: {row['of']} is {row['value']:.4f}, of the seeds "
            f"{row['mean']:.4f} +- {row['band']:.4f}"
        )
    if found["tensor"]:
        lines.append(f"  tensor  {found['tensor']['title']}, in step {found['tensor']['step']}")
    if found["rounding"]:
        names = ", ".join(f"{name} {run}" for name, _, run in found["rounding"][:6])
        lines.append(f"  rounding may differ by: {names}")
    lines += [f"note: {note}" for note in found["notes"]]
    return "\n".join(lines)
