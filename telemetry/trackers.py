"""Where a run's rows also go: TensorBoard, Weights & Biases, MLflow.

    check(config)                          before the ranks meet: packages, stores, credentials
    for name, tracker in open_trackers(config).items():
        tracker.write(120, {"loss": 3.21})     # step, a row of metrics.jsonl
        tracker.close()

OUT/trackers.json has the identifiers of the runs in Weights & Biases and MLflow: a resumed run goes
on in them. Weights & Biases reads its own variables, as WANDB_MODE=offline. Each package is
imported only if it is asked for; what keeps a tracker from starting is a UserError.
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
NOT_IN_NAMES = re.compile(r"[^\w./ :-]")  # of MLflow's metrics


class Tracker(Protocol):
    """What takes a run's numbers; its methods may raise OSError.

    run_id: the run in the tracker, which a resumed run goes on in; empty: the tracker has none.
    """

    run_id: str

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Take a row of metrics.jsonl, for a step."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in OUT/tensorboard; those of a resumed run lie beside the earlier ones."""

    run_id = ""

    def __init__(self, config: Config, earlier: str | None):
        _silence_threads("tensorboard.")
        writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(os.path.join(config.run.out, "tensorboard"))

    @staticmethod
    def check(config: Config) -> None:
        """Raise UserError without the package; torch, which uses it, is not imported yet."""
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError("--tensorboard needs the package tensorboard")

    def write(self, step: int, row: dict[str, Any]) -> None:
        """As scalars."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project --wandb; its files are in OUT/wandb."""

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
        """Raise UserError without the package, or if there is nobody to log in as."""
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
        """As one row of history."""
        try:
            self._run.log(numbers(row), step=step)
        except self._failure as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class MLflow:
    """A run in the store --mlflow: an address, or a folder, which then has mlflow.db (SQLite)."""

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
        """Raise UserError without the package, or if the store does not open."""
        _mlflow_store(config)

    def write(self, step: int, row: dict[str, Any]) -> None:
        """As metrics, in one transaction."""
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
    """MLflow, its client of the store --mlflow, and the experiment `trine` there, which is made."""
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
    """Make the folder; UserError if that fails, or if it has files of MLflow's former store."""
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
    """A name that MLflow takes: one of a corpus has its path in it."""
    return re.sub("/+", "/", NOT_IN_NAMES.sub("_", name))


KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def check(config: Config) -> None:
    """Raise UserError if a tracker that the options ask for could not start here."""
    for name in config.run.trackers:
        KINDS[name].check(config)


def open_trackers(config: Config) -> dict[str, Tracker]:
    """Those that the options ask for, by the option's name; UserError if one cannot start."""
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
    """By tracker, the run of OUT that --resume continues, if it is in the same store."""
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
    """The numbers of a row of metrics.jsonl; those of a list by stage, as NAME/0, NAME/1, and
    those of a table by name.
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
    """Turn a tracker's own exception, and that of a package it lacks, into a UserError."""
    try:
        yield
    except failure as error:
        raise UserError(f"{option}: {' '.join(str(error).split()):.300}") from None
    except ModuleNotFoundError as error:
        raise UserError(f"{option} needs a further package: {error}") from None


def _silence_threads(of_modules: str) -> None:
    """Print no traceback of a package's threads: its next call raises the exception again."""
    usual = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith(of_modules):
            usual(failed)

    threading.excepthook = hook
