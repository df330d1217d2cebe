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

from architecture import families
from base.errors import PackageError, UserError
from base.paths import write_file
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
        """Begin to write; raise UserError if the package is missing."""
        _silence_threads("tensorboard.")
        module = _package("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(os.path.join(config.run.out, "tensorboard"))

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
        """Begin a run or continue an earlier one; write its identifier to OUT/trackers.json.

        Raise UserError if W&B or the file fails.
        """
        module = _package("wandb", "wandb")
        project = config.run.wandb
        self._failure = module.errors.Error
        arguments: dict[str, Any] = {"project": project, "dir": config.run.out}
        earlier_run = _earlier_run(config)
        if earlier_run:
            arguments |= {"id": earlier_run, "resume": "allow"}
        with _sentences(f"--wandb {project}", self._failure):
            self._run = module.init(**arguments, config=config.as_dict())
        self.run_id = str(self._run.id)
        entry = {"wandb": {"store": project, "run": self.run_id}}
        write_file(config.run.tracked_runs, json.dumps(entry, indent=1) + "\n")

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Write the row's numbers as one row of the W&B history.

        Raise OSError if W&B fails: the log then goes on without this tracker.
        """
        try:
            self._run.log(numbers(row), step=step)
        except self._failure as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Write the rows that are still buffered, and end the run."""
        self._run.finish()


def check(config: Config) -> None:
    """Raise UserError if a tracker that the options ask for could not start on this node."""
    # The package is looked for and not imported, since torch.utils.tensorboard would import torch.
    if config.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise PackageError("--tensorboard needs the package tensorboard")
    if not config.run.wandb:
        return
    module = _package("wandb", "wandb")
    option = f"--wandb {config.run.wandb}"
    with _sentences(option, module.errors.Error):  # errors of the package become UserErrors
        is_local = module.setup().settings.mode in ("offline", "disabled")  # these need no API key
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
    """Return the identifier of the W&B run that a resumed run continues, read from trackers.json.

    Return None if a new W&B run begins, for example because --wandb names another project. Raise
    UserError if the file is damaged.
    """
    path = config.run.tracked_runs
    is_resumed = config.run.resume and not config.run.load_weights_only
    if not is_resumed or not os.path.isfile(path):
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
    numbers_by_name: dict[str, float] = {}
    for name, value in row.items():
        parts = value
        if isinstance(value, list):
            parts = dict(enumerate(value))
        if isinstance(parts, dict):
            numbers_by_name |= {f"{name}/{part}": number for part, number in parts.items()}
        elif value is not None:
            numbers_by_name[name] = value
    return numbers_by_name


def _package(module: str, package: str) -> Any:
    """Return an imported module; raise UserError if its package, named in the error, is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise PackageError(f"--{package} needs the package {package}: {error}") from None


@contextlib.contextmanager
def _sentences(option: str, failure: type[Exception]) -> Iterator[None]:
    """Inside this context, turn an exception of a tracker's package into a UserError of one line.

    failure: the type of the package's exceptions. option: the option and its value, with which the
    line begins. An exception of another missing package is turned into a UserError too.
    """
    try:
        yield
    except failure as error:
        raise UserError(f"{option}: {' '.join(str(error).split()):.300}") from None
    except ModuleNotFoundError as error:
        raise PackageError(f"{option} needs a further package: {error}") from None


def _silence_threads(of_modules: str) -> None:
    """Print no tracebacks of threads whose class is in a module that begins with `of_modules`.

    Called before a tracker starts such threads. Their tracebacks are not needed, since the
    package's next call raises the exception again.
    """
    earlier_hook = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith(of_modules):
            earlier_hook(failure)

    threading.excepthook = hook
