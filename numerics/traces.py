"""The files of --trace-numerics (telemetry/numerics_trace.py), and how two of them differ.

A row of a file is a sketch: count, sum, sum of squares, largest magnitude, 8 projections. The root
mean square of the differences of the projections estimates the norm of the difference of the two
tensors. `Pair.rows` compares it with a tolerance, in the order of execution:

    weights before      the rounding of the masters, and a drift that grows with the steps
    activations,        FACTOR x the response that the perturbed passes measured, times the units in
    gradients           the last place by which the weights differ already, plus one rounding of the
                        tensor in the coarser precision. The response is the smaller one of both
                        runs, since a fault may enlarge its own; of two precisions, the larger one
    optimizer state     FACTOR x the relative response of the gradient, times the state's norm; for
                        squares twice the response, relative to the largest gradient
    updates             Adam divides by the gradient's size, so rounding turns the signs of small
                        gradients: the square root of the relative response, times the update's
                        norm
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from config.messages import UserError

FORMAT = 1
EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
# Times the measured response. Weights that have drifted apart in the steps before differ most in a
# few tensors, whereas the response is to a change of all weights: of 278 pairs of right runs,
# 11 differ by up to 12 times the response (benchmarks/results/planted_faults.md).
FACTOR = 20.0
OF_SKETCHES = 1e-14  # of a tensor's norm: the order in which ranks add changes a sketch so much
COUNT, SQUARES, LARGEST, PROJECTIONS = 0, 2, 3, 4  # columns of a sketch
EXACT = ("tokens", "labels")
SQUARED = ("exp_avg_sq", "row_var", "col_var")
GRADIENT, BEFORE, AFTER = 0, 1, -1  # kinds of parameters' rows; between them the optimizer's state
TINY = 1e-300


class Trace:
    """One file: activations (tensors, bins, 12), parameters (kinds, tensors, 12), what the file
    says about the step, and the responses of activations and gradients.
    """

    def __init__(self, path: Path):
        """Raise UserError if the file is none of --trace-numerics, or of another format."""
        try:
            with np.load(path) as held:
                values = held["values"]
                response = held["response"]
                self.about: dict[str, Any] = json.loads(held["about"].tobytes())
            names = self.about["activations"]
            cut = len(names) * self.about["bins"]
            shape = len(self.about["kinds"]), len(self.about["parameters"]), values.shape[1]
            self.parameters = values[cut:].reshape(shape)
            self.activations = values[:cut].reshape(len(names), -1, values.shape[1])
            self.moved = response[:cut].reshape(self.activations.shape)
            self.moved_gradients = response[cut:]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} is no file of --trace-numerics: {error}") from None
        if self.about.get("format") != FORMAT:
            found = f"{path} has format {self.about.get('format')}"
            raise UserError(f"{found}, but this program reads format {FORMAT}")


@dataclass(frozen=True)
class Row:
    """A tensor in two traces: its difference, and the difference that rounding explains.

    kind: "activation", or that of a parameter. norm: of the tensor. bins: those of the samples in
    which the difference is larger than rounding explains.
    """

    kind: str
    name: str
    difference: float
    explained: float
    norm: float
    bins: tuple[int, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the difference is larger than rounding explains, or not a number."""
        return not self.difference <= self.explained

    @property
    def relative(self) -> float:
        """The difference over the tensor's norm."""
        return self.difference / (self.norm + TINY)


