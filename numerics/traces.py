"""The files of --trace-numerics (telemetry/numerics_trace.py), and how two of them differ.

A row of a file is a sketch: count, sum, sum of squares, largest magnitude, 8 projections. The root
mean square of the differences of the projections estimates the norm of the difference of the two
tensors. `Pair.rows` compares it with a tolerance, in the order of execution:

    weights before      the rounding of the masters, and a drift that grows with the steps
    activations,        FACTOR x the response that the perturbed passes of either run measured,
    gradients           times the units in the last place by which the weights differ already,
                        plus one rounding of the tensor in the coarser precision
    optimizer state     FACTOR x the relative response of the gradient, times the state's norm; for
                        squares twice the response, relative to the largest gradient
    updates             Adam divides by the gradient's size, so rounding turns the signs of small
                        gradients: the square root of the relative response, times the update's
                        norm
"""

import json
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config.messages import UserError

FORMAT = 1
EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
FACTOR = 10.0  # times the measured response
OF_SKETCHES = 1e-14  # of a tensor's norm: the order in which ranks add changes a sketch so much
COUNT, SQUARES, LARGEST, PROJECTIONS = 0, 2, 3, slice(4, None)
EXACT = ("tokens", "labels")
SQUARED = ("exp_avg_sq", "row_var", "col_var")
BEFORE, GRADIENT, AFTER = "weights before", "gradient", "weights after"


class Trace:
    """One file. activations, parameters: rows by name; a parameter's name is (kind, tensor)."""

    def __init__(self, path: Path):
        """Raise UserError if the file is none of --trace-numerics, or of another format."""
        try:
            with np.load(path) as held:
                arrays = {name: held[name] for name in held.files}
            self.about: dict[str, Any] = json.loads(arrays["about"].tobytes())
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} is no file of --trace-numerics: {error}") from None
        if self.about.get("format") != FORMAT:
            found = f"{path} has format {self.about.get('format')}"
            raise UserError(f"{found}, but this program reads format {FORMAT}")
        names = self.about["activations"]
        self.activations = dict(zip(names, arrays["activations"]))
        self.responses = dict(zip(names, arrays["activations_response"]))
        self.parameters = {}
        for kind, rows in zip(self.about["kinds"], arrays["parameters"]):
            for name, row in zip(self.about["parameters"], rows):
                self.parameters[kind, name] = row
        changed = arrays["gradients_response"]
        self.of_gradient = dict(zip(self.about["parameters"], changed))

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number in the precision of computation."""
        return EPSILON[self.about["precision"]]


@dataclass(frozen=True)
class Row:
    """A tensor in two traces: its difference, and the difference that rounding explains.

    kind: "activation", or that of a parameter. relative: the difference over the tensor's norm.
    bins: the bins of samples in which the difference is larger than rounding explains.
    """

    kind: str
    name: str
    difference: float
    explained: float
    relative: float
    bins: tuple[int, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the difference is larger than rounding explains, or only one run has NaN."""
        return not self.difference <= self.explained


