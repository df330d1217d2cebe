"""What a difference usually is: the operations before a tensor, and explanations that fit.

    title(key)                                    the tensor in words
    operations(reference, key, layout)            what computes it from the tensors before it
    explanations(reference, difference, layout)   "as if the sum over tp were missing", ...
    shared(outcomes)                              what all layouts that differ have, and no other

An explanation is tried on the values: if the ranks of tp hold terms whose sum is one rank's tensor,
then their sum was left out.
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from config.schema import Layout
from tools.checker.compare import Difference, Reference, TensorPart, groups_along
from tools.checker.layouts import AnyLayout, axes_of
from tools.checker.programs import ProgramLayout
from tools.checker.recorder import AFTER, GRADIENT, IN_USE, Key, without_call

CLOSE = 1e-6  # an explanation fits if no element is farther off, relative to the largest one
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
LEAST_FITTED = 8  # elements that a factor is fitted to: fewer fit by chance
INNER = ("input", "output")
# What a layout does, by the conditions of words.toml.
DOES: dict[str, Callable[[Layout], bool]] = {
    "tp": lambda x: x.tp > 1,
    "cp": lambda x: x.cp > 1,
    "pp": lambda x: x.pp > 1,
    "ep": lambda x: (x.ep or 1) > 1,
    "replicas": lambda x: _replicas(x) > 1,
    "sequence_parallel": lambda x: bool(x.sequence_parallel),
    "zb": lambda x: x.splits_backward,
    "zero2": lambda x: x.zero == 2 and _replicas(x) > 1,
    "zero3": lambda x: x.zero == 3 and _replicas(x) > 1,
    "several": lambda x: x.tp * _replicas(x) > 1,
    "sharded": lambda x: x.zero > 0 and _replicas(x) > 1,
}


def _replicas(layout: Layout) -> int:
    """Return the ranks that hold the same parameters."""
    return layout.cp * (layout.dp or 1)


def title(key: Key) -> str:
    """Return a tensor in words, without its step."""
    _, kind, name = key
    if kind == "number":
        return f"the {name}"
    if kind == GRADIENT:
        return f"the gradient of {name}, after its reduction"
    if kind == IN_USE:
        return f"the weights {name} with which the pass computes"
    if kind == AFTER:
        drawn = key[0] == 0
        return f"the weights {name} as drawn" if drawn else f"the update of {name}"
    if kind.startswith("gradient of "):
        return f"the gradient of the {kind.removeprefix('gradient of ')} of {name}"
    if (kind, name) == ("output", "head"):
        return "the output of head: the loss of each token"
    if kind in ("output", "input"):
        return f"the {kind} of {name}" if name not in ("tokens", "labels") else f"the {name}"
    return f"the optimizer's {kind} of {name}"


def operations(reference: Reference, key: Key, layout: AnyLayout) -> str:
    """Return the operations between a tensor and those that it is computed from, for a layout."""
    step, kind, name = key
    if isinstance(layout, ProgramLayout):
        return _of_program(key, layout)
    if kind == "number":
        return WORDS["number"].get(name, WORDS["number"]["other"])
    words = WORDS["parameter"]
    if step == 0 or (step == 1 and kind == IN_USE):
        return _for(words["drawn"], layout)
    if kind == AFTER and re.search(r"router\.(bias|load)", name):
        return words["router"]
    if kind in words:
        text = words[kind]
        if kind == GRADIENT and (use := _use(reference, key)):
            text = text.replace(words["product"], f"the backward of {use}")
        if ".experts." in name:
            text = text.replace(words["replicas"], words["replicas_of_experts"])
        return _for(text, layout)
    if kind.startswith("gradient of "):
        return _backward(reference, key, layout)
    if kind in ("output", "input"):
        text = _forward(reference, key)
        is_read = name in ("tokens", "labels")
        return _for(text + ("" if is_read else "{zero3:, ZeRO's gather of the weights}"), layout)
    return words["state"]


def _of_program(key: Key, layout: ProgramLayout) -> str:
    """Return what computes a tensor of another program, by words.toml."""
    step, kind, name = key
    words = WORDS["program"]
    what = name if kind == "number" else kind
    if kind == AFTER and step == 0:
        what = "drawn"
    text: str = words.get(what, words["state"])
    axes = " and ".join(layout.axes)
    text = re.sub(r"\{axes:([^{}]*)\}", lambda match: match[1] if axes else "", text)
    return text.replace("NAME", name).replace("AXES", axes)


def _use(reference: Reference, key: Key) -> str:
    """Return what a module that has layers of its own computes with a parameter; else nothing."""
    step, _, name = key
    module = name.rpartition(".")[0]
    if not any(
        other.startswith(f"{module}.") for _, kind, other in reference.order if kind in INNER
    ):
        return ""
    if module.endswith(".attention"):
        return _forward(reference, (step, "input", f"{module}.out"))
    return _forward(reference, (step, "output", module))


def _backward(reference: Reference, key: Key, layout: Layout) -> str:
    """Return the operations of the backward pass before the gradient of an input or an output."""
    step, kind, name = key
    forward = kind.removeprefix("gradient of ")
    if without_call(key)[2] == "head" and forward == "output":
        return WORDS["backward"]["losses"]
    if name.endswith(".mtp.norm") and forward == "output":
        return WORDS["backward"]["predicted"]
    after = without_call(_after(reference, (step, forward, name)))
    if after[2].endswith(".router.choice"):
        return _for(WORDS["backward"]["experts"], layout)
    words = [f"the backward of {_for(_forward(reference, after), layout)}"]
    if layout.pp > 1:
        words.append("the message between stages")
    if layout.tp > 1 and _is_column(after):
        words.append("the sum over tp of its input's gradient")
    return ", ".join(words)


def _is_column(key: Key) -> bool:
    """Return whether a tensor is computed by a matrix whose rows tp splits, from a whole input."""
    _, kind, name = key
    return kind == "output" and bool(re.search(r"\.(qkv|up|kv_b|q)$|^head$|norms\.\d$", name))


def _after(reference: Reference, key: Key) -> Key:
    """Return the tensor of the forward pass that one rank computes next, from this one."""
    step = key[0]
    order = [k for k in reference.order if k[0] == step and k[1] in ("input", "output")]
    place = order.index(key) if key in order else -1
    return order[place + 1] if 0 <= place < len(order) - 1 else key


def _forward(reference: Reference, key: Key) -> str:
    """Return the operations that compute a tensor of the forward pass, by words.toml."""
    step, kind, name = without_call(key)
    text = f"{kind} {name}"
    if name.endswith(".mlp") and (step, "output", f"{name}.router.weights") in reference.tensors:
        text += " experts" if kind == "output" else ""
    for pattern, words in WORDS["forward"].items():
        if re.fullmatch(pattern, text):
            return words
    return f"the module {name}" if kind == "output" else f"what comes before the module {name}"


def _for(text: str, layout: Layout) -> str:
    """Return the text without the operations that the layout does not do."""
    return re.sub(
        r"\{(\w+):([^{}]*)\}", lambda match: match[2] if DOES[match[1]](layout) else "", text
    )


# ---- Explanations of the values ------------------------------------------------------------------


def explanations(reference: Reference, difference: Difference, layout: AnyLayout) -> list[str]:
    """Return the explanations that fit the first tensor that differs, the best first."""
    wrong = difference.wrong
    if not wrong:
        return []
    if not all(np.isfinite(part.piece.values).all() for part in wrong):
        return ["it has numbers that are not finite"]
    found: list[str] = []
    for explain in (
        _missing_before,
        _missing_sums,
        _repeated_terms,
        _counted_again,
        _wrong_factors,
        _stale_steps,
        _wrong_vectors,
        _wrong_elements,
    ):
        found += explain(reference, difference, layout)
    return list(dict.fromkeys(found))[:2]


def _scale(reference: Reference, key: Key) -> float:
    """Return the size of a tensor of one rank, by which differences are divided; never 0."""
    return max(reference.scales[key], 1e-300)


def _fits(values: np.ndarray, expected: np.ndarray, scale: float) -> bool:
    """Return whether all values are as expected, up to CLOSE times `scale`."""
    return values.shape == expected.shape and bool(np.abs(values - expected).max() <= CLOSE * scale)


def _missing_sums(reference: Reference, difference: Difference, layout: AnyLayout) -> Iterator[str]:
    """Yield a sentence if the values of the ranks along an axis add up to one rank's values.

    Then a sum over the axis is missing. Beside the sum a vector that all tokens share may be there.
    """
    for axis, size in axes_of(layout).items():
        groups = groups_along(difference.parts, axis)
        sums = [(np.sum([p.piece.values for p in g], 0), g[0].expected) for g in groups]
        if not sums:
            continue
        scale = _scale(reference, difference.key)
        if all(_fits(total, expected, scale) for total, expected in sums):
            yield f"as if the sum over {axis} were missing: the {size} ranks' values add up to it"
        elif all(_is_vector(total - expected, scale) for total, expected in sums):
            yield (
                f"as if the sum over {axis} were missing: the {size} ranks' values add up to it, "
                f"but for a vector that all tokens share, as a bias"
            )


def _missing_before(
    reference: Reference, difference: Difference, layout: AnyLayout
) -> Iterator[str]:
    """Yield a sentence if ranks hold terms of an earlier module's output, and nothing sums them."""
    place = reference.order.index(difference.key)
    last = difference.last_equal
    begin = reference.order.index(last) if last is not None else 0
    for key, axis in difference.terms[-1:]:
        if begin < reference.order.index(key) < place:
            yield (
                f"{title(key)} is a term on each rank of {axis}, and they add up to one rank's: as "
                f"if their sum were missing, or something were added to each term, as a bias"
            )


