"""The whole run that `plan.py budget --write FILE` writes: a run file, and the ladder before it.

    recipe = make(run, layout, tokens, loss)     run: with the model and the batch of the budget
    recipe.run, recipe.rungs         the large run and three small ones, each a Config
    recipe.lines()                   what of it is a law, a fit or a habit

Law: a formula of a paper. Fit: of this project's own runs. Habit: what most published runs do.

    batch       samples of the budget's answer; beside it what other laws say
    rate        of the smallest run of the ladder, which is the base of muP, so that it holds for
                all of them (architecture/mup.py)
    ladder      runs of a 32nd, a 16th and an 8th of the parameters, each with as many tokens for a
                parameter as the large one; plan.py ladder fits their losses
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from architecture import model_stats
from architecture.mup import check_mup
from architecture.shape import ModelShape
from base.errors import LayoutError, UserError
from config.command_line import reshape
from config.optimizers import WITH_MUP
from config.schema import GROUPS, Config, Layout
from tools.planner import model_sizes
from tools.planner.scaling_laws import BATCH_LAWS, RATE_LAW

PARTS = (32, 16, 8)  # the runs of the ladder have this part of the large one's parameters
WARMUP = 0.01  # share of the run
WARMUP_STEPS = 20  # at least: over so many the second moment is a mean, 1 / (1 - 0.95)
MOST_OF_LARGE = 0.9  # a ladder's largest run has less than this of the large run's parameters


@dataclass(frozen=True)
class Recipe:
    """A large run and its ladder. batches: the tokens of a step by each law, by its name."""

    run: Config
    rungs: tuple[Config, ...]
    batches: dict[str, float]

    def lines(self) -> list[str]:
        """Return lines that say what was chosen and by what."""
        training, model = self.run.training, self.run.model
        batch = training.global_batch_size * model.seq_length
        laws = ", ".join(f"{name} {_count(tokens)}" for name, tokens in self.batches.items())
        base = self.rungs[0].model
        warmup = training.lr_warmup_samples * model.seq_length
        law = RATE_LAW.source
        if self._is_below_law:
            law += f", whose runs have {RATE_LAW.least / 1e6:.0f} M parameters or more"
        return [
            f"batch    {_count(batch)} tokens a step; by law {laws}",
            f"rate     {training.lr:.2g} at the base, {base.layers} blocks of {base.hidden} (law: "
            f"{law}), kept by muP: --mup {model.mup} --mup-base-layers "
            f"{model.mup_base_layers} (law)",
            f"decay    {training.weight_decay:g}; Adam's betas {training.adam_beta1:g}, "
            f"{training.adam_beta2:g} (habit)",
            f"warm-up  {_count(warmup)} tokens, {WARMUP:.0%} of the run (habit); then a linear "
            "fall to 0 (arXiv 2502.15938)",
            f"init     deviation {training.init_std:g} at the base (habit), by class as muP (law)",
        ]

    @property
    def _is_below_law(self) -> bool:
        """Whether the base is smaller than the runs of the law of the rate by a factor of 10."""
        return 10 * _without_embedding(self.rungs[0].model) < RATE_LAW.least

    def commands(self, path: str) -> list[str]:
        """Return the commands of the ladder, and of what follows it; path: the large run's file."""
        rate = self.run.training.lr
        lines = []
        for number, rung in enumerate(self.rungs, 1):
            size = model_stats.parameters(rung.model)
            command = shlex.join(_words(rung, path, f"runs/ladder/{number}"))
            lines.append(f"ladder {number}: {_count(size)} parameters: {command}")
        lines.append(
            f"first: ladder 1 with --lr {rate / 2:.2g}, {rate:.2g} and {2 * rate:.2g}; all others "
            "then have the best of them"
        )
        if self._is_below_law:
            lines.append(
                "if the best is the lowest or the highest, try on by factors of 2: the law is far "
                "from its runs"
            )
        lines.append(
            f"then: python plan.py ladder runs/ladder/* --for-run {path} --write expected.json"
        )
        return lines

    def toml(self) -> str:
        """Return the large run's file."""
        comments = [*self.lines(), *self.commands("THIS_FILE")]
        head = [f"# {line}" for line in ["Written by plan.py budget.", *comments]]
        return "\n".join([*head, *toml_of(self.run)]) + "\n"


