"""Writes a run's numbers to TensorBoard, Weights & Biases and MLflow too.

    check(config)                          before the ranks meet: packages, stores, credentials
    for name, tracker in open_trackers(config).items():
        tracker.write(120, {"loss": 3.21})     # step, a row of metrics.jsonl
        tracker.close()

OUT/trackers.json has the identifiers of the runs in Weights & Biases and MLflow, so that a resumed
run continues these runs. Weights & Biases also reads its environment variables, for example
WANDB_MODE=offline. A package is imported only if the run's options ask for its tracker. Raise
UserError if a tracker cannot start. telemetry/log.py opens the trackers on rank 0.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from config import families
from config.messages import UserError, write_file
from config.schema import Config

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
NOT_IN_NAMES = re.compile(r"[^\w./ :-]")  # characters that names of MLflow's metrics cannot have


class Tracker(Protocol):
    """The interface of a tracker, which stores a run's numbers; its methods may raise OSError.

    run_id: the identifier of the run in the tracker, for a resumed run; "" for TensorBoard, which
    has no identifiers.
    """

    run_id: str

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Store the numbers of a step's row of metrics.jsonl."""

    def close(self) -> None:
        """Write the rows that are still buffered."""


class TensorBoard:
    """Writes event files to OUT/tensorboard; a resumed run adds files beside the earlier files."""

    run_id = ""

    def __init__(self, config: Config, earlier: str | None):
        _silence_threads("tensorboard.")
        writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(os.path.join(config.run.out, "tensorboard"))

    @staticmethod
    def check(config: Config) -> None:
        """Raise UserError if the package is missing.

        The package is not imported, because torch.utils.tensorboard would import torch.
        """
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError("--tensorboard needs the package tensorboard")

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Write the row's numbers as scalars."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the scalars that are still buffered."""
        self._writer.close()


class WeightsAndBiases:
    """Writes to a run of the W&B project --wandb; its files are in OUT/wandb."""

    def __init__(self, config: Config, earlier: str | None):
        module = _package("wandb", "wandb")
        place: dict[str, Any] = {"project": config.run.wandb, "dir": config.run.out}
        if earlier:
            place |= {"id": earlier, "resume": "allow"}
        with _sentences(f"--wandb {config.run.wandb}", module.errors.Error):
            self._run = module.init(**place, config=config.as_dict())
        self.run_id = str(self._run.id)
        self._failure = module.errors.Error

    @staticmethod
    def check(config: Config) -> None:
        """Raise UserError if the package or, unless W&B works offline, the API key is missing."""
        module = _package("wandb", "wandb")
        option = f"--wandb {config.run.wandb}"
        with _sentences(option, module.errors.Error):
            is_local = module.setup().settings.mode in ("offline", "disabled")
            if not is_local and not module.login(prompt=False):
                raise UserError(
                    f"{option}: Weights & Biases has no API key here: run `wandb login`, or set "
                    f"WANDB_MODE=offline"
                )

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Write the row's numbers as one row of the W&B history."""
        try:
            self._run.log(numbers(row), step=step)
        except self._failure as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Write the rows that are still buffered, and end the run."""
        self._run.finish()


class MLflow:
    """Writes to a run in the store --mlflow: an address, or a folder with mlflow.db (SQLite)."""

    def __init__(self, config: Config, earlier: str | None):
        self._module, self._client, experiment = _mlflow_store(config)
        with _sentences(f"--mlflow {config.run.mlflow}", self._module.MlflowException):
            if earlier:
                self.run_id = earlier
                self._client.update_run(earlier, status="RUNNING")
                return
            name = config.run.out
            self.run_id = self._client.create_run(experiment, run_name=name).info.run_id
            for group, options in config.as_dict().items():
                for option, value in options.items():
                    self._client.log_param(self.run_id, f"{group}.{option}", value)

    @staticmethod
    def check(config: Config) -> None:
        """Raise UserError if the package is missing or the store cannot be opened."""
        _mlflow_store(config)

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Write the row's numbers as metrics, in one transaction."""
        metric = self._module.entities.Metric
        now = int(time.time() * 1000)
        rows = [
            metric(_metric_name(name), value, now, step) for name, value in numbers(row).items()
        ]
        try:
            self._client.log_batch(self.run_id, metrics=rows)
        except self._module.MlflowException as error:  # a server that does not answer
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)


