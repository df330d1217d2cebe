"""The files of --trace-numerics (telemetry/numerics_trace.py), and how two such files differ.

A row of a file is a tensor's sketch: count, sum, sum of squares, largest magnitude, 8 projections.
The norm of the differences of the projections estimates the norm of the difference of two tensors.
`Pair.rows` compares this estimate with a tolerance, in the order of execution. A tensor's response
is the relative norm by which it changed when the last bits of all weights were flipped, in the
first traced step. An activation has a sketch for each bin, a range of the step's samples. A kind is
a tensor that belongs to a parameter: gradient, weights before, a state such as exp_avg, weights
after. Masters are the weights that the optimizer updates. The tolerances are:

    weights before      the rounding of the masters, and a drift that grows with the steps
    activations,        FACTOR x the response x the norm, times the units in the last place by which
    gradients           the weights differ already, plus one rounding of the tensor in the coarser
                        precision. The smaller response of both runs counts, since a fault may
                        enlarge the response; if the precisions differ, the larger response counts
    optimizer state     FACTOR x the response of the gradient, times the state's norm; for squares
                        twice the response, relative to the largest gradient. 8-bit state has a
                        limited number of values, and rounding may move an element to the next one
    updates             Adam divides by the gradient's size, so rounding turns the signs of small
                        gradients: the square root of the response, times the update's norm. Muon
                        computes the updates of matrices in bf16. The bias of queries, keys and
                        values may have any update, as that of keys follows rounding alone
"""

import io
import json
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import FileError, RunError
from base.regular_files import open_regular
from config.schema import Layout
from corpora.mapped_files import read_header
from tools.numerics.checks import fits, is_texts, is_whole

FORMAT = 2
MOST_BYTES = 2**28  # the most bytes of an array of a trace, which telemetry keeps below 1 MB
MOST_SAMPLES = 2**24  # the most samples of a step
MOST_RANKS = 2**20  # the most ranks of a run
# The relative distance of 1.0 from the next larger number, by precision.
EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
# The tolerance is this factor times the response. The response measures a small change of all
# weights, whereas weights that have drifted apart differ most in a few tensors: of 278 pairs of
# right runs, 11 differ by up to 12 times the response (benchmarks/results/planted_faults.md).
FACTOR = 20.0
# The relative distance of neighbouring values in 8-bit optimizer state: the norm of the distances
# of all elements, relative to the state's norm. The values of bitsandbytes are 1.4 % of the largest
# element apart, but up to 14 % of smaller elements.
EIGHT_BITS = 2.0**-4
# The rounding error of a sketch itself, relative to the tensor's norm: layouts add the sketches of
# the ranks in different orders.
OF_SKETCHES = 1e-14
# The places of these numbers in a sketch; the projections are the numbers from PROJECTIONS on.
COUNT, SQUARES, LARGEST, PROJECTIONS = 0, 2, 3, 4
EXACT = ("tokens", "labels")  # activations that must not differ at all
SQUARED = ("exp_avg_sq", "row_var", "col_var")  # kinds of state that are means of squares
# The places of these kinds in every list of kinds: the gradient is first, the weights before the
# step second, the weights after it last. The kinds between them are the optimizer's state.
GRADIENT, BEFORE, AFTER = 0, 1, -1
TINY = 1e-300  # this number is added to divisors that may be zero


class Trace:
    """The sketches of one file, 12 numbers each, and the responses to rounding.

    activations: sketches, (tensors, bins of samples, 12). parameters: (kinds, tensors, 12).
    responses, of_gradients: of the activations, and of the parameters' gradients, (tensors,).
    about: names, layout, precision, number of the step and of the step with the response.
    """

    def __init__(self, about: dict[str, Any], values: np.ndarray, responses: np.ndarray):
        """Take the contents of a file: facts, (rows, 12) sketches, (tensors,) responses."""
        self.about = about
        names = about["activations"]
        rows = len(names) * about["bins"]  # the rows of activations; the parameters' rows follow
        shape = len(about["kinds"]), len(about["parameters"]), values.shape[1]
        self.activations = values[:rows].reshape(len(names), -1, values.shape[1])
        self.parameters = values[rows:].reshape(shape)
        self.responses = responses[: len(names)]
        self.of_gradients = responses[len(names) :]

    @property
    def stages(self) -> int:
        """The number of stages of the run's pipeline."""
        return Layout(**self.about["layout"]).stages