class Pair:
    """The traces of one step of two runs."""

    def __init__(self, a: Trace, b: Trace):
        self.a = a
        self.b = b
        precisions = {a.about["precision"], b.about["precision"]}
        self.epsilon = max(EPSILON[name] for name in precisions)
        self.response = np.minimum if len(precisions) == 1 else np.maximum
        self.of_masters = EPSILON["fp64" if precisions == {"fp64"} else "fp32"]
        self.kinds, kinds_a, kinds_b = _common(a.about["kinds"], b.about["kinds"])
        tensors, tensors_a, tensors_b = _common(a.about["parameters"], b.about["parameters"])
        in_a = a.parameters[np.ix_(kinds_a, tensors_a)]
        in_b = b.parameters[np.ix_(kinds_b, tensors_b)]
        moved_a = norms(a.moved_gradients[tensors_a])
        moved_b = norms(b.moved_gradients[tensors_b])
        # Tensors without gradients count what routers chose: one choice that rounding turns moves
        # them by more than any response tells.
        kept = (in_a[GRADIENT, :, COUNT] > 0) & (in_b[GRADIENT, :, COUNT] > 0)
        self.tensors = list(compress(tensors, kept))
        self.both = in_a[:, kept], in_b[:, kept]
        self.moved = self.response(moved_a, moved_b)[kept]
        self.norm = np.sqrt(np.maximum(*self.both)[..., SQUARES])
        # The units in the last place by which the weights differ already; the response is to one.
        apart = np.linalg.norm(norms(self.both[0][BEFORE] - self.both[1][BEFORE]))
        unit = 0.5 * self.epsilon * np.linalg.norm(self.norm[BEFORE])
        self.factor = FACTOR * max(1.0, float(apart / (unit + TINY)))

    def rows(self) -> list[Row]:
        """Return the rows that both files have, in order of execution."""
        of_kind = self._parameters()
        before = of_kind.pop(BEFORE)
        return before + self._activations() + list(chain(*of_kind))

    def _parameters(self) -> list[list[Row]]:
        """Return the rows of every kind, in the order of the files."""
        a, b = self.both
        update_a = a[AFTER] - a[BEFORE]
        update_b = b[AFTER] - b[BEFORE]
        difference = norms(a - b)
        difference[AFTER] = norms(update_a - update_b)
        moved = self.moved + self.epsilon * self.norm[GRADIENT]
        relative = np.minimum(1.0, moved / (self.norm[GRADIENT] + TINY))
        drift = FACTOR * np.maximum(norms(update_a), norms(update_b)) * np.sqrt(relative)
        steps_before = self.a.about["step"] - 1
        rounding = self.of_masters * self.norm
        explained = self.factor * relative * self.norm
        explained[GRADIENT] = self.factor * self.moved + self.epsilon * self.norm[GRADIENT]
        explained[BEFORE] = rounding[BEFORE] + drift * steps_before
        explained[AFTER] = 2.0 * rounding[AFTER] + drift * self.factor / FACTOR
        largest = np.maximum(a, b)[GRADIENT, :, LARGEST]
        for number, kind in enumerate(self.kinds):
            if kind in SQUARED:
                share = 2.0 * moved / (largest + TINY)
                explained[number] = self.factor * share * self.norm[number]
        explained += OF_SKETCHES * self.norm
        found = []
        for number, kind in enumerate(self.kinds):
            columns = difference[number], explained[number], self.norm[number]
            numbers = zip(*(column.tolist() for column in columns))
            found.append([Row(kind, name, *of) for name, of in zip(self.tensors, numbers)])
        return found

    def _activations(self) -> list[Row]:
        """Return the rows of activations; none if the steps have other samples or bins."""
        if any(self.a.about[name] != self.b.about[name] for name in ("bins", "samples")):
            return []
        names, of_a, of_b = _common(self.a.about["activations"], self.b.about["activations"])
        a = self.a.activations[of_a]
        b = self.b.activations[of_b]
        norm = np.sqrt(np.maximum(a, b)[..., SQUARES])
        difference = norms(a - b)
        response = self.response(norms(self.a.moved[of_a]), norms(self.b.moved[of_b]))
        response += np.sqrt(np.square(response).mean(1, keepdims=True))
        explained = self.factor * response + self.epsilon * norm
        explained[[name in EXACT for name in names]] = 0.0
        explained += OF_SKETCHES * norm
        missing = (a[..., COUNT] == 0) | (b[..., COUNT] == 0)
        share = difference / (explained + TINY)
        worst = np.nan_to_num(share, nan=np.inf).argmax(1)
        found = []
        for i, name in enumerate(names):
            if missing[i].any():
                continue
            at = worst[i]
            found.append(
                Row(
                    "activation",
                    name,
                    float(difference[i, at]),
                    float(explained[i, at]),
                    float(norm[i, at]),
                    tuple(np.flatnonzero(~(difference[i] <= explained[i])).tolist()),
                )
            )
        return found


def _common(a: Sequence[str], b: Sequence[str]) -> tuple[list[str], list[int], list[int]]:
    """Return the names in both lists, and their places in each."""
    names = [name for name in a if name in b]
    return names, [a.index(name) for name in names], [b.index(name) for name in names]


def norms(sketches: np.ndarray) -> np.ndarray:
    """Return the norms of tensors, or of their differences, as the projections estimate them."""
    return np.sqrt(np.square(sketches[..., PROJECTIONS:], dtype=float).mean(-1))
