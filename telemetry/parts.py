"""The files of a run's earlier starts, told from those of another run in the same folder.

    paths = parts_of(out, "metrics.jsonl", run)     the files of this run, the oldest first

Each start renames run.json, metrics.jsonl, times.jsonl and log.txt of the start before it to NAME.N
with one number N. A run that begins at step 0 in a used folder renames the other files of the
earlier run, too. run.json has the name of its run (config/past.py); versions before 0.3 have none,
and then the files count as the run's own.
"""

import os
from pathlib import Path

from base.regular_files import MOST_OF_OBJECT, read_regular
from config.past import RUN
from telemetry.row_file import earlier_parts, read_object


def run_of(path: Path) -> str:
    """Return the name of the run in a run.json; "" if there is no such file, or no name in it."""
    try:
        config = read_object(read_regular(path, MOST_OF_OBJECT)).get("config")
    except OSError:
        return ""
    past = config.get("past") if isinstance(config, dict) else None
    name = past.get("run") if isinstance(past, dict) else None
    return name if isinstance(name, str) and RUN.fullmatch(name) else ""


def is_of(out: str, ending: str, run: str) -> bool:
    """Return whether the files NAME + ending in the folder `out` are, or may be, of a run."""
    return run_of(Path(out, f"run.json{ending}")) in ("", run) or not run


def parts_of(out: str, name: str, run: str) -> list[Path]:
    """Return the files NAME.1, NAME.2, ... and NAME of a run that exist, the oldest first."""
    newest = Path(out, name)
    paths = [*earlier_parts(newest), newest]
    endings = [path.name.removeprefix(name) for path in paths]
    return [p for p, ending in zip(paths, endings) if p.exists() and is_of(out, ending, run)]


def bring_back(out: str, names: list[str], run: str) -> None:
    """Rename the newest file of a run, of each of these names, from NAME.N to NAME.

    Called when a run is resumed after another run has used its folder. Nothing is replaced.
    """
    for name in names:
        parts = parts_of(out, name, run)
        target = os.path.join(out, name)
        if parts and not os.path.lexists(target):
            os.rename(parts[-1], target)
