"""The phases of a run (--phases FILE): on which corpora, samples and rates it trains from when on.

    plan = read("months.toml")                  a PhasePlan: what the file says
    placed = place(plan, past, options)         a PlacedPhase for each: where it begins and ends

    train_tokens = "20B"                        # the end of the run; or give --steps
    [max_epochs]                                # a note says which corpora are read more often
    "data/books" = 4

    [[phase]]
    name = "web"
    from_tokens = 0
    data = ["data/web"]                         # as --data
    [[phase]]
    name = "long"
    from_tokens = "15B"
    data = [0.7, "data/web", 0.3, "data/books"]
    seq_length = 8192
    global_batch_size = 128
    lr_schedule = "linear"                      # over this phase, from --lr to --min-lr

What a phase does not give is as the options of the run say. Before the first phase of a file whose
from_tokens is not 0, the run does what its options say. A phase begins with the first step at or
after its number of tokens. Without keys about the rate, --lr-schedule goes on over all of the run.

Where phases begin follows from the plan and the past of the run alone: of a phase that has begun,
the past knows the place (config/past.py), and what the plan says of it must be what was done.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from base.cli import whole_number
from base.errors import UserError, nearest
from config.batch_schedule import LARGEST
from config.past import BegunPhase, Past

# Keys of a phase that say how its rate goes; without one, the rate of the run goes on.
OF_THE_RATE = (
    "lr",
    "min_lr",
    "lr_schedule",
    "lr_warmup_tokens",
    "lr_wsd_decay_tokens",
    "lr_wsd_decay_style",
)
SCHEDULES = ("constant", "linear", "cosine", "wsd")
STYLES = ("linear", "1-sqrt")
BEFORE = "start"  # the name of what comes before the first phase of a file


@dataclass(frozen=True)
class Phase:
    """A phase as a file gives it; None: as the options of the run say.

    from_tokens: the tokens of the run before it. data: the words of --data. seq_length: tokens of a
    sample. global_batch_size: samples of a step. lr to lr_wsd_decay_style: a schedule over the
    phase's own tokens, from `lr` to `min_lr`.
    """

    from_tokens: int
    name: str
    data: tuple | None = None
    seq_length: int | None = None
    global_batch_size: int | None = None
    lr: float | None = None
    min_lr: float | None = None
    lr_schedule: str | None = None
    lr_warmup_tokens: int | None = None
    lr_wsd_decay_tokens: int | None = None
    lr_wsd_decay_style: str | None = None

    @property
    def has_rate(self) -> bool:
        """Whether the phase has a schedule of the rate of its own."""
        return any(getattr(self, name) is not None for name in OF_THE_RATE)


@dataclass(frozen=True)
class PhasePlan:
    """The phases of a run, as a file gives them.

    phases: by from_tokens, ascending. train_tokens: where the run ends; None: --steps or
    --train-samples says it. max_epochs: (corpus, epochs), above which a note warns. path: the file,
    for messages.
    """

    phases: tuple[Phase, ...]
    train_tokens: int | None = None
    max_epochs: tuple[tuple[str, float], ...] = ()
    path: str = ""


@dataclass(frozen=True)
class PlacedPhase:
    """A phase with its place in a run.

    settings: with data, seq_length and global_batch_size filled in. step, samples, tokens: those
    of the run before its first step. is_begun: whether a step of it is done. blocks: for each of
    its corpora, in the order of its data, the tokens of a block (corpora/streams.py).
    """

    settings: Phase
    step: int
    samples: int
    tokens: int
    is_begun: bool
    blocks: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """The phase's name."""
        return self.settings.name

    @property
    def data(self) -> tuple:
        """The words of --data for this phase."""
        return self.settings.data or ()

    @property
    def length(self) -> int:
        """The tokens of a sample."""
        return self.settings.seq_length or 0

    @property
    def batch(self) -> int:
        """The samples of a step."""
        return self.settings.global_batch_size or 0

    def tokens_at(self, samples: int) -> int:
        """Return the tokens of the run before sample number `samples`, which is in this phase."""
        return self.tokens + (samples - self.samples) * self.length

    def begun(self) -> BegunPhase:
        """Return what the past of the run keeps of a phase that has begun."""
        return BegunPhase(
            self.name,
            self.settings.from_tokens,
            self.step,
            self.samples,
            self.tokens,
            tuple(map(str, self.data)),
            self.length,
            self.blocks,
        )


# ---- Files ---------------------------------------------------------------------------------------