def _mlflow_store(config: Config) -> tuple[Any, Any, str]:
    """Return the module mlflow, a client of the store --mlflow, and the experiment's identifier.

    The experiment is named `trine`; it is created if the store has none.
    """
    module = _package("mlflow", "mlflow")
    store = config.run.mlflow
    artifacts = None
    if ":" not in store and store != "databricks":
        folder = os.path.abspath(store)
        _check_mlflow_folder(store, folder)
        artifacts = f"file://{folder}/artifacts"
        store = f"sqlite:///{folder}/mlflow.db"
    with _sentences(f"--mlflow {config.run.mlflow}", module.MlflowException):
        client = module.MlflowClient(tracking_uri=store)
        found = client.get_experiment_by_name("trine")
        if found:
            return module, client, found.experiment_id
        return module, client, client.create_experiment("trine", artifact_location=artifacts)


def _check_mlflow_folder(option: str, folder: str) -> None:
    """Make the folder; raise UserError if that fails or if it has an MLflow store of plain files.

    option: the value of --mlflow, for the error. folder: the same as an absolute path.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        parts = os.listdir(folder)
    except OSError as error:
        raise UserError(f"--mlflow {option}: cannot write in {folder}: {error.strerror}") from None
    if any(os.path.isfile(os.path.join(folder, part, "meta.yaml")) for part in parts):
        raise UserError(
            f"--mlflow {option}: this folder holds runs in files, which MLflow keeps up no longer: "
            f"convert it with `mlflow migrate-filestore`, or give another folder"
        )


def _metric_name(name: str) -> str:
    """Return the name without characters that MLflow rejects, which the path of a corpus has."""
    return re.sub("/+", "/", NOT_IN_NAMES.sub("_", name))


KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def check(config: Config) -> None:
    """Raise UserError if a tracker that the options ask for could not start here."""
    for name in config.run.trackers:
        KINDS[name].check(config)


def open_trackers(config: Config) -> dict[str, Tracker]:
    """Start the trackers that the options ask for; return them by the name of the option.

    Raise UserError if a tracker cannot start; the trackers started before it are closed.
    """
    earlier = _earlier_runs(config)
    opened = dict[str, Tracker]()
    with contextlib.ExitStack() as on_error:
        for name in config.run.trackers:
            opened[name] = KINDS[name](config, earlier.get(name))
            on_error.callback(opened[name].close)
        runs = {
            name: {"store": getattr(config.run, name), "run": tracker.run_id}
            for name, tracker in opened.items()
            if tracker.run_id
        }
        if runs:
            write_file(config.run.tracked_runs, json.dumps(runs, indent=1) + "\n")
        on_error.pop_all()
    return opened


def _earlier_runs(config: Config) -> dict[str, str]:
    """Return the identifiers, by tracker, of the runs that a resumed run continues.

    A tracker is left out if its option names another store than before.
    """
    path = config.run.tracked_runs
    if not config.run.resume or config.run.load_weights_only or not os.path.isfile(path):
        return {}
    found: dict[str, str] = {}
    for name, entry in families.read_object(path).items():
        if not isinstance(entry, dict) or not RUN_ID.fullmatch(str(entry.get("run"))):
            raise UserError(f"{path} names no run of {name}: remove it to begin new runs")
        if entry.get("store") == getattr(config.run, name, None):
            found[name] = entry["run"]
    return found


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl by name.

    A list NAME by stage becomes NAME/0, NAME/1, ...; a dict becomes NAME/KEY. None is left out.
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        parts = dict(enumerate(value)) if isinstance(value, list) else value
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