def _wrong_factors(
    reference: Reference, difference: Difference, layout: AnyLayout
) -> Iterator[str]:
    """Yield a sentence if all values are one rank's times the same factor, such as tp or 1/tp."""
    values = np.concatenate([p.piece.values.ravel() for p in difference.wrong]).astype(float)
    expected = np.concatenate([p.expected.ravel() for p in difference.wrong]).astype(float)
    square = float(expected @ expected)
    if not square:
        return
    factor = float(values @ expected) / square
    largest = np.abs(expected).max()
    if not values.any():
        yield "all of it is 0: as if it were never computed, or cut off"
        return
    if not np.abs(values - factor * expected).max() <= CLOSE * largest:
        yield from _own_factors(difference)
        return
    along = {size: axis for axis, size in reversed(axes_of(layout).items())}
    for size, axis in along.items():
        if abs(factor - size) < CLOSE * size:
            yield (
                f"{factor:.6g} times one rank's: as if the sum over {axis} were taken twice, or a "
                f"division by {axis} left out"
            )
            return
        if abs(factor * size - 1) < CLOSE:
            yield (
                f"1/{size} of one rank's: as if it were divided by {axis} ({size}), or only one "
                f"rank's term counted"
            )
            return
    if abs(factor - 2) < CLOSE:
        yield "twice one rank's: as if a sum were taken twice"
    elif isinstance(layout, ProgramLayout) and expected.size < LEAST_FITTED:
        return  # any number is one rank's times another
    # 1 explains nothing; and of weights an update changes little, whatever is wrong
    elif abs(factor - 1) > CLOSE and difference.key[1] != AFTER:
        yield f"{factor:.6g} times one rank's"


