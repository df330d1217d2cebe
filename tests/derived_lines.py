"""Cases of layouts against one rank for options, and choices of them, that no golden line names.

    cases_of(Setting("activation", "softsign"), folder)       a list, as `lines_of` of a file gives

They are made from the declaration of the option (config/examples.py), so that a new option or
choice is run under tp, pp, cp, ep and ZeRO before anyone writes a line for it.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import golden_worker
from test_golden import TOLERANCES, lines_of

from base.errors import UserError
from config import validation
from config.examples import examples, needed
from config.schema import GROUPS, all_options

SECTIONS = ("model", "layout", "training", "data")  # of these options layouts could differ in
# Options that need no line: the first ones are in every case of golden_worker.py; the next are
# another spelling of an option, a folder or a split, or say when to evaluate; a run that leaves out
# samples or has ended by overflows is tested in test_stories.py.
WITHOUT_A_LINE = {
    *("hidden", "heads", "seq_length", "lr", "adam_eps", "pad_vocab_multiple", "dp"),
    *("batch_tokens", "train_samples", "split", "cache", "eval_every", "eval_samples"),
    "skip_samples",
    *("ema", "eval_ema"),  # tests/test_weight_average.py
    "phases",  # tests/test_phases.py
    "eval_tasks",  # tests/test_tasks.py
}
# The files of golden lines that name every option which is not above.
FEATURES = ("experts", "experts_drawn", "experts_options", "latent", "attention_kinds", "zero3")
FEATURES += ("z_loss", "mixers")
SHARED = {"precision": "fp64", "layers": 4, "global_batch_size": 4, "steps": 3, "bias": False}
EXPERTS = {"experts": 4, "experts_per_token": 2, "positions": "rotary"}
# Layouts of four ranks that a case is run in, if the option goes together with them.
DENSE = (
    {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"},
    {"tp": 2, "dp": 2, "zero": 3},
    {"cp": 2, "dp": 2, "zero": 2},
    {"pp": 4, "micro_batch_size": 2},
)
WITH_EXPERTS = ({"tp": 2, "ep": 4, "zero": 2}, {"pp": 2, "ep": 2})
# Latent attention, which has not all options of attention: those it has change its numbers too.
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"positions": "rotary", "tp": 2, "pp": 2}


class Setting(NamedTuple):
    """An option with a value."""

    name: str
    value: Any

    def __str__(self) -> str:
        """Return it as messages have it."""
        return f"{self.name}={self.value}"


def named_in_lines() -> dict[str, set[str]]:
    """Return, by option, the values that golden lines have, most of them with experts."""
    values: dict[str, set[str]] = {}
    for feature in FEATURES:
        for case in itertools.chain.from_iterable(lines_of(feature).values()):
            for name, value in case.items():
                values.setdefault(name, set()).add(str(value))
    return values


def settings_without_a_line(named: dict[str, set[str]]) -> list[Setting]:
    """Return what has to be derived: options that are in no line, and choices that are in none.

    named: `named_in_lines`, or less of it. An option without any example has the value None.
    """
    found = []
    for field in itertools.chain.from_iterable(options_of(section) for section in SECTIONS):
        choices = field.metadata["choices"]
        values = examples(field) if choices else examples(field)[:1] or (None,)
        if field.name in WITHOUT_A_LINE or (field.name in named and not choices):
            continue
        given = named.get(field.name, set())
        found += [Setting(field.name, v) for v in values if str(v) not in given and v != "apex"]
    return found


def options_of(section: str) -> list:
    """Return the declarations of a section's options."""
    return [all_options()[name] for name in GROUPS[section].__dataclass_fields__]


def cases_of(setting: Setting, folder: Path) -> list[dict]:
    """Return cases of four ranks with an option's value, in each layout that takes it.

    folder: where corpora are (`write_corpora`). Raise UserError if no case is valid, with what the
    checks say of the first one.
    """
    field = all_options()[setting.name]
    also = needed(field)
    if "data" in also:
        also |= {"data": [f"{folder}/a"], "split": "1", "cache": "none"}
    # Where the first value contradicts another option, the next is tried.
    values = [setting.value]
    if not field.metadata["choices"]:
        values = list(dict.fromkeys([setting.value, *examples(field)]))
    refusal = None
    for value in values:
        found = []
        for base in [*DENSE, *(EXPERTS | layout for layout in WITH_EXPERTS), LATENT]:
            case = SHARED | base | also | {setting.name: value}
            if case["precision"] in ("bf16", "fp16"):
                case |= {"tolerance": 1e-3, "weight_tolerance": 1e-2}
            try:
                options_alone = {k: v for k, v in case.items() if k not in TOLERANCES}
                validation.check(golden_worker.options(options_alone), 4)
            except UserError as error:
                refusal = refusal or error
                continue
            found.append(case)
        if found:
            return found
    raise refusal or UserError("its declaration has no example")