def read(path: Path) -> Trace:
    """Read a file of --trace-numerics; raise UserError if it is another file, or another format."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            about = json.loads(_array(archive, "about", "u1", 1).tobytes())
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                found = about.get("format") if isinstance(about, dict) else about
                raise RunError(
                    f"{path} has format {found!r:.80}, but this program reads format {FORMAT}"
                )
            _check_about(about)
            values = _array(archive, "values", "f8", 2)
            responses = _array(archive, "response", "f4", 1)
        _check_sizes(about, values, responses)
        return Trace(about, values, responses)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        raise RunError(f"{path} is no file of --trace-numerics: {error}") from None


def _array(archive: zipfile.ZipFile, name: str, kind: str, axes: int) -> np.ndarray:
    """Return an array of a .npz file, of numpy's type `kind` and with this number of axes.

    Raise ValueError, before memory is taken, if the array is compressed (a trace never is, and a
    small file could unpack to any size), or if its header does not fit the bytes that are there.
    """
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type != zipfile.ZIP_STORED or member.file_size > MOST_BYTES:
        raise ValueError(f"{name} is compressed, or has {member.file_size:,} bytes")
    data = archive.read(member)
    header = io.BytesIO(data)
    shape, is_fortran, dtype = read_header(header)
    if len(shape) != axes or dtype != np.dtype(kind) or is_fortran:
        raise ValueError(f"{name} has the shape {shape} of {dtype}")
    if any(size < 0 for size in shape):
        raise ValueError(f"{name} has the shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(data) - header.tell():
        raise ValueError(f"{name} has {len(data):,} bytes, which are not {shape} of {dtype}")
    return np.frombuffer(data, dtype, offset=header.tell()).reshape(shape)


def _check_about(about: dict[str, Any]) -> None:
    """Raise ValueError if a fact of a trace has another type or size than a run writes."""
    layout = about.get("layout")
    if isinstance(layout, dict):
        layout.pop("schedule_costs", None)  # an option of earlier versions, which says no size
    known = {field.name: field for field in fields(Layout)}
    right = {
        "activations": is_texts,
        "parameters": is_texts,
        "kinds": lambda value: is_texts(value) and len(value) >= 2,
        "bins": lambda value: is_whole(value, 1, MOST_SAMPLES),
        "samples": lambda value: is_whole(value, 1, MOST_SAMPLES),
        "step": is_whole,
        "response_step": is_whole,
        "precision": lambda value: isinstance(value, str) and value in EPSILON,
        "optimizer": lambda value: value is None or isinstance(value, str),
        "muon_dtype": lambda value: value is None or isinstance(value, str),
        "layout": lambda value: isinstance(value, dict) and value.keys() <= known.keys(),
    }
    for name, is_right in right.items():
        if not is_right(about.get(name)):
            raise ValueError(f"{name} is {about.get(name)!r:.80}")
    for name, value in (layout or {}).items():
        if not fits(known[name], value):
            raise ValueError(f"{name} of the layout is {value!r:.80}")
    sizes = Layout(**about["layout"])
    axes = sizes.axes.values()
    ranks = math.prod(axes) if all(is_whole(size, 1, MOST_RANKS) for size in axes) else 0
    if not is_whole(ranks, 1, MOST_RANKS) or not is_whole(sizes.micro_batch_size, 1):
        raise ValueError(f"the layout is {about['layout']!r:.80}")
    if not is_whole(sizes.stages_per_rank, 1, MOST_RANKS):
        raise ValueError(f"the layout has {sizes.stages_per_rank!r:.80} stages on a rank")


def _check_sizes(about: dict[str, Any], values: np.ndarray, responses: np.ndarray) -> None:
    """Raise ValueError unless the arrays have a row for each tensor that `about` names."""
    activations, parameters = len(about["activations"]), len(about["parameters"])
    rows = activations * about["bins"] + len(about["kinds"]) * parameters
    if values.shape[0] != rows or values.shape[1] <= PROJECTIONS:
        raise ValueError(f"its sketches are {values.shape}, and its facts name {rows} tensors")
    if len(responses) != activations + parameters:
        raise ValueError(
            f"it has {len(responses)} responses for {activations + parameters} tensors"
        )


@dataclass(frozen=True)
class TensorRow:
    """A tensor in two traces, with norms; an activation's norms are those of its worst bin."""

    kind: str  # "activation", or the kind of a parameter's tensor, such as "gradient"
    name: str
    difference: float  # the norm of the difference of the two tensors
    explained: float  # the norm of the difference that rounding explains
    norm: float  # the tensor's norm, the larger one of the two traces
    bins: tuple[int, ...] = ()  # bins of samples whose difference rounding does not explain
    only: str = ""  # "A" or "B" if the other run has no such tensor

    @property
    def differs(self) -> bool:
        """Whether one run lacks it, or it differs by more than rounding explains or by NaN."""
        return bool(self.only) or not self.difference <= self.explained

    @property
    def relative(self) -> float:
        """The norm of the difference over the tensor's norm."""
        return self.difference / (self.norm + TINY)