def _own_factors(difference: Difference) -> Iterator[str]:
    """Yield a sentence if each rank's gradient is one rank's times a factor of its own."""
    if difference.key[1] != GRADIENT:
        return
    factors = []
    for part in difference.wrong:
        values, expected = part.piece.values, part.expected
        square = float((expected * expected).sum())
        factor = float((values * expected).sum()) / square if square else 0.0
        if values.size < LEAST_FITTED or not _fits(
            values, factor * expected, np.abs(expected).max()
        ):
            return
        factors.append(f"{factor:.4g}")
    if len(set(factors)) > 1:
        yield (
            f"each rank has one rank's times another number ({', '.join(sorted(set(factors)))}): "
            f"as if each clipped by the norm of its own part"
        )


def _counted_again(
    reference: Reference, difference: Difference, layout: AnyLayout
) -> Iterator[str]:
    """Yield a sentence if the loss is too high by ln(tp), or of another axis."""
    if difference.key[1:] != ("number", "loss"):
        return
    off = float(np.mean([(p.piece.values - p.expected).mean() for p in difference.wrong]))
    for axis, size in axes_of(layout).items():
        if abs(off - math.log(size)) < 1e-4:
            yield (
                f"one rank's + ln {size}: as if the softmax's sum had each logit {size} times, "
                f"because logits that were gathered over {axis} are also summed over {axis}"
            )