def from_table(values: Mapping[str, Any], path: str) -> PhasePlan:
    """Return the plan that a TOML file's contents, or a checkpoint's, say; UserError if wrong."""
    where = f"--phases {path}"
    top = {key.replace("-", "_"): value for key, value in values.items()}
    name = "stage" if "stage" in top else "phase"  # [[stage]] until version 0.3
    if name == "stage" and "phase" in top:
        raise UserError(f"{where} has [[stage]] and [[phase]] tables: call all of them [[phase]]")
    _check_keys(top, (name, "train_tokens", "max_epochs"), where)
    tables = top.get(name)
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise UserError(f"{where} has no [[phase]] table")
    phases = [_phase(table, f"{name} {number}", where) for number, table in enumerate(tables, 1)]
    for before, after in itertools.pairwise(phases):
        if after.from_tokens <= before.from_tokens:
            raise UserError(
                f"{where}: phase {after.name} is from {after.from_tokens} tokens on, which is not "
                f"after phase {before.name}, from {before.from_tokens} on"
            )
    names = [phase.name for phase in phases]
    if twice := next((name for name in names if names.count(name) > 1), None):
        numbers = [str(number) for number, name in enumerate(names, 1) if name == twice]
        raise UserError(
            f"{where}: phases {' and '.join(numbers)} have the same name, {twice}: give each one "
            "its own"
        )
    end = top.get("train_tokens")
    if end is not None:
        end = _count(end, f"{where}: train_tokens", 1)
        if end <= phases[-1].from_tokens:
            last = phases[-1]
            raise UserError(
                f"{where}: train_tokens({end}) is not after the begin of phase {last.name}, "
                f"from_tokens({last.from_tokens})"
            )
    limits = top.get("max_epochs", {})
    if not isinstance(limits, dict):
        raise UserError(f"{where}: max_epochs is a table of PREFIX = EPOCHS, not {limits!r:.80}")
    most = tuple((str(k), _number(v, f"{where}: max_epochs of {k}")) for k, v in limits.items())
    return PhasePlan(tuple(phases), end, most, path)


def from_saved(values: Any, path: str) -> PhasePlan | None:
    """Return the plan in a checkpoint's configuration; None if it has none. path: for messages."""
    if not isinstance(values, dict):
        return None
    table = {key: value for key, value in values.items() if value is not None and key != "path"}
    phases = table.pop("phases", table.pop("stages", None))  # "stages" until version 0.3
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        raise UserError(f"{path} has no list of phases: {phases!r:.80}")
    table["phase"] = [{k: v for k, v in phase.items() if v is not None} for phase in phases]
    try:
        table["max_epochs"] = dict(table.get("max_epochs", ()))
    except (TypeError, ValueError):
        raise UserError(
            f"{path}: max_epochs is {table['max_epochs']!r:.80}, not pairs of PREFIX and EPOCHS"
        ) from None
    return from_table(table, path)


