"""How do the states in two checkpoints differ? `python runs.py diff CHECKPOINT_A CHECKPOINT_B`.

    found = compare(a, b)      a dictionary, for --json
    print(text(found))         one screen

A run stands for its checkpoint of the step of the other one. Checkpoints do not depend on the
layout, so each tensor is compared with the same tensor, whatever the layouts of the two runs are.
The differences are shown as they are: how far rounding alone may move weights in many steps is not
known, so one number per tensor cannot tell rounding from a fault. The traces of --trace-numerics
can.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing import folders
from checkpointing.index import Index, check_files
from config.messages import UserError
from numerics.record import differing, options

MOST_OPTIONS = 8  # in the text
MOST_TENSORS = 4  # of each kind of state, in the text


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint's folder, and not a run's."""
    return (path / folders.MANIFEST).exists()


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return how two checkpoints differ; a or b may also be the folder of a run.

    Raise UserError if a checkpoint is damaged, if a run has none of the other one's step, or if the
    two checkpoints have no tensor in common.
    """
    paths = [_checkpoint_of(a, b), _checkpoint_of(b, a)]
    steps = [check_files(str(path), contents=False)["step"] for path in paths]
    with Index(str(paths[0])) as index_a, Index(str(paths[1])) as index_b:
        differ = differing([_facts(index_a), _facts(index_b)])
        tensors = _compare_tensors(index_a, index_b)
    return {
        "checkpoints": [str(path) for path in paths],
        "steps": steps,
        "options": [[name, *values] for name, values in differ.items()],
        "tensors": tensors,
        "differs": any(row["relative"] != 0.0 for row in tensors),
    }


def _checkpoint_of(path: Path, other: Path) -> Path:
    """Return `path` if it is a checkpoint, else the run's checkpoint of the step of `other`."""
    if is_checkpoint(path):
        return path
    step = folders.read_manifest(str(other))["step"]
    of_run = folders.find_checkpoints(str(path))
    for checkpoint in of_run:
        if folders.step_of(checkpoint) == step:
            return Path(checkpoint)
    steps = ", ".join(str(folders.step_of(checkpoint)) for checkpoint in reversed(of_run))
    raise UserError(f"{other} is of step {step}; {path} has checkpoints of steps {steps}")


def _facts(index: Index) -> dict[str, Any]:
    """Return the options of the run that saved a checkpoint, and the attributes of its state."""
    config = json.loads(index.attributes("run")["config"])
    facts = options({"config": config})
    for group in ("progress", "optimizer", "data"):
        facts |= {f"{group} {name}": value for name, value in index.attributes(group).items()}
    return facts


def _compare_tensors(a: Index, b: Index) -> list[dict[str, Any]]:
    """Return a row for each tensor of each kind of state that both checkpoints have.

    relative: the norm of the difference over the norm of the tensor in A, 0 if all bits are equal,
    infinite if only the tensor in A is 0, or if one of the two has a number that is not finite.
    """
    rows = []
    for kind in a.kinds:
        for name, shape in a.shapes.items():
            if kind in b.kinds and b.shapes.get(name) == shape:
                relative = _relative(a.read_whole(kind, name), b.read_whole(kind, name))
                rows.append({"kind": kind, "name": name, "relative": relative})
    if not rows:
        raise UserError(f"{a.folder} and {b.folder} have no tensor of the same name and shape")
    return rows


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    if np.array_equal(a, b):
        return 0.0
    norm = float(np.linalg.norm(a.astype(np.float64)))
    difference = float(np.linalg.norm(a.astype(np.float64) - b))
    if norm == 0.0 or not np.isfinite(difference):
        return float("inf")
    return difference / norm


def text(found: dict[str, Any]) -> str:
    """Return one screen of text about the result of `compare`."""
    lines = [
        f"{name}: {path}, step {step}"
        for name, path, step in zip("AB", found["checkpoints"], found["steps"])
    ]
    differ = found["options"]
    lines += [f"{name}: {a} in A, {b} in B" for name, a, b in differ[:MOST_OPTIONS]]
    if len(differ) > MOST_OPTIONS:
        lines.append(f"and {len(differ) - MOST_OPTIONS} more options, which --json lists")
    for kind in dict.fromkeys(row["kind"] for row in found["tensors"]):
        lines += _text_of_kind(kind, [row for row in found["tensors"] if row["kind"] == kind])
    return "\n".join(lines)


def _text_of_kind(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines about one kind of state: the tensors that differ most, the largest first."""
    unequal = [row for row in rows if row["relative"] != 0.0]
    if not unequal:
        return [f"{kind}: all {len(rows)} tensors are equal bit for bit"]
    unequal.sort(key=lambda row: row["relative"], reverse=True)
    lines = [f"{kind}: {len(unequal)} of {len(rows)} tensors differ, relative to A by up to"]
    lines += [f"    {row['relative']:.1e}  {row['name']}" for row in unequal[:MOST_TENSORS]]
    return lines
