"""A branch of a stable run in which the rate falls: --branch-from CHECKPOINT --decay-tokens N.

    plan, options = decaying(saved, past, plan, 2048, given)

The branch reads the data where the stable run was, and its rate falls from the one of the stable
run to --min-lr over N tokens, with which it ends. In a run without phases that is wsd with other
numbers, so a branch is a run like any other, and a restart needs nothing but its checkpoint.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from base.errors import UserError
from base.options import as_typed
from config.learning_rate import curve_of_run
from config.past import BegunPhase, Past
from config.phases import Phase, PhasePlan
from config.run_options import Training
from config.schema import all_options

# The options that a branch with --decay-tokens sets, in a run without phases.
DECAY_SETS = ("steps", "train_samples", "lr_schedule", "lr_decay_samples", "lr_wsd_decay_samples")
NAME = "decay"  # the name of the phase of a branch


def decaying(
    saved: Mapping[str, Any],
    past: Past,
    plan: PhasePlan | None,
    length: int,
    given: Mapping[str, Any],
) -> tuple[PhasePlan | None, dict[str, Any]]:
    """Return the plan and the options, by name, of a branch that decays.

    saved: the configuration in its checkpoint. past: with the branch. plan: that of the checkpoint.
    length: the tokens of a sample. given: the options that flags and files give. Raise UserError if
    other options say the same, or if the stable run's rate is not at its peak at the checkpoint.
    """
    tokens = given["decay_tokens"]
    branch = past.branch
    if type(tokens) is not int or tokens < 1 or branch is None:
        return plan, {}  # the value is refused where options are checked
    for name in ("phases", *DECAY_SETS, "lr_warmup_samples"):
        if name in given:
            flag = as_typed(all_options()[name])
            raise UserError(
                f"give one of --decay-tokens {tokens} and {flag}: both set the learning rate"
            )
    begun = past.phases or (BegunPhase("", 0, 0, 0, 0, ("-",), length),)
    phase = [phase for phase in begun if phase.samples < branch.samples][-1]
    length = phase.seq_length
    if tokens % length:
        raise UserError(
            f"--decay-tokens {tokens} is not a whole number of samples of {length} tokens; the "
            f"nearest: {tokens // length * length} and {(tokens // length + 1) * length}"
        )
    training = _training(saved)
    done = branch.samples - branch.skipped
    begins = past.step == branch.step  # what was done is the stable run
    if plan is not None:
        last = [phase for phase in plan.phases if phase.from_tokens < branch.tokens][-1:]
        if begins and not (last and last[0].has_rate):
            end = plan.train_tokens
            unit = (saved.get("model") or {}).get("seq_length", length)
            total = None if end is None else end // unit
            _check_stable(training, branch.tokens // unit, branch.checkpoint, total)
        return _plan(plan, branch.tokens, tokens, given), {}
    if begins:
        _check_stable(training, done, branch.checkpoint, None)
    samples = tokens // length
    return None, {
        "lr_schedule": "wsd",
        "lr_decay_samples": done + samples,
        "lr_wsd_decay_samples": samples,
        "train_samples": branch.samples + samples,
    }


def _training(saved: Mapping[str, Any]) -> Training:
    """Return the options of training in a checkpoint's configuration."""
    theirs = saved.get("training") or {}
    names = {field.name for field in dataclasses.fields(Training)}
    known: dict[str, Any] = {k: v for k, v in theirs.items() if k in names}
    return Training(**known)


def _check_stable(training: Training, done: int, checkpoint: str, total: int | None) -> None:
    """Raise UserError unless the rate is at its peak after `done` samples, and has not fallen.

    total: the samples of the run; None: as its options say.
    """
    if done < training.lr_warmup_samples:
        raise UserError(
            f"{checkpoint} is after {done} samples, in the warm-up of "
            f"lr-warmup-samples({training.lr_warmup_samples}): --decay-tokens begins at the peak"
        )
    if training.lr_schedule == "constant":
        return
    if training.lr_schedule != "wsd":
        raise UserError(
            f"the rate of {checkpoint} follows --lr-schedule {training.lr_schedule}, and is not at "
            "its peak: --decay-tokens needs the stable phase of wsd or constant"
        )
    end = training.lr_decay_samples or training.train_samples or total
    if end is None and training.steps is not None:
        end = training.steps * training.global_batch_size
    if end is None:
        return
    begin = curve_of_run(training, end, 1).wsd_fall
    if done > begin:
        raise UserError(
            f"{checkpoint} is after {done} samples, and the rate has fallen since {begin}: "
            "--decay-tokens needs a checkpoint of the stable phase"
        )


def _plan(plan: PhasePlan, begin: int, tokens: int, given: Mapping[str, Any]) -> PhasePlan:
    """Return the phases before a branch, and the one in which its rate falls.

    begin: the tokens of the run at the branch. tokens: of the branch.
    """
    before = [phase for phase in plan.phases if phase.from_tokens < begin]
    last = before[-1] if before else Phase(0, "")
    if last.name == NAME or last.lr_schedule not in (None, "constant"):
        raise UserError(
            f"--decay-tokens {tokens}: the rate of phase {last.name} follows {last.lr_schedule}, "
            "and is not at its peak"
        )
    decay = dataclasses.replace(
        last,
        from_tokens=begin,
        name=NAME,
        lr_schedule="wsd",
        lr_warmup_tokens=None,
        lr_wsd_decay_tokens=tokens,
        min_lr=given.get("min_lr"),
    )
    return dataclasses.replace(plan, phases=(*before, decay), train_tokens=begin + tokens)