def _stale_steps(reference: Reference, difference: Difference, layout: AnyLayout) -> Iterator[str]:
    """Yield a sentence if the values are those of the step before, or contain a share of them.

    So a stale buffer, a gradient that was not cleared and a wrong weight decay are found.
    """
    step, kind, name = difference.key
    before = reference.tensors.get((step - 1, kind, name))
    now = reference.tensors[difference.key]
    if before is None or before.shape != now.shape or np.array_equal(before, now):
        return
    scale = _scale(reference, difference.key)
    earlier = [_at(before, part) for part in difference.wrong]
    if any(values is None for values in earlier):
        return
    pairs = list(zip(difference.wrong, earlier))
    if all(_fits(part.piece.values, values, scale) for part, values in pairs):
        yield "it is that of the step before: stale"
        return
    off = np.concatenate([(p.piece.values - p.expected).ravel() for p in difference.wrong])
    old = np.concatenate([values.ravel() for values in earlier])
    # Clipping has multiplied a gradient that was left in its buffer.
    share = float(off @ old) / float(old @ old) if old.any() else 0.0
    if old.size < LEAST_FITTED or not share:
        return
    if kind == AFTER:
        # The difference itself is the scale: it is small beside the weights.
        if _fits(off, share * old, float(np.abs(off).max())):
            yield f"off by {share:.4g} times the weights before the update: as weight decay is"
    elif abs(share) > CLOSE and _fits(off, share * old, scale):
        times = "" if abs(share - 1) < CLOSE else f", times {share:.4g}, as if clipped"
        yield f"that of the step before is still in it: not cleared{times}"


def _at(whole: np.ndarray, part: TensorPart) -> Any:
    """Return the elements of a whole tensor at a part's place; None if that is not known."""
    place = part.piece.place
    if part.piece.is_parameter:
        return whole[place[0]]
    if part.piece.is_found:
        return None
    found = whole[place] if part.piece.paired else whole[np.ix_(*place)]
    return found if found.shape == part.piece.values.shape else None


def _is_vector(off: np.ndarray, scale: float) -> bool:
    """Return whether a difference (s, b, ...) is the same vector for every token."""
    if off.ndim < 3:
        return False
    return bool(np.abs(off - off[:1, :1]).max() <= CLOSE * scale * 1e-2)


def _wrong_vectors(
    reference: Reference, difference: Difference, layout: AnyLayout
) -> Iterator[str]:
    """Yield a sentence if the difference is the same vector for every token, such as a bias."""
    step = difference.key[0]
    wrong = [p for p in difference.wrong if not p.piece.is_parameter and not p.piece.paired]
    if not wrong or len(wrong) != len(difference.wrong):
        return
    offs = [part.piece.values - part.expected for part in wrong]
    largest = max(float(np.abs(off).max()) for off in offs)
    if not all(off.ndim >= 3 and np.abs(off - off[:1, :1]).max() <= 1e-3 * largest for off in offs):
        return
    vector = offs[0][0, 0].ravel()
    for key, values in reference.tensors.items():
        if key[:2] != (step, IN_USE) or values.shape != vector.shape or not values.any():
            continue
        times = float(vector @ values) / float(values @ values)
        if np.abs(vector - times * values).max() <= 1e-3 * largest:
            yield (
                f"{key[2]} was added {1 + times:.4g} times: as if every rank added the bias before "
                f"the sum"
            )
            return
    yield "every token has the same vector too much: as if a bias were added on several ranks"


def _nearest(equal: np.ndarray, row: int, sample: int) -> tuple[int, int]:
    """Return the place of one rank's values that a place has: its own, one of its sample, another.

    equal: (rows, samples), where one rank has these values. A token that is in a text twice has
    the same row of the embedding twice, so that several places may be equal.
    """
    if equal[row, sample]:
        return row, sample
    if equal[:, sample].any():
        return int(equal[:, sample].argmax()), sample
    s, b = divmod(int(equal.argmax()), equal.shape[1])
    return s, b


def _wrong_elements(
    reference: Reference, difference: Difference, layout: AnyLayout
) -> Iterator[str]:
    """Yield a sentence if tokens have the values of other tokens: a wrong order or sample."""
    whole = reference.tensors[difference.key]
    wrong = [p for p in difference.wrong if not p.piece.is_parameter and not p.piece.paired]
    if not wrong or whole.ndim < 2 or wrong[0].piece.is_found:
        return
    flat = whole.reshape(*whole.shape[:2], -1)
    scale = _scale(reference, difference.key)
    part = wrong[0]
    values = part.piece.values.reshape(*part.piece.values.shape[:2], -1)
    if values.shape[-1] != flat.shape[-1] or values.shape[-1] < 2:
        return
    moved: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for i, row in enumerate(part.piece.place[0]):
        for j, sample in enumerate(part.piece.place[1]):
            equal = np.abs(flat - values[i, j]).max(-1) <= CLOSE * scale
            if not equal.any():
                return
            moved.append(((int(row), int(sample)), _nearest(equal, int(row), int(sample))))
    other = [pair for pair in moved if pair[0] != pair[1]]
    if not other:
        return
    (row, sample), (s, b) = other[0]
    if sample == b:
        axis = next((axis for axis in ("cp", "tp") if axis in axes_of(layout)), "cp")
        yield f"position {row} has the values of position {s}: as if {axis}'s order were another"
    else:
        yield f"sample {sample} has those of sample {b}: as if a replica read another's samples"


