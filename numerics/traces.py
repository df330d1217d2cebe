"""The files of --trace-numerics (telemetry/numerics_trace.py), and how two such files differ.

A row of a file is a tensor's sketch: count, sum, sum of squares, largest magnitude, 8 projections.
The root mean square of the differences of the projections estimates the norm of the difference of
two tensors. `Pair.rows` compares this estimate with a tolerance, in the order of execution. A
tensor's response is the norm by which it changed when the last bits of all weights were flipped.

    weights before      the rounding of the masters, and a drift that grows with the steps
    activations,        FACTOR x the response, times the units in the last place by which the
    gradients           weights differ already, plus one rounding of the tensor in the coarser
                        precision. The smaller response of both runs counts, since a fault may
                        enlarge the response; if the precisions differ, the larger response counts
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
# The relative distance of 1.0 from the next larger number, by precision.
EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
# The tolerance is this factor times the response. The response measures a small change of all
# weights, whereas weights that have drifted apart differ most in a few tensors: of 278 pairs of
# right runs, 11 differ by up to 12 times the response (benchmarks/results/planted_faults.md).
FACTOR = 20.0
OF_SKETCHES = 1e-14  # error of a sketch relative to the norm: ranks are added in different orders
COUNT, SQUARES, LARGEST, PROJECTIONS = 0, 2, 3, 4  # columns of a sketch
EXACT = ("tokens", "labels")  # activations that must not differ at all
SQUARED = ("exp_avg_sq", "row_var", "col_var")  # kinds of state that are means of squares
# Indices in the first axis of Trace.parameters; the kinds between BEFORE and AFTER are the
# optimizer's state.
GRADIENT, BEFORE, AFTER = 0, 1, -1
TINY = 1e-300  # is added to divisors that may be zero


class Trace:
    """The sketches of one file, 12 numbers each, and their changes with the last bits flipped.

    activations, moved: sketches and changes, (tensors, bins of samples, 12). parameters: (kinds,
    tensors, 12). moved_gradients: the changes of the parameters' gradients, (tensors, 12). about:
    names, layout, precision and number of the step.
    """

    def __init__(self, path: Path):
        """Read a file; raise UserError if it is none of --trace-numerics, or of another format."""
        try:
            with np.load(path) as arrays:
                values = arrays["values"]
                response = arrays["response"]
                self.about: dict[str, Any] = json.loads(arrays["about"].tobytes())
            names = self.about["activations"]
            activation_rows = len(names) * self.about["bins"]
            shape = len(self.about["kinds"]), len(self.about["parameters"]), values.shape[1]
            self.parameters = values[activation_rows:].reshape(shape)
            self.activations = values[:activation_rows].reshape(len(names), -1, values.shape[1])
            self.moved = response[:activation_rows].reshape(self.activations.shape)
            self.moved_gradients = response[activation_rows:]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} is no file of --trace-numerics: {error}") from None
        if self.about.get("format") != FORMAT:
            found = f"{path} has format {self.about.get('format')}"
            raise UserError(f"{found}, but this program reads format {FORMAT}")


@dataclass(frozen=True)
class Row:
    """A tensor in two traces, with norms; an activation's norms are those of its worst bin."""

    kind: str  # "activation", or the kind of a parameter's tensor, such as "gradient"
    name: str
    difference: float  # the norm of the difference of the two tensors
    explained: float  # the norm of the difference that rounding explains
    norm: float  # the tensor's norm, the larger one of the two traces
    bins: tuple[int, ...] = ()  # bins of samples whose difference rounding does not explain

    @property
    def differs(self) -> bool:
        """Whether the difference is larger than rounding explains, or not a number."""
        return not self.difference <= self.explained

    @property
    def relative(self) -> float:
        """The norm of the difference over the tensor's norm."""
        return self.difference / (self.norm + TINY)