def _check_keys(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise UserError for a key that is not in `known`; it names the nearest one."""
    for key in values:
        if key not in known:
            near = nearest(key, list(known)) or f"; there are {', '.join(known)}"
            raise UserError(f"{where} has an unknown key {key!r:.60}{near}")


def _phase(table: Mapping[str, Any], unnamed: str, where: str) -> Phase:
    """Return the phase of a [[phase]] table; UserError if it is wrong.

    unnamed: what the phase is called if the table gives no name, such as "phase 2". The keys may
    have "-" in place of "_", as those of --config.
    """
    values = {key.replace("-", "_"): value for key, value in table.items()}
    name = values.get("name", unnamed)
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise UserError(f"{where}: the name of {unnamed} is a text, not {name!r:.80}")
    here = f"{where}: phase {name}"
    _check_keys(values, [field.name for field in dataclasses.fields(Phase)], here)
    if "from_tokens" not in values:
        raise UserError(f"{here} has no from_tokens: the tokens of the run before it, such as 0")
    found: dict[str, Any] = {"name": name}
    for key, least in (
        ("from_tokens", 0),
        ("seq_length", 1),
        ("global_batch_size", 1),
        ("lr_warmup_tokens", 0),
        ("lr_wsd_decay_tokens", 1),
    ):
        if key in values:
            found[key] = _count(values[key], f"{here}: {key}", least)
    if found.get("global_batch_size", 0) > LARGEST:
        size = found["global_batch_size"]
        raise UserError(f"{here}: global_batch_size must be at most {LARGEST}, not {size}")
    for key in ("lr", "min_lr"):
        if key in values:
            found[key] = _number(values[key], f"{here}: {key}")
    for key, choices in (("lr_schedule", SCHEDULES), ("lr_wsd_decay_style", STYLES)):
        if key in values and values[key] not in choices:
            names = ", ".join(choices)
            raise UserError(f"{here}: {key} is one of {names}, not {values[key]!r:.60}")
        if key in values:
            found[key] = values[key]
    if "data" in values:
        found["data"] = _words(values["data"], here)
    phase = Phase(**found)
    if phase.has_rate and phase.lr_schedule is None:
        given = ", ".join(key for key in OF_THE_RATE if getattr(phase, key) is not None)
        raise UserError(f"{here} gives {given}, and no lr_schedule ({', '.join(SCHEDULES)})")
    if phase.lr_schedule != "wsd":
        for key in ("lr_wsd_decay_tokens", "lr_wsd_decay_style"):
            if getattr(phase, key) is not None:
                raise UserError(f'{here}: {key} needs lr_schedule = "wsd"')
    if phase.lr_schedule == "constant" and phase.min_lr is not None:
        raise UserError(
            f"{here}: lr_schedule constant never reaches min_lr({phase.min_lr:g}): leave min_lr out"
        )
    return phase


def _words(value: Any, here: str) -> tuple:
    """Return the words of a phase's data; UserError unless it is a list of texts and numbers."""
    words = value if isinstance(value, (list, tuple)) else [value]
    kinds = (str, int, float)
    if not words or not all(isinstance(w, kinds) and not isinstance(w, bool) for w in words):
        raise UserError(f"{here}: data is a list such as [0.7, 'data/a', 0.3, 'data/b']")
    texts = [word for word in words if isinstance(word, str)]
    if not all(text.isprintable() and text for text in texts):
        raise UserError(f"{here}: data is empty or has control characters: {texts!r:.80}")
    return tuple(str(word) for word in words)


def _count(value: Any, what: str, least: int) -> int:
    """Return a whole number, which may be a text with a unit such as "5B"; else UserError."""
    number = value
    if isinstance(value, str):
        try:
            number = whole_number(value)
        except (ValueError, OverflowError):
            number = None
    if isinstance(number, float) and number.is_integer() and abs(number) < 2**63:
        number = int(number)
    if type(number) is not int or not least <= number < 2**63:
        raise UserError(f"{what} is a whole number from {least} on, not {value!r:.60}")
    return number


def _number(value: Any, what: str) -> float:
    """Return a number from 0 on, below infinity; else UserError."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf"):
        raise UserError(f"{what} is a number from 0 on, not {value!r:.60}")
    return float(value)


# ---- Places --------------------------------------------------------------------------------------


def place(
    plan: PhasePlan, past: Past, data: tuple, seq_length: int, batch: int
) -> tuple[PlacedPhase, ...]:
    """Return the phases of a run with their places, those of the past first.

    data, seq_length, batch: what the run's options say, for a phase that does not. Raise UserError
    if the plan contradicts the past, or if a phase has no step.
    """
    phases = [_filled(phase, data, seq_length, batch, plan.path) for phase in plan.phases]
    begun = past.begun_phases(tuple(map(str, data)), seq_length)
    if phases[0].from_tokens > 0:
        before = begun[0] if begun else None
        options = tuple(map(str, data)), seq_length
        words, length = (before.data, before.seq_length) if before else options
        phases.insert(0, Phase(0, BEFORE, words, length, batch))
    _check_past(plan, phases, begun, past)
    blocks = _blocks(phases, begun, seq_length)
    placed = []
    for phase, was in zip(phases, begun):
        known = was.blocks or _corpus_blocks(phase, blocks)
        placed.append(PlacedPhase(phase, was.step, was.samples, was.tokens, True, known))
    step, samples = past.step, past.samples
    tokens = placed[-1].tokens_at(samples) if placed else 0
    for phase in phases[len(placed) :]:
        steps = 0
        if placed:
            last = placed[-1]
            # The step in which the next phase's first token lies is the last of this phase.
            steps = max(0, -((tokens - phase.from_tokens) // (last.batch * last.length)))
            if steps == 0 and not last.is_begun:
                raise UserError(
                    f"--phases {plan.path}: phase {last.name} has no step: it begins at "
                    f"{last.tokens} tokens, and phase {phase.name} is from {phase.from_tokens} on"
                )
            step += steps
            samples += steps * last.batch
            tokens += steps * last.batch * last.length
        of_corpora = _corpus_blocks(phase, blocks)
        placed.append(PlacedPhase(phase, step, samples, tokens, False, of_corpora))
    return tuple(placed)


def _corpus_blocks(phase: Phase, blocks: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the tokens of a block of each corpus that a phase reads."""
    return tuple((prefix, blocks[prefix]) for prefix in prefixes_of(phase.data or ()))


def prefixes_of(data: Sequence[Any]) -> list[str]:
    """Return the corpora among the words of --data; random tokens are none."""
    words = list(map(str, data))
    if words == ["synthetic"]:
        return []
    return words[1::2] if _is_number(words[0]) else words


def _is_number(word: str) -> bool:
    """Return whether a word of --data is a weight."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _filled(phase: Phase, data: tuple, seq_length: int, batch: int, path: str) -> Phase:
    """Return a phase with what it does not give; UserError if its samples are too long."""
    length = phase.seq_length or seq_length
    if length > seq_length:
        raise UserError(
            f"--phases {path}: phase {phase.name} has samples of seq_length({length}), longer than "
            f"--seq-length({seq_length}), the longest of the run: give --seq-length {length}"
        )
    return dataclasses.replace(
        phase,
        data=tuple(map(str, phase.data or data)),
        seq_length=length,
        global_batch_size=phase.global_batch_size or batch,
    )


def _check_past(
    plan: PhasePlan, phases: list[Phase], begun: tuple[BegunPhase, ...], past: Past
) -> None:
    """Raise UserError if the plan says something else about what is over than what was done."""
    rule = "what is over cannot change"
    for number, was in enumerate(begun):
        if number >= len(phases):
            raise UserError(
                f"--phases {plan.path} has {len(phases)} phases, but the run has begun "
                f"{len(begun)}, the last one {was.name} at {was.tokens} tokens: {rule}"
            )
        phase = phases[number]
        for name, ours, theirs in (
            ("is from", f"{phase.from_tokens} tokens on", f"{was.from_tokens} tokens on"),
            ("reads", " ".join(phase.data or ()), " ".join(was.data)),
            ("has", f"samples of {phase.seq_length} tokens", f"samples of {was.seq_length} tokens"),
        ):
            if ours != theirs:
                raise UserError(
                    f"--phases {plan.path}: phase {phase.name} {name} {ours}, but the run "
                    f"{name} {theirs} in phase {was.name}, which began at step {was.step + 1}: "
                    f"{rule}"
                )
    if not begun:
        return
    last = begun[-1]
    if past.tokens not in (-1, last.tokens + (past.samples - last.samples) * last.seq_length):
        raise UserError(
            f"--phases {plan.path}: the run has read {past.samples} samples of {past.tokens} "
            f"tokens, not all of them of the lengths of its phases (now {last.seq_length}), so "
            "where it is in its corpora is not known"
        )
    now = last.tokens + (past.samples - last.samples) * last.seq_length
    later = phases[len(begun) :]
    size = past.last_batch
    if later and later[0].from_tokens <= now - size * last.seq_length:
        raise UserError(
            f"--phases {plan.path}: phase {later[0].name} is from {later[0].from_tokens} tokens "
            f"on, but the run has read {now} tokens, the last ones in phase {last.name}: {rule}; "
            f"a new phase is from {now} on, or later"
        )


def _blocks(phases: list[Phase], begun: tuple[BegunPhase, ...], seq_length: int) -> dict[str, int]:
    """Return for each corpus the tokens of a block, as the run has them or will have them.

    They are --seq-length, the tokens of the run's longest samples, when the corpus is first read:
    so they do not depend on later phases, which may change.
    """
    blocks: dict[str, int] = {}
    for was in begun:
        for prefix, size in was.blocks:
            blocks.setdefault(prefix, size)
    for phase in phases:
        for prefix in prefixes_of(phase.data or ()):
            blocks.setdefault(prefix, seq_length)
    return blocks


def changes(before: PhasePlan | None, now: PhasePlan | None) -> list[str]:
    """Return what differs between the plans of two starts of a run, a text for each difference."""
    if before is None or now is None:
        if before == now:
            return []
        return ["phases: none before, now as in --phases" if now else "phases: none now"]
    texts = []
    theirs = {phase.name: phase for phase in before.phases}
    ours = {phase.name: phase for phase in now.phases}
    for name in theirs.keys() | ours.keys():
        if name not in ours:
            texts.append(f"phase {name} (from {theirs[name].from_tokens}) is gone")
        elif name not in theirs:
            texts.append(f"phase {name} (from {ours[name].from_tokens}) is new")
        else:
            for field in dataclasses.fields(Phase):
                a, b = (getattr(side[name], field.name) for side in (theirs, ours))
                if a != b:
                    texts.append(f"phase {name} {field.name} {_shown(a)} before, {_shown(b)} now")
    if before.train_tokens != now.train_tokens:
        both = f"{_shown(before.train_tokens)} before, {_shown(now.train_tokens)} now"
        texts.append(f"train_tokens {both}")
    return sorted(texts)


def _shown(value: Any) -> str:
    """Return a value of a phase for a message."""
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