def _repeated_terms(
    reference: Reference, difference: Difference, layout: AnyLayout
) -> Iterator[str]:
    """Yield a sentence if a gradient is that of some of the tokens: a sum over ranks is missing."""
    step, kind, name = difference.key
    module, _, last = name.rpartition(".")
    if kind != GRADIENT or last not in ("weight", "bias") or isinstance(layout, ProgramLayout):
        return
    grad = reference.tensors.get((step, "gradient of output", module))
    alias = reference.aliases.get(module, ("input", module))
    x = reference.tensors.get((step, *alias))
    if grad is None or (x is None and last == "weight"):
        return

    def of(rows: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return the gradient of the tokens at these places, flat."""
        g = grad[np.ix_(rows, samples)].reshape(len(rows) * len(samples), -1)
        if last == "bias":
            return g.sum(0)
        inputs = x[np.ix_(rows, samples)].reshape(len(rows) * len(samples), -1)  # type: ignore[index]
        return (g.T @ inputs).ravel()

    rows, samples = np.arange(grad.shape[0]), np.arange(grad.shape[1])
    whole = reference.tensors[difference.key]
    scale = _scale(reference, difference.key)
    if not _fits(of(rows, samples), whole, scale):
        return  # the layer is used twice, or its gradient is no such sum
    sets = _token_sets(layout, rows, samples)
    for words, tokens in sets.items():
        terms = {place: of(*tokens(dict(place))) for place in _places(difference)}
        fits = [
            _fits(p.piece.values, terms[_place(p)][p.piece.place[0]], scale)
            for p in difference.wrong
        ]
        if all(fits):
            yield f"as if {words}"
            return


def _place(part: TensorPart) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(part.place.items()))


def _places(difference: Difference) -> set[tuple[tuple[str, int], ...]]:
    return {_place(part) for part in difference.wrong}


def _token_sets(
    layout: Layout, rows: np.ndarray, samples: np.ndarray
) -> dict[str, Callable[[dict[str, int]], tuple[np.ndarray, np.ndarray]]]:
    """Return sets of tokens by what their gradient means: functions of a rank's place."""
    size, dp, cp = layout.micro_batch_size, layout.dp or 1, layout.cp
    chunks = np.split(rows, 2 * cp) if cp > 1 and len(rows) % (2 * cp) == 0 else [rows, rows[:0]]

    def own_samples(place: dict[str, int]) -> np.ndarray:
        return samples[samples // size % dp == place["dp"]]

    def own_rows(place: dict[str, int]) -> np.ndarray:
        if cp == 1:
            return rows
        return np.concatenate([chunks[place["cp"]], chunks[2 * cp - 1 - place["cp"]]])

    last = samples[samples // (size * dp) == samples[-1] // (size * dp)]
    first = samples[samples // (size * dp) == 0]
    sets: dict[str, Callable[[dict[str, int]], tuple[np.ndarray, np.ndarray]]] = {}
    if dp > 1:
        sets["the sum over dp were missing"] = lambda p: (rows, own_samples(p))
    if cp > 1:
        sets["the sum over cp were missing"] = lambda p: (own_rows(p), samples)
    if dp > 1 and cp > 1:
        sets["the sum over dp and cp were missing"] = lambda p: (own_rows(p), own_samples(p))
    if len(last) < len(samples):
        sets["only the last micro-batch counted in the sum over micro-batches"] = lambda p: (
            rows,
            last,
        )
        sets["only the first micro-batch counted in the sum over micro-batches"] = lambda p: (
            rows,
            first,
        )
        every = np.concatenate([samples, first])
        sets["the first micro-batch were counted twice"] = lambda p: (rows, every)
    return sets


# ---- What differing layouts share ----------------------------------------------------------------

TRAITS: dict[str, Callable[[Layout], bool]] = {
    "tp above 1": lambda x: x.tp > 1,
    "pp above 1": lambda x: x.pp > 1,
    "cp above 1": lambda x: x.cp > 1,
    "dp above 1": lambda x: (x.dp or 1) > 1,
    "ep above 1": lambda x: (x.ep or 1) > 1,
    "dp x cp above 1": lambda x: x.cp * (x.dp or 1) > 1,
    "tp above 1 without sequence parallelism": lambda x: x.tp > 1 and not x.sequence_parallel,
    "sequence parallelism": lambda x: bool(x.sequence_parallel),
    "ZeRO 0": lambda x: x.zero == 0 and x.cp * (x.dp or 1) > 1,
    "ZeRO 1": lambda x: x.zero == 1 and x.cp * (x.dp or 1) > 1,
    "ZeRO 2": lambda x: x.zero == 2,
    "ZeRO 3": lambda x: x.zero == 3,
    "ZeRO 1 or 2": lambda x: x.zero in (1, 2) and x.cp * (x.dp or 1) > 1,
    "ZeRO 1, 2 or 3": lambda x: x.zero > 0 and x.cp * (x.dp or 1) > 1,
    "several stages on a rank": lambda x: x.stages_per_rank > 1,
    "a split backward pass (zb)": lambda x: x.splits_backward,
    "recompute full": lambda x: x.recompute == "full",
    "recompute selective": lambda x: x.recompute == "selective",
    "recomputation": lambda x: x.recompute != "none",
    "micro-batches of several samples": lambda x: x.micro_batch_size > 1,
    "overlap-param-gather": lambda x: bool(x.overlap_param_gather),
    "no-sync-each-batch": lambda x: not x.sync_each_batch,
    "no-reshard-after-forward": lambda x: not x.reshard_after_forward,
    "padding of the vocabulary": lambda x: x.pad_vocab_multiple > 1,
    "more than one rank": lambda x: x.tp * x.pp * x.cp * (x.dp or 1) > 1,
}


# Traits that say no more than others, if one of those fits too.
IMPLIED = {
    "dp x cp above 1": ("dp above 1", "cp above 1"),
    "tp above 1 without sequence parallelism": ("tp above 1",),
    "recomputation": ("recompute full", "recompute selective"),
    "ZeRO 1 or 2": ("ZeRO 1", "ZeRO 2"),
    "ZeRO 1, 2 or 3": ("ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 1 or 2"),
}
FITTING = 3  # traits that are named if the runs do not tell which it is


def traits_of(layout: AnyLayout) -> list[str]:
    """Return what a layout has."""
    if isinstance(layout, ProgramLayout):
        return layout.traits
    return [name for name, has in TRAITS.items() if has(layout)]


def _held(layouts: Sequence[AnyLayout]) -> list[str]:
    """Return the traits that all of these layouts have."""
    every = list(map(traits_of, layouts))
    return [name for name in every[0] if all(name in traits for traits in every)]


def own_traits(differing: Sequence[AnyLayout], equal: Sequence[AnyLayout]) -> list[str]:
    """Return the traits that all layouts that differ have, and none that is equal."""
    if not differing:
        return []
    of_equal = set().union(*map(traits_of, equal))
    own = [name for name in _held(differing) if name not in of_equal]
    specific = [name for name in own if not set(IMPLIED.get(name, ())) & set(own)]
    return [name for name in specific if name != "more than one rank"] or own


def shared(differing: Sequence[AnyLayout], equal: Sequence[AnyLayout]) -> str:
    """Return what every layout that differs has, and no other; else what they all have."""
    if not differing:
        return ""
    if not equal:
        return "every layout" if len(differing) > 1 else f"the only layout{_axes(differing[0])}"
    own = own_traits(differing, equal)
    text = " or ".join(own[:FITTING])
    if not own:
        text = _pair(differing, equal)
    if text and len(differing) == 1:
        return f"the only layout with {text} that ran"
    if text:
        return f"every layout with {text} differs, and no other"
    held = _held(differing)
    if not held:
        return ""
    every = list(map(traits_of, equal))
    best = min(held, key=lambda name: sum(name in traits for traits in every))
    others = sum(best in traits for traits in every)
    return f"all that differ have {best}; {others} with it are equal"


def _axes(layout: AnyLayout) -> str:
    """Return the axes of the only layout that ran, which say where the difference may be from."""
    axes = axes_of(layout)
    return f" with {' and '.join(axes)} that ran" if axes else " that ran"


def _pair(differing: Sequence[AnyLayout], equal: Sequence[AnyLayout]) -> str:
    """Return two traits that all layouts that differ have, and none that is equal; or nothing."""
    every = list(map(traits_of, equal))
    for a, b in combinations(_held(differing), 2):
        if not any(a in traits and b in traits for traits in every):
            return f"{a} and {b}"
    return ""
