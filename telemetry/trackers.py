"""Writes a run's numbers to TensorBoard and Weights & Biases too.

    check(config)                          before the ranks meet: packages, credentials
    for name, tracker in open_trackers(config).items():
        tracker.write(120, {"loss": 3.21})     # step, a row of metrics.jsonl
        tracker.close()

OUT/trackers.json has the identifier of the run in Weights & Biases, so that a resumed run continues
it. Weights & Biases also reads its environment variables, for example WANDB_MODE=offline. A package
is imported only if the run's options ask for its tracker. Raise UserError if a tracker cannot
start. telemetry/log.py opens the trackers on rank 0.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from config import families
from config.messages import UserError, write_file
from config.schema import Config

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Tracker(Protocol):
    """The interface of a tracker, which stores a run's numbers; its methods may raise OSError."""

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Store the numbers of a step's row of metrics.jsonl."""

    def close(self) -> None:
        """Write the rows that are still buffered."""


class TensorBoard:
    """Writes event files to OUT/tensorboard; a resumed run adds files beside the earlier files."""

    def __init__(self, config: Config):
        _silence_threads("tensorboard.")
        writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(os.path.join(config.run.out, "tensorboard"))

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Write the row's numbers as scalars."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the scalars that are still buffered."""
        self._writer.close()


class WeightsAndBiases:
    """Writes to a run of the W&B project --wandb; its files are in OUT/wandb."""

    def __init__(self, config: Config):
        module = _package("wandb", "wandb")
        project = config.run.wandb
        self._failure = module.errors.Error
        place: dict[str, Any] = {"project": project, "dir": config.run.out}
        earlier = _earlier_run(config)
        if earlier:
            place |= {"id": earlier, "resume": "allow"}
        with _sentences(f"--wandb {project}", self._failure):
            self._run = module.init(**place, config=config.as_dict())
        self.run_id = str(self._run.id)
        kept = {"wandb": {"store": project, "run": self.run_id}}
        write_file(config.run.tracked_runs, json.dumps(kept, indent=1) + "\n")

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Write the row's numbers as one row of the W&B history."""
        try:
            self._run.log(numbers(row), step=step)
        except self._failure as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Write the rows that are still buffered, and end the run."""
        self._run.finish()


def check(config: Config) -> None:
    """Raise UserError if a tracker that the options ask for could not start here."""
    # torch.utils.tensorboard is not imported, because it would import torch.
    if config.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs the package tensorboard")
    if not config.run.wandb:
        return
    module = _package("wandb", "wandb")
    option = f"--wandb {config.run.wandb}"
    with _sentences(option, module.errors.Error):
        is_local = module.setup().settings.mode in ("offline", "disabled")
        if not is_local and not module.login(prompt=False):
            raise UserError(
                f"{option}: Weights & Biases has no API key here: run `wandb login`, or set "
                f"WANDB_MODE=offline"
            )


def open_trackers(config: Config) -> dict[str, Tracker]:
    """Start the trackers that the options ask for; return them by the name of the option."""
    opened = dict[str, Tracker]()
    if config.run.wandb:
        opened["wandb"] = WeightsAndBiases(config)
    if config.run.tensorboard:
        opened["tensorboard"] = TensorBoard(config)
    return opened


def _earlier_run(config: Config) -> str | None:
    """Return the identifier of the run in Weights & Biases that a resumed run continues.

    None if it begins a new one, as in another project than before.
    """
    path = config.run.tracked_runs
    if not config.run.resume or config.run.load_weights_only or not os.path.isfile(path):
        return None
    entry = families.read_object(path).get("wandb")
    if entry is None:
        return None
    if not isinstance(entry, dict) or not RUN_ID.fullmatch(str(entry.get("run", ""))):
        raise UserError(f"{path} names no run of wandb: remove it to begin a new run")
    if entry.get("store") != config.run.wandb:
        return None
    return entry["run"]


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl by name.

    A list NAME by stage becomes NAME/0, NAME/1, ...; a dict becomes NAME/KEY. None is left out.
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        parts = value
        if isinstance(value, list):
            parts = dict(enumerate(value))
        if isinstance(parts, dict):
            found |= {f"{name}/{part}": number for part, number in parts.items()}
        elif value is not None:
            found[name] = value
    return found


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"--{package} needs the package {package}: {error}") from None


@contextlib.contextmanager
def _sentences(option: str, failure: type[Exception]) -> Iterator[None]:
    """Turn an exception of type `failure`, or of a missing package, into a UserError."""
    try:
        yield
    except failure as error:
        raise UserError(f"{option}: {' '.join(str(error).split()):.300}") from None
    except ModuleNotFoundError as error:
        raise UserError(f"{option} needs a further package: {error}") from None


def _silence_threads(of_modules: str) -> None:
    """Print no tracebacks of threads whose class is in modules that begin with `of_modules`.

    Tracebacks are not needed, since the package's next call raises the exception again.
    """
    usual = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith(of_modules):
            usual(failed)

    threading.excepthook = hook