class Pair:
    """The traces of one step of two runs."""

    def __init__(self, a: Trace, b: Trace):
        self.a = a
        self.b = b
        self.epsilon = max(a.epsilon, b.epsilon)
        self.of_masters = EPSILON["fp32"]
        if a.about["precision"] == b.about["precision"] == "fp64":
            self.of_masters = EPSILON["fp64"]
        # Tensors without gradients count what routers chose: one choice that rounding turns moves
        # them by more than any response tells.
        of_b = {name for kind, name in b.parameters if b.parameters[GRADIENT, name][COUNT]}
        trained = [name for name in a.about["parameters"] if a.parameters[GRADIENT, name][COUNT]]
        self.tensors = [name for name in trained if name in of_b]
        self.factor = FACTOR * max(1.0, self._units())

    @property
    def bins(self) -> int:
        """The number of bins of the samples; 1 if the two files have other bins or samples."""
        same = all(self.a.about[n] == self.b.about[n] for n in ("bins", "samples"))
        return self.a.about["bins"] if same else 1

    def rows(self) -> Iterator[Row]:
        """Yield the rows that both files have, in order of execution."""
        for name in self.tensors:
            yield self._weights(name)
        for name in self.a.activations:
            row = self._activation(name)
            if row is not None:
                yield row
        kinds = self.a.about["kinds"]
        for kind in kinds[1:]:
            if kind in self.b.about["kinds"]:
                for name in self.tensors:
                    if kind != GRADIENT or self.a.parameters[kind, name][COUNT]:
                        yield self._parameter(kind, name)

    def _units(self) -> float:
        """Return by how many units in the last place the weights before the step differ."""
        difference = 0.0
        unit = 0.0
        for name in self.tensors:
            a, b = self._both(BEFORE, name)
            difference += distance(a, b) ** 2
            unit += max(a[SQUARES], b[SQUARES])
        return math.sqrt(difference) / (0.5 * self.epsilon * math.sqrt(unit) + 1e-300)

    def _both(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self.a.parameters[kind, name], self.b.parameters[kind, name]

    def _response(self, name: str) -> tuple[float, float]:
        """Return how far rounding moves a tensor's gradient: over its norm, over its largest."""
        a, b = self._both(GRADIENT, name)
        moved = max(norm_of(trace.of_gradient[name]) for trace in (self.a, self.b))
        moved += self.epsilon * math.sqrt(max(a[SQUARES], b[SQUARES]))
        norm = math.sqrt(max(a[SQUARES], b[SQUARES]))
        largest = max(a[LARGEST], b[LARGEST])
        return min(1.0, moved / (norm + 1e-300)), moved / (largest + 1e-300)

    def _update(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the projections of both runs' updates of a tensor."""
        after, before = self._both(AFTER, name), self._both(BEFORE, name)
        a, b = (x[PROJECTIONS] - y[PROJECTIONS] for x, y in zip(after, before))
        return a, b

    def _drift(self, name: str) -> float:
        """Return the difference of a tensor's updates in one step that rounding explains."""
        size = max(map(_root_mean_square, self._update(name)))
        return self.factor * size * math.sqrt(self._response(name)[0])

    def _weights(self, name: str) -> Row:
        a, b = self._both(BEFORE, name)
        norm = math.sqrt(max(a[SQUARES], b[SQUARES]))
        size = max(map(_root_mean_square, self._update(name)))
        drift = FACTOR * size * math.sqrt(self._response(name)[0])
        explained = self.of_masters * norm + drift * (self.a.about["step"] - 1)
        return _row(BEFORE, name, distance(a, b), explained, norm)

    def _activation(self, name: str) -> Row | None:
        """Return the row of an activation; None if one of the files does not have it."""
        if name not in self.b.activations:
            return None
        a, b = self.a.activations[name], self.b.activations[name]
        if self.bins != len(a):
            a, b = a.sum(0, keepdims=True), b.sum(0, keepdims=True)
        if not (a[:, COUNT].all() and b[:, COUNT].all()):
            return None
        difference = np.sqrt(np.square((a - b)[:, PROJECTIONS]).mean(1))
        norm = np.sqrt(np.maximum(a, b)[:, SQUARES])
        explained = np.zeros(len(a))
        if name not in EXACT:
            moved = [trace.responses[name][:, PROJECTIONS] for trace in (self.a, self.b)]
            each = [np.sqrt(np.square(one, dtype=float).mean()) for one in moved]
            explained = self.factor * max(each) + self.epsilon * norm
            if self.bins == len(moved[0]):
                own = [np.sqrt(np.square(one, dtype=float).mean(1)) for one in moved]
                explained += self.factor * np.maximum(*own)
        explained += OF_SKETCHES * norm
        bins = tuple(int(i) for i in np.flatnonzero(~(difference <= explained)))
        worst = int(np.argmax(np.nan_to_num(difference / (explained + 1e-300), nan=np.inf)))
        found = float(difference[worst]), float(explained[worst]), float(norm[worst])
        return _row("activation", name, *found, bins)

    def _parameter(self, kind: str, name: str) -> Row:
        a, b = self._both(kind, name)
        norm = math.sqrt(max(a[SQUARES], b[SQUARES]))
        relative, of_largest = self._response(name)
        explained = self.factor * relative * norm
        difference = distance(a, b)
        if kind == GRADIENT:
            moved = max(norm_of(trace.of_gradient[name]) for trace in (self.a, self.b))
            explained = self.factor * moved + self.epsilon * norm
        elif kind in SQUARED:
            explained = 2.0 * self.factor * of_largest * norm
        elif kind == AFTER:
            difference = _root_mean_square(np.subtract(*self._update(name)))
            explained = self._drift(name) + 2.0 * self.of_masters * norm
        return _row(kind, name, difference, explained, norm)


def _row(
    kind: str, name: str, difference: float, explained: float, norm: float, bins: tuple = ()
) -> Row:
    explained += OF_SKETCHES * norm
    return Row(kind, name, difference, explained, difference / (norm + 1e-300), bins)


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values, dtype=float).mean()))


def norm_of(sketch: np.ndarray) -> float:
    """Return the norm of a tensor as its projections estimate it."""
    return _root_mean_square(sketch[PROJECTIONS])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the norm of the difference of two tensors as their projections estimate it."""
    return _root_mean_square((a - b)[PROJECTIONS])


def traced_steps(run: Path) -> dict[int, Path]:
    """Return the files of a run's traced steps by the number of the step."""
    paths = sorted((run / "numerics").glob("step-*.npz"))
    return {int(path.stem.removeprefix("step-")): path for path in paths}
