"""Where a run's rows also go: TensorBoard, Weights & Biases, MLflow.

    for name, tracker in open_trackers(config).items():
        tracker.write(120, {"loss": 3.21})     # step, numbers by name
        tracker.close()

Weights & Biases reads its own variables, as WANDB_MODE=offline. Each package is imported only if it
is asked for; one that is missing is a UserError.
"""

import importlib
import os
import threading
from typing import Any, Protocol

from config.messages import UserError
from config.schema import Config


class Tracker(Protocol):
    """What takes a run's numbers; its methods may raise OSError."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step, by name."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in OUT/tensorboard."""

    def __init__(self, config: Config):
        _silence_threads("tensorboard.")
        writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(os.path.join(config.run.out, "tensorboard"))

    def write(self, step: int, values: dict[str, float]) -> None:
        """As scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project --wandb; its files are in OUT/wandb."""

    def __init__(self, config: Config):
        module = _package("wandb", "wandb")
        out, facts = config.run.out, config.as_dict()
        self._run = module.init(project=config.run.wandb, dir=out, config=facts)

    def write(self, step: int, values: dict[str, float]) -> None:
        """As one row of history."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class MLflow:
    """A run in the store --mlflow: a folder, or an address."""

    def __init__(self, config: Config):
        self._module = module = _package("mlflow", "mlflow")
        store = config.run.mlflow
        self._client = module.MlflowClient(tracking_uri=store)
        found = self._client.get_experiment_by_name("trine")
        experiment = found.experiment_id if found else self._client.create_experiment("trine")
        self._run = self._client.create_run(experiment, run_name=config.run.out).info.run_id
        for group, options in config.as_dict().items():
            for name, value in options.items():
                self._client.log_param(self._run, f"{group}.{name}", value)

    def write(self, step: int, values: dict[str, float]) -> None:
        """As metrics."""
        try:
            for name, value in values.items():
                self._client.log_metric(self._run, name, value, step=step)
        except self._module.exceptions.MlflowException as error:  # a server that does not answer
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


KINDS: dict[str, type] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def open_trackers(config: Config) -> dict[str, Tracker]:
    """Those that the options ask for, by the option's name; UserError if a package is missing."""
    return {name: kind(config) for name, kind in KINDS.items() if getattr(config.run, name)}


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


def _silence_threads(of_modules: str) -> None:
    """Print no traceback of a package's threads: its next call raises the exception again."""
    usual = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith(of_modules):
            usual(failed)

    threading.excepthook = hook
