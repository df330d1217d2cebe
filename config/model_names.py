"""Models by name: the presets of presets.toml, and what a --model means, a preset or a path.

    preset("gpt2-124m")                            a ModelShape
    means_preset("meta-llama/Meta-Llama-3-8B")     True: preset_name finds llama-3-8b

Only a run with --model, and --help, need this module.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import families
from config.messages import UserError, nearest
from config.schema import ModelShape


@dataclass(frozen=True)
class Mixture:
    """A named shape whose blocks have experts, each an MLP of ffn_hidden: plan.py alone takes it.

    experts: the planner's options by name. lacks: sentences about what is left out of the model.
    """

    shape: ModelShape
    experts: dict[str, int]
    lacks: list[str]


def _load_presets() -> tuple[dict[str, ModelShape], dict[str, Mixture], dict[str, str]]:
    """Named shapes in the file's order, those with experts, and other names for some of them."""
    tree = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    shapes = {
        name: ModelShape(*sizes, **(_first_options(family.get("name")) | family["shared"]))
        for family in tree["family"] + tree["mixture"]
        for name, sizes in family["models"].items()
    }
    mixtures = {
        name: Mixture(shapes.pop(name), family["experts"], family.get("lacks", []))
        for family in tree["mixture"]
        for name in family["models"]
    }
    return shapes, mixtures, tree["aliases"]


def _first_options(family: str | None) -> dict[str, Any]:
    """Return the options that models of a family in families.toml have by default."""
    options = families.FAMILIES[family].options if family else {}
    return {name: allowed[0] for name, allowed in options.items()}


PRESETS, MIXTURES, ALIASES = _load_presets()
# Names of repositories may end in these words, on which the model's shape does not depend.
ENDINGS = re.compile(r"(-(base|hf|chat|instruct|deduped|v0\.1))+$")


def preset_name(name: str) -> str:
    """The name of a preset in lower case, where `name` may be that of a repository, such as
    meta-llama/Meta-Llama-3-8B; of no preset if there is none.
    """
    plain = ENDINGS.sub("", name.lower().rpartition("/")[2].removeprefix("meta-"))
    return ALIASES.get(plain, plain)


def means_preset(name: str) -> bool:
    """Whether a --model is meant as a preset and not as a path: OWNER/MODEL without a folder OWNER,
    or a name that no file or folder has.
    """
    owner = name.rpartition("/")[0]
    path = name.endswith(".json") or "/" in owner or Path(owner or name).exists()
    return not path or name.lower() in {*PRESETS, *MIXTURES, *ALIASES}


def preset(name: str) -> ModelShape:
    """The shape of that name; UserError if it has experts, or with the nearest if there is none."""
    key = preset_name(name)
    if key in MIXTURES:
        experts = "{experts} experts, {experts_per_token} for each token"
        text = experts.format(**MIXTURES[key].experts)
        raise UserError(f"{name} has {text}: it can be planned (plan.py --model), not trained yet")
    if key not in PRESETS:
        hint = nearest(key, [*PRESETS, *MIXTURES], 0.5, most=3) or "; train.py --help lists them"
        no_file = ", and there is no such file" if "/" in name else ""
        raise UserError(f"no preset is called {name!r}{no_file}{hint}")
    return PRESETS[key]


def listed() -> str:
    """The help text of --model."""
    text = f"start from a named shape: {', '.join(PRESETS)}, or a repository's name for one"
    text += f" (for plan.py alone: {', '.join(MIXTURES)})"
    return text + ", or that of a config.json of transformers, a run's folder, a checkpoint"