class Pair:
    """The traces of the same step of two runs, whose tensors are compared.

    both: the sketches of the parameters that both have, (kinds, tensors, 12). norm: the larger
    norms, (kinds, tensors). responses: those of the gradients, (tensors,).
    """

    def __init__(self, a: Trace, b: Trace, is_whole: bool = True):
        """Select what the traces of runs A and B have in common, and what one alone has.

        is_whole: whether both traces are of whole steps, so that a tensor that one of them lacks is
        a difference; otherwise such tensors are left out.
        """
        self.a = a
        self.b = b
        self.is_whole = is_whole
        precisions = {a.about["precision"], b.about["precision"]}
        self.epsilon = max(EPSILON[name] for name in precisions)  # of the coarser precision
        # Masters are in fp32, or in fp64 if both runs compute in fp64.
        self.of_masters = EPSILON["fp32"]
        if precisions == {"fp64"}:
            self.of_masters = EPSILON["fp64"]
        # A function that combines the responses of both runs. A fault may enlarge the response of
        # one run, so the smaller response counts; but if the precisions differ, the response of the
        # coarser precision counts, which is the larger one.
        self.response: np.ufunc = np.minimum
        if len(precisions) > 1:
            self.response = np.maximum
        has_8_bits = a.about.get("optimizer") == "adamw8bit"
        self.of_state = EIGHT_BITS if has_8_bits else 0.0
        self._select_parameters()
        # The response was measured for weights that differ by one unit in the last place, so the
        # tolerance grows with the number of units by which the weights differ before the step.
        weights_a, weights_b = (sketches[BEFORE] for sketches in self.both)
        distance = np.linalg.norm(norms(weights_a - weights_b))
        # `unit` is about the distance of weights that all differ in the last bit.
        unit = 0.5 * self.epsilon * np.linalg.norm(self.norm[BEFORE])
        units = float(distance / (unit + TINY))
        self.factor = FACTOR * max(1.0, units)

    def _select_parameters(self) -> None:
        """Set the kinds, the names and the sketches of the parameters that both traces have.

        Parameters without gradients, the routers' biases, count tokens per expert: a token that
        rounding sends to another expert changes them by more than any response, so they are left
        out.
        """
        a = self.a
        b = self.b
        self.kinds, kinds_a, kinds_b = _common(a.about["kinds"], b.about["kinds"])
        names, tensors_a, tensors_b = _common(a.about["parameters"], b.about["parameters"])
        in_a = a.parameters[np.ix_(kinds_a, tensors_a)]  # (kinds, tensors, 12)
        in_b = b.parameters[np.ix_(kinds_b, tensors_b)]
        has_gradient = _is_counted(in_a[GRADIENT]) & _is_counted(in_b[GRADIENT])
        self.tensors = list(compress(names, has_gradient))
        self.both = in_a[:, has_gradient], in_b[:, has_gradient]
        self.norm = np.sqrt(np.maximum(*self.both)[..., SQUARES])
        responses = self.response(a.of_gradients[tensors_a], b.of_gradients[tensors_b])
        self.responses = responses[has_gradient]

    def rows(self) -> list[TensorRow]:
        """Return the rows of all tensors in the order of execution.

        A step reads the weights, computes activations and gradients, and updates state and weights.
        A parameter that one run alone has is among the weights before the step, and one that has a
        gradient in one run alone is among the gradients.
        """
        rows_of_kinds = self._parameters()
        alone = self._parameters_alone() if self.is_whole else []
        rows_of_kinds[GRADIENT] += [row for row in alone if row.kind == self.kinds[GRADIENT]]
        weights_before = rows_of_kinds.pop(BEFORE)
        weights_before += [row for row in alone if row.kind == self.kinds[BEFORE]]
        return weights_before + self._activations() + list(chain(*rows_of_kinds))

    def _parameters_alone(self) -> list[TensorRow]:
        """Return a row for each parameter that has a gradient in one of the runs alone.

        Its kind is "gradient" if the other run has the parameter too, else that of the weights.
        """
        rows = []
        for run, trace, other in (("A", self.a, self.b), ("B", self.b, self.a)):
            gradients = other.parameters[GRADIENT]
            trained = set(compress(other.about["parameters"], _is_counted(gradients)))
            has_gradient = _is_counted(trace.parameters[GRADIENT])
            for number, name in enumerate(trace.about["parameters"]):
                if not has_gradient[number] or name in trained:
                    continue
                kind = GRADIENT if name in other.about["parameters"] else BEFORE
                norm = float(np.sqrt(trace.parameters[kind, number, SQUARES]))
                rows.append(TensorRow(self.kinds[kind], name, norm, 0.0, norm, only=run))
        return rows

    def _parameters(self) -> list[list[TensorRow]]:
        """Return, per kind in the order of `self.kinds`, a row per parameter.

        In place of the weights after the step, their updates (after less before) are compared.
        """
        a, b = self.both  # the sketches of both traces, (kinds, tensors, 12)
        difference = norms(a - b)  # (kinds, tensors)
        update_a = a[AFTER] - a[BEFORE]
        update_b = b[AFTER] - b[BEFORE]
        difference[AFTER] = norms(update_a - update_b)
        norm_of_update = np.maximum(norms(update_a), norms(update_b))
        explained = self._explained(norm_of_update)
        rows_of_kinds = []
        for number, kind in enumerate(self.kinds):
            columns = difference[number], explained[number], self.norm[number]
            rows = []
            for name, *numbers in zip(self.tensors, *columns):
                size, limit, norm = map(float, numbers)  # size, limit: of the difference
                rows.append(TensorRow(kind, name, size, limit, norm))
            rows_of_kinds.append(rows)
        return rows_of_kinds

    def _explained(self, norm_of_update: np.ndarray) -> np.ndarray:
        """Return the norms of differences that rounding explains, (kinds, tensors).

        These are the tolerances of the file's docstring. self.factor is FACTOR times the number of
        units in the last place by which the weights of the two runs differ already, at least 1.
        self.of_masters is the relative rounding of a master, and self.both are the sketches of both
        runs. norm_of_update: the larger norm of the parameters' updates in this step, (tensors,).
        """
        # The relative difference that rounding makes in a gradient, and with it in the state.
        relative = np.minimum(1.0, self.responses + self.epsilon)
        rounding = self.of_masters * self.norm  # one rounding of each master weight
        steps_before = self.a.about["step"] - 1  # steps in which the weights have drifted apart
        # How far rounding moves the update of a step.
        drift = norm_of_update * self._share_of_updates(relative)
        of_gradients = self.factor * self.responses + self.epsilon

        # All kinds get the tolerance of the optimizer's state; then the other kinds get theirs.
        explained = self.factor * relative * self.norm
        explained[GRADIENT] = of_gradients * self.norm[GRADIENT]
        explained[BEFORE] = rounding[BEFORE] + FACTOR * steps_before * drift
        explained[AFTER] = 2.0 * rounding[AFTER] + self.factor * drift

        # State that holds squares of gradients: if a gradient g changes by d, its square changes by
        # 2 g d. Divided by the largest square, that is at most 2 d / (the largest gradient).
        largest = np.maximum(*self.both)[GRADIENT, :, LARGEST]
        change = relative * self.norm[GRADIENT]
        share = 2.0 * change / (largest + TINY)
        for number, kind in enumerate(self.kinds):
            if kind in SQUARED:
                explained[number] = self.factor * share * self.norm[number]

        # An element of 8-bit state that is moved by d becomes the next value, at the distance s,
        # with a probability of d / s. That is d s in the mean of squares.
        state = slice(BEFORE + 1, AFTER)
        explained[state] += np.sqrt(self.of_state * explained[state] * self.norm[state])
        return explained + OF_SKETCHES * self.norm

    def _share_of_updates(self, relative: np.ndarray) -> np.ndarray:
        """Return how far rounding moves updates, relative to their norms, (tensors,).

        relative: the relative difference that rounding makes in the gradients, (tensors,).
        """
        share = np.sqrt(relative)
        about = self.a.about
        # A trace without the type is of torch's Muon, which computed updates in bf16.
        if about.get("optimizer") == "muon" and about.get("muon_dtype", "bf16") == "bf16":
            in_blocks = [name.startswith("blocks.") for name in self.tensors]
            share[in_blocks] = np.maximum(share[in_blocks], EPSILON["bf16"])
        # Without rotary positions the bias of keys has no gradient but rounding: it adds the same
        # number to all scores of a query, which softmax ignores.
        share[[name.endswith("qkv.bias") for name in self.tensors]] = 1.0
        return share

    def _activations(self) -> list[TensorRow]:
        """Return a row per activation; no rows if the steps have different samples or bins."""
        if any(self.a.about[name] != self.b.about[name] for name in ("bins", "samples")):
            return []
        names, in_a, in_b = _common(self.a.about["activations"], self.b.about["activations"])
        a = self.a.activations[in_a]  # (tensors, bins, 12)
        b = self.b.activations[in_b]
        norm = np.sqrt(np.maximum(a, b)[..., SQUARES])
        difference = norms(a - b)
        # self.response takes the smaller or the larger one of the two runs' responses.
        responses = self.response(self.a.responses[in_a], self.b.responses[in_b])
        # The response was measured over all bins together. A bin whose norm is small may change as
        # much as the other bins, so the bins' root mean square is added to its norm.
        root_mean_square = np.sqrt(np.square(norm).mean(1, keepdims=True))
        explained = self.factor * responses[:, None] * (norm + root_mean_square)
        explained += self.epsilon * norm  # one rounding of the activation itself
        explained[[name in EXACT for name in names]] = 0.0  # tokens and labels must be equal
        explained += OF_SKETCHES * norm
        # The row shows the bin that exceeds its tolerance most; NaN exceeds everything.
        ratio = difference / (explained + TINY)
        worst_bins = np.nan_to_num(ratio, nan=np.inf).argmax(1)
        # An activation that one of the runs does not have has counted no element at all. A bin that
        # is empty in one run alone is a sample that this run has not read: it differs as a whole.
        exists = np.minimum(a[..., COUNT].max(1), b[..., COUNT].max(1)) > 0
        rows = []
        for i, name in enumerate(names):
            if not exists[i]:
                continue
            worst = i, worst_bins[i]
            is_explained = difference[i] <= explained[i]
            row = TensorRow(
                kind="activation",
                name=name,
                difference=float(difference[worst]),
                explained=float(explained[worst]),
                norm=float(norm[worst]),
                bins=tuple(np.flatnonzero(~is_explained).tolist()),
            )
            rows.append(row)
        return rows + (self._activations_alone() if self.is_whole else [])

    def _activations_alone(self) -> list[TensorRow]:
        """Return a row for each activation of which one of the runs has counted no element."""
        of_a, of_b = (_counted_activations(trace) for trace in (self.a, self.b))
        rows = []
        for run, own, other in (("A", of_a, of_b), ("B", of_b, of_a)):
            for name in own.keys() - other.keys():
                norms_of_bins = np.sqrt(own[name][:, SQUARES])
                norm = float(norms_of_bins.max())
                bins = tuple(np.flatnonzero(_is_counted(own[name])).tolist())
                rows.append(TensorRow("activation", name, norm, 0.0, norm, bins, run))
        return sorted(rows, key=lambda row: row.name)


def _counted_activations(trace: Trace) -> dict[str, np.ndarray]:
    """Return the sketches of the activations that a trace has, (bins, 12), by name."""
    named = zip(trace.about["activations"], trace.activations)
    return {name: sketches for name, sketches in named if _is_counted(sketches).any()}


def _is_counted(sketches: np.ndarray) -> np.ndarray:
    """Return whether each tensor exists, (...): its sketch, (..., 12), has counted an element."""
    return sketches[..., COUNT] > 0


def _common(a: Sequence[str], b: Sequence[str]) -> tuple[list[str], list[int], list[int]]:
    """Return the names that are in both lists, their places in `a`, and their places in `b`."""
    names = [name for name in a if name in b]
    places_in_a = [a.index(name) for name in names]
    places_in_b = [b.index(name) for name in names]
    return names, places_in_a, places_in_b


def norms(sketches: np.ndarray) -> np.ndarray:
    """Return the norms of tensors, (...), as the projections of their sketches estimate them.

    sketches: (..., 12); the difference of two sketches gives the norm of the tensors' difference.
    """
    return np.sqrt(np.square(sketches[..., PROJECTIONS:]).sum(-1))
