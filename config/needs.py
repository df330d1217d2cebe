"""Options that have no effect without another option; to give them without it is an error.

    check_used(config, {"sgd_momentum"})     UserError unless --optimizer is sgd

Only options that a flag or a --config file gives are checked. Options of a preset, or of the
run.json of an earlier run, may have no effect, and so may options that are given at their defaults.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from config.messages import UserError
from config.schema import Config

ROTARY = ("rotary_base", "rotary_fraction", "rotary_scaling")
ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
OF_SAVES = ("keep_last", "save_weights_only", "async_save")
OF_EXPERTS: tuple[str, ...] = ("expert_ffn_hidden", "first_dense_layers", "expert_interval")
OF_EXPERTS += ("record_routing", "pin_routing")
DYNAMIC: tuple[str, ...] = ("initial_loss_scale_power", "loss_scale_window")
DYNAMIC += ("loss_scale_hysteresis", "min_loss_scale")


def _has_adam(config: Config) -> bool:
    return config.training.optimizer not in ("sgd", "adafactor")


def _lr_falls(config: Config) -> bool:
    return config.training.lr_schedule != "constant"


def _evaluates(config: Config) -> bool:
    return bool(config.data.eval_samples or config.data.eval_data)


def _reads_files(config: Config) -> bool:
    return config.data.data != ("synthetic",)


# Names of options; what they need, as the end of "--OPTION needs ..."; and a function that returns
# whether a run has what they need.
NEEDS: tuple[tuple[tuple[str, ...], str, Callable[[Config], Any]], ...] = (
    (("max_positions",), "--positions learned", lambda c: c.model.positions == "learned"),
    (ROTARY, "--positions rotary", lambda c: c.model.positions == "rotary"),
    (("min_lr", "lr_decay_samples"), "--lr-schedule cosine, linear or wsd", _lr_falls),
    (("lr_wsd_decay_samples",), "--lr-schedule wsd", lambda c: c.training.lr_schedule == "wsd"),
    (ADAM, "--optimizer adamw, apex, adamw8bit or muon", _has_adam),
    (("sgd_momentum",), "--optimizer sgd", lambda c: c.training.optimizer == "sgd"),
    (
        (*DYNAMIC, "loss_scale", "max_overflows"),
        "--precision fp16",
        lambda c: c.training.precision == "fp16",
    ),
    (DYNAMIC, "a dynamic scale: --loss-scale 0", lambda c: not c.training.loss_scale),
    (("eval_every",), "--eval-samples or --eval-data: nothing is evaluated", _evaluates),
    (("split", "order"), "the files of --data; now tokens are random", _reads_files),
    (
        ("cache",),
        "the files of --data or --eval-data",
        lambda c: _reads_files(c) or c.data.eval_data,
    ),
    (OF_SAVES, "--save-every or --save-every-minutes: nothing is saved", lambda c: c.run.saves),
    (("keep_every",), "--keep-last: now all are kept", lambda c: c.run.keep_last),
    (("load_weights_only",), "--resume, to say which weights", lambda c: c.run.resume),
    (OF_EXPERTS, "--experts N, with N above 1", lambda c: c.model.experts > 1),
    (("on_spike",), "--spike-sigma above 0: now no step is a spike", lambda c: c.run.spike_sigma),
    (
        ("on_spike",),
        "--save-every or --save-every-minutes: nothing is saved",
        lambda c: c.run.on_spike != "rollback" or c.run.saves,
    ),
    (
        ("spike_limit",),
        "--on-spike skip or rollback",
        lambda c: c.run.on_spike in ("skip", "rollback"),
    ),
    (("begin_at_samples",), "--resume: a new run begins with 0", lambda c: c.run.resume),
    (("hang_timeout",), "the watchdog; now it is off", lambda c: c.run.watchdog),
    (("slow_rank_percent",), "--check-speed-every above 0", lambda c: c.run.check_speed_every),
)


def check_used(config: Config, given: Collection[str]) -> None:
    """Raise UserError if a given option has no effect in this run.

    given: the names of the options that flags or a file give.
    """
    for names, needed, is_met in NEEDS:
        options = _as_typed(config, [name for name in names if name in given])
        if options and not is_met(config):
            raise UserError(f"{options[0]} needs {needed}")


def unused_rotary(config: Config) -> list[str]:
    """Return the rotary options, as flags, of a model whose positions are not rotary."""
    return [] if config.model.positions == "rotary" else _as_typed(config, ROTARY)


def _as_typed(config: Config, names: Collection[str]) -> list[str]:
    """Return the named options that are not at their defaults, as flags with their values."""
    texts = []
    for group in (config.model, config.training, config.data, config.run):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            flag = field.name.replace("_", "-")
            default = config.model.seq_length if field.name == "max_positions" else field.default
            if field.name not in names or value == default:
                continue
            if isinstance(value, bool):
                texts.append(f"--{flag}" if value else f"--no-{flag}")
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            words = [f"{n:g}" if isinstance(n, float) else str(n) for n in numbers]
            texts.append(f"--{flag} {' '.join(words)}")
    return texts
