"""How do the states in two checkpoints differ? `python runs.py diff CHECKPOINT_A CHECKPOINT_B`.

    result = compare(a, b)      a dictionary, for --json
    print(text(result))         one screen

If one of the two folders is a run, its checkpoint of the same step is compared. Checkpoints do not
depend on the layout, so tensors of the same name are compared, whatever the layouts of the runs
are. How far rounding alone moves weights in many steps is not known, so these differences cannot
tell rounding from a fault. The traces of --trace-numerics can.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import CheckpointError
from checkpointing import folders
from checkpointing.index import Index, check_files
from tools.numerics.record import differing, option_lines, options

MOST_TENSORS = 4  # the text names this many tensors of each kind of state


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return how two checkpoints differ, as a dictionary for --json.

    a, b: folders of checkpoints; one of them may be the folder of a run. Raise UserError if a
    checkpoint is damaged, if the run has no checkpoint of the same step, or if the two checkpoints
    have no tensor in common.
    """
    paths = [_checkpoint_of(a, b), _checkpoint_of(b, a)]
    steps = [check_files(str(path), contents=False)["step"] for path in paths]
    with Index(str(paths[0])) as index_a, Index(str(paths[1])) as index_b:
        differing_facts = differing([_facts(index_a), _facts(index_b)])
        tensors = _compare_tensors(index_a, index_b)
    return {
        "checkpoints": [str(path) for path in paths],
        "steps": steps,
        "options": [[name, *values] for name, values in differing_facts.items()],
        "tensors": tensors,
        "differs": any(row["relative"] != 0.0 for row in tensors),
    }


def _checkpoint_of(path: Path, other: Path) -> Path:
    """Return `path` if it is a checkpoint, else the run's checkpoint of the step of `other`.

    Raise UserError if the run in the folder `path` has no checkpoint of that step.
    """
    if folders.is_checkpoint(str(path)):
        return path
    step = folders.read_manifest(str(other))["step"]
    checkpoints = folders.find_checkpoints(str(path))
    for checkpoint in checkpoints:
        if folders.step_of(checkpoint) == step:
            return Path(checkpoint)
    steps = ", ".join(str(folders.step_of(checkpoint)) for checkpoint in reversed(checkpoints))
    raise CheckpointError(f"{other} is of step {step}; {path} has checkpoints of steps {steps}")


def _facts(index: Index) -> dict[str, Any]:
    """Return a checkpoint's facts by name: the run's options, and the attributes of its state."""
    config = json.loads(index.attributes("run")["config"])
    facts = options({"config": config})
    for group in ("progress", "optimizer", "data"):
        facts |= {f"{group} {name}": value for name, value in index.attributes(group).items()}
    past = facts.get("data past")
    if past is not None:  # the run's name, which it has too, differs between any two runs
        facts["data past"] = {k: v for k, v in json.loads(past).items() if k != "run"}
    return facts


def _compare_tensors(a: Index, b: Index) -> list[dict[str, Any]]:
    """Return a row per kind of state and tensor that both checkpoints have with the same shape.

    A row has the kind, the name and the relative difference of the tensor. Raise UserError if the
    checkpoints have no tensor in common.
    """
    rows = []
    for kind in a.kinds:  # "weights", and the optimizer's state such as "exp_avg"
        for name, shape in a.shapes.items():
            if kind in b.kinds and b.shapes.get(name) == shape:
                relative = _relative_difference(a.read_whole(kind, name), b.read_whole(kind, name))
                rows.append({"kind": kind, "name": name, "relative": relative})
    if not rows:
        raise CheckpointError(
            f"{a.folder} and {b.folder} have no tensor of the same name and shape"
        )
    return rows


def _relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the norm of the difference of two arrays of one shape over the norm of `a`.

    The result is 0 if the arrays are equal, and infinite if only `a` is 0 or a number of either
    array is not finite.
    """
    if np.array_equal(a, b):
        return 0.0
    exact = a.astype(np.float64)  # the difference below is then computed in fp64 too
    norm = float(np.linalg.norm(exact))
    difference = float(np.linalg.norm(exact - b))
    if norm == 0.0 or not np.isfinite(difference):
        return float("inf")
    return difference / norm


def text(found: dict[str, Any]) -> str:
    """Return one screen of text: the checkpoints, their options, and the tensors that differ most.

    found: the result of `compare`.
    """
    checkpoints = zip("AB", found["checkpoints"], found["steps"])
    lines = [f"{name}: {path}, step {step}" for name, path, step in checkpoints]
    lines += option_lines(found["options"], "")
    for kind in dict.fromkeys(row["kind"] for row in found["tensors"]):
        rows = [row for row in found["tensors"] if row["kind"] == kind]
        lines += _text_of_kind(kind, rows)
    return "\n".join(lines)


def _text_of_kind(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines about a kind of state: the tensors that differ most, the largest first.

    rows: the rows of `compare` with this kind.
    """
    unequal = [row for row in rows if row["relative"] != 0.0]
    if not unequal:
        return [f"{kind}: all {len(rows)} tensors are equal bit for bit"]
    unequal.sort(key=lambda row: row["relative"], reverse=True)
    lines = [f"{kind}: {len(unequal)} of {len(rows)} tensors differ, relative to A by up to"]
    lines += [f"    {row['relative']:.1e}  {row['name']}" for row in unequal[:MOST_TENSORS]]
    return lines
