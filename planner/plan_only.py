"""What can be planned although the engine cannot train it: mixtures of experts, fp8.

    model, machine, notes = applied(options, model, machine)

A PlanOnly is a shape with properties for which neither train.py nor a Layout has an option. Every
formula of the planner takes it in place of the shape. No constant was fitted to measured rows of
models with experts.
"""

import contextlib
import json
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config import families
from config.messages import UserError
from config.schema import ModelShape
from config.spelling import MIXTURES, means_preset, preset_name
from planner.hardware import Machine

FLAGS = ("experts", "experts_per_token", "ep", "fp8")
# Questions whose answer does not follow from one shape on given GPUs.
OTHERS = ("largest", "smallest", "shapes", "rampup")
EXPERTS = ("num_local_experts", "num_experts")  # keys of a config.json: experts of a block
SHARED = ("shared_expert_intermediate_size", "mlp_only_layers")  # keys of what is not planned
# Families with experts, and those that have the same blocks without experts.
DENSE = {"mixtral": "mistral", "qwen3_moe": "qwen3", "qwen2_moe": "qwen2"}


@dataclass(frozen=True)
class PlanOnly(ModelShape):
    """A shape whose MLP may be several experts."""

    experts: int = 1
    experts_per_token: int = 1
    ep: int = 0  # ranks that share a block's experts; 0: as many of a node as divide them

    @property
    def mlps(self) -> tuple[int, int]:
        """As of a ModelShape."""
        return self.experts, self.experts_per_token


def applied(
    options: Namespace, model: ModelShape, machine: Machine
) -> tuple[ModelShape, Machine, list[str]]:
    """Shape and machine with what these options ask for, and a sentence if the engine lacks it.

    Raises UserError for numbers that do not divide, and for fp8 where the GPU has none.
    """
    given = {name: getattr(options, name) for name in FLAGS if getattr(options, name)}
    if not given:
        return model, machine, []
    if options.question in OTHERS:
        what = "a model with experts" if options.experts else f"--{next(iter(given))}"
        raise UserError(f"{what} goes with layouts, days and stages, not {options.question}")
    cannot = []
    if options.experts:
        cannot.append("mixtures of experts")
    if given.pop("fp8", False):
        if not machine.fp8:
            raise UserError(f"--fp8: {machine.name} has no fp8 arithmetic; h100, h200 and b200 do")
        machine = replace(machine, software=replace(machine.software, fp8=True))
        cannot.append("fp8")
    if given:
        model = PlanOnly(**asdict(model) | given)
        _check(model, "experts" in given)
    return model, machine, [f"planned only: train.py cannot train with {' and '.join(cannot)}"]


def _check(model: PlanOnly, has_experts: bool) -> None:
    experts, active, ep = model.experts, model.experts_per_token, model.ep
    if not has_experts and (ep or active > 1):
        raise UserError("--ep and --experts-per-token need --experts N")
    if has_experts and not 0 < active <= experts:
        raise UserError(f"--experts-per-token {active} is not 1 to experts({experts})")
    if ep and experts % ep:
        raise UserError(f"ep({ep}) does not divide experts({experts})")


def of_config(name: str) -> tuple[dict[str, Any], dict[str, int], list[str]]:
    """For a --model with experts, which is a preset or a config.json: the options of the shape, the
    values of FLAGS, and sentences on what else the model has.

    All are empty for any other model. Raises UserError if the model cannot be planned.
    """
    if means_preset(name):
        mixture = MIXTURES.get(preset_name(name))
        if mixture:
            return asdict(mixture.shape), mixture.experts, mixture.lacks
    file = Path(name)
    if file.is_dir():
        file = file / "config.json"
    if file.suffix != ".json" or not file.is_file():
        return {}, {}, []
    # If the file is no JSON, families.py says more.
    with contextlib.suppress(ValueError, RecursionError):
        facts = json.loads(file.read_text())
        if isinstance(facts, dict) and any(facts.get(key) for key in EXPERTS):
            return _of_experts(facts, name)
    return {}, {}, []


def _of_experts(
    facts: dict[str, Any], name: str
) -> tuple[dict[str, Any], dict[str, int], list[str]]:
    """As `of_config`: the shape is that of the family without experts."""
    kind = facts.get("model_type")
    if kind not in DENSE:
        raise UserError(f"{name} is a {kind!a:.80}; with experts, known are {', '.join(DENSE)}")
    for key in SHARED:
        if facts.get(key):
            raise UserError(f"{name} has {key} {facts[key]}: not planned")
    shape, lacks = families.from_config(facts | {"model_type": DENSE[kind]}, name)
    if width := facts.get("moe_intermediate_size"):
        shape["ffn_hidden"] = width
    experts = {
        "experts": next(facts[key] for key in EXPERTS if facts.get(key)),
        "experts_per_token": facts.get("num_experts_per_tok", 2),
    }
    return shape, experts, lacks