class Pair:
    """The traces of the same step of two runs, reduced to the kinds and parameters of both.

    both: the parameters' sketches in a and in b, (kinds, tensors, 12). norm: the larger norms,
    (kinds, tensors). moved: the responses of the gradients, (tensors,).
    """

    def __init__(self, a: Trace, b: Trace):
        """Select what the traces of runs A and B have in common."""
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
        # Parameters without gradients, the routers' biases, count tokens per expert: a token that
        # rounding sends to another expert changes them by more than any response, so they are
        # left out.
        has_gradient = (in_a[GRADIENT, :, COUNT] > 0) & (in_b[GRADIENT, :, COUNT] > 0)
        self.tensors = list(compress(tensors, has_gradient))
        self.both = in_a[:, has_gradient], in_b[:, has_gradient]
        self.moved = self.response(moved_a, moved_b)[has_gradient]
        self.norm = np.sqrt(np.maximum(*self.both)[..., SQUARES])
        # The response was measured for weights that differ by one unit in the last place, so the
        # tolerance grows with the number of units by which the weights differ before the step.
        weights_a, weights_b = (sketches[BEFORE] for sketches in self.both)
        distance = np.linalg.norm(norms(weights_a - weights_b))
        unit = 0.5 * self.epsilon * np.linalg.norm(self.norm[BEFORE])
        self.factor = FACTOR * max(1.0, float(distance / (unit + TINY)))

    def rows(self) -> list[Row]:
        """Return the rows that both files have, in the order of execution."""
        rows_of_kinds = self._parameters()
        weights_before = rows_of_kinds.pop(BEFORE)
        return weights_before + self._activations() + list(chain(*rows_of_kinds))

    def _parameters(self) -> list[list[Row]]:
        """Return, per kind in the order of `self.kinds`, a row per parameter."""
        a, b = self.both
        update_a = a[AFTER] - a[BEFORE]
        update_b = b[AFTER] - b[BEFORE]
        difference = norms(a - b)
        difference[AFTER] = norms(update_a - update_b)
        # The change of the gradients that rounding explains, and its share of their norms.
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
        rows_of_kinds = []
        for number, kind in enumerate(self.kinds):
            columns = difference[number], explained[number], self.norm[number]
            norms_of_tensors = np.stack(columns, axis=1).tolist()
            rows = []
            for name, tensor_norms in zip(self.tensors, norms_of_tensors):
                rows.append(Row(kind, name, *tensor_norms))
            rows_of_kinds.append(rows)
        return rows_of_kinds

    def _activations(self) -> list[Row]:
        """Return a row per activation; no rows if the steps have different samples or bins."""
        if any(self.a.about[name] != self.b.about[name] for name in ("bins", "samples")):
            return []
        names, in_a, in_b = _common(self.a.about["activations"], self.b.about["activations"])
        a = self.a.activations[in_a]
        b = self.b.activations[in_b]
        norm = np.sqrt(np.maximum(a, b)[..., SQUARES])
        difference = norms(a - b)
        response = self.response(norms(self.a.moved[in_a]), norms(self.b.moved[in_b]))
        # A bin may by chance respond less than the others, so the mean of all bins is added.
        response += np.sqrt(np.square(response).mean(1, keepdims=True))
        explained = self.factor * response + self.epsilon * norm
        explained[[name in EXACT for name in names]] = 0.0
        explained += OF_SKETCHES * norm
        missing = (a[..., COUNT] == 0) | (b[..., COUNT] == 0)
        ratio = difference / (explained + TINY)
        worst_bins = np.nan_to_num(ratio, nan=np.inf).argmax(1)
        rows = []
        for i, name in enumerate(names):
            if missing[i].any():
                continue
            worst = i, worst_bins[i]
            wrong_bins = np.flatnonzero(~(difference[i] <= explained[i])).tolist()
            row = Row(
                kind="activation",
                name=name,
                difference=float(difference[worst]),
                explained=float(explained[worst]),
                norm=float(norm[worst]),
                bins=tuple(wrong_bins),
            )
            rows.append(row)
        return rows


def _common(a: Sequence[str], b: Sequence[str]) -> tuple[list[str], list[int], list[int]]:
    """Return the names that are in both lists, their places in `a`, and their places in `b`."""
    names = [name for name in a if name in b]
    return names, [a.index(name) for name in names], [b.index(name) for name in names]


def norms(sketches: np.ndarray) -> np.ndarray:
    """Return the norms of tensors, (...), as the projections of their sketches estimate them.

    sketches: (..., 12); the difference of two sketches gives the norm of the tensors' difference.
    """
    return np.sqrt(np.square(sketches[..., PROJECTIONS:], dtype=float).mean(-1))