def make(run: Config, layout: Layout, tokens: float, loss: float) -> Recipe:
    """Return the recipe of a budget's answer.

    run: with its model and its batch. layout: the fastest. tokens: of the run. loss: by the law of
    the budget, at its end. Raise UserError if the model is too small for a ladder, or muP does not
    have a part of it.
    """
    like = run.model
    size = model_stats.parameters(like)
    shapes = [_rung(like, size, part) for part in PARTS]
    base = shapes[0]
    known = [model_stats.parameters(shape) for shape in shapes]
    if sorted({*known}) != known or known[-1] > MOST_OF_LARGE * size:
        raise LayoutError(
            f"budget: a ladder has runs of {', '.join(f'1/{part}' for part in PARTS)} of "
            f"{size:,} parameters, of which the vocabulary of {like.vocab_size:,} leaves no shape: "
            "a larger budget, or --model with fewer tokens"
        )
    ratio = tokens / size
    rate = RATE_LAW.rate(_without_embedding(base), ratio * known[0])
    rate = float(f"{rate:.2g}")
    run = _config(run, like, base, layout, tokens, rate)
    batch = run.training.global_batch_size
    large = batch * like.seq_length
    rungs = []
    for shape, parameters in zip(shapes, known, strict=True):
        read = ratio * parameters
        share = BATCH_LAWS[0].tokens(parameters, read) / BATCH_LAWS[0].tokens(size, tokens)
        samples = 2 ** max(3, round(math.log2(share * large / shape.seq_length)))
        training = replace(run.training, global_batch_size=samples)
        small = Layout(dp=1, micro_batch_size=_micro_batch(layout, samples))
        rungs.append(_config(replace(run, training=training), shape, base, small, read, rate))
    batches = {law.name: law.tokens(size, tokens, loss) for law in BATCH_LAWS}
    check_mup(run.model, run.training.optimizer, WITH_MUP)
    return Recipe(run, tuple(rungs), batches)


def _count(number: float) -> str:
    """Return a number of tokens or parameters with its unit, such as 4.2M."""
    unit, name = (1e9, "B") if number >= 1e9 else (1e6, "M") if number >= 2e5 else (1e3, "K")
    return f"{number / unit:.3g}{name}"


def _rung(like: ModelShape, size: int, part: int) -> ModelShape:
    """Return the shape of a run of the ladder."""
    try:
        return model_sizes.near(like, size / part, like.head_size)  # muP's heads keep their size
    except UserError as error:
        raise error.said(f"budget: no ladder for {size:,} parameters: {error}") from None


def _micro_batch(layout: Layout, samples: int) -> int:
    """Return the micro-batch of a run of the ladder, which runs on one to dp ranks.

    It is that of the large run if a rank there has whole blocks and at least an eighth of the
    optimizer's state: then the small run needs no more memory. Otherwise it is 1.
    """
    if layout.tp * layout.pp * layout.cp > 1 or layout.dp > PARTS[-1] or samples % layout.dp:
        return 1
    return math.gcd(layout.micro_batch_size, samples // layout.dp)


def _without_embedding(model: ModelShape) -> int:
    """Return the parameters of the blocks, by which laws of the rate go."""
    matrices = 1 if model.tied else 2
    return model_stats.parameters(model) - matrices * model.vocab_size * model.hidden


def _config(
    run: Config, shape: ModelShape, base: ModelShape, layout: Layout, tokens: float, rate: float
) -> Config:
    """Return a run of the recipe, the large one or one of the ladder, trained on `tokens`.

    base: the smallest model, from which muP scales the rate.
    """
    model = reshape(shape, {"mup": base.hidden, "mup_base_layers": base.layers})
    batch = run.training.global_batch_size
    samples = max(1, round(tokens / shape.seq_length / batch)) * batch
    warmup = max(WARMUP_STEPS, round(WARMUP * samples / batch)) * batch
    changed: dict[str, Any] = {"lr": rate, "min_lr": 0.0, "lr_schedule": "linear", "steps": None}
    changed |= {"lr_warmup_samples": warmup, "train_samples": samples}
    training = replace(run.training, **changed)
    return replace(run, model=model, layout=layout, training=training)


def _words(rung: Config, path: str, out: str) -> list[str]:
    """Return the command of a run of the ladder: the large run's file with other sizes."""
    model, training = rung.model, rung.training
    sizes = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv-heads": model.kv_heads,
        "ffn-hidden": model.ffn_hidden,
        "global-batch-size": training.global_batch_size,
        "train-samples": training.train_samples,
        "lr-warmup-samples": training.lr_warmup_samples,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "micro-batch-size": rung.layout.micro_batch_size,
        "out": out,
    }
    words = ["python", "train.py", "--config", path]
    for name, value in sizes.items():
        words += [f"--{name}", str(value)]
    return [*words, "--set", f"head_size={model.head_size}"]


def toml_of(config: Config) -> list[str]:
    """Return the lines of a run file with the options that are not at their defaults.

    Options that follow from others, such as kv_heads from heads, are left out.
    """
    lines = []
    follows = config.model.derived() | {"max_positions": config.model.seq_length}
    for group, cls in GROUPS.items():
        values = getattr(config, group)
        found = []
        for field in fields(cls):
            value = getattr(values, field.name)
            default = follows.get(field.name, field.default) if group == "model" else field.default
            is_default = value is None or value == default or field.name in ("dp", "precision")
            if not is_default:
                found.append(f"{field.name} = {_literal(value)}")
        if found:
            lines += ["", f"[{group}]", *found]
    return lines


def _literal(value: Any) -> str:
    """Return a value as TOML has it."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return json.dumps(list(value))
    return json.dumps(value)
