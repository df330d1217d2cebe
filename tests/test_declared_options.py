"""Options that no golden line names: if this failed, a new one would change what a layout trains.

Cases are made from the declaration of the option (derived_lines.py): each choice, or a number other
than the default, under tp, pp, cp, ep and ZeRO against one rank. Nobody has to write a list.
"""

import json

import pytest
from derived_lines import (
    Setting,
    cases_of,
    named_in_lines,
    settings_without_a_line,
)
from small_corpora import write_corpora
from test_config import BY_HAND
from test_golden import (
    assert_equal_runs,
    distance,
    reference,
    run_cases,
    single_rank,
    without_layout,
)

from base.errors import UserError
from base.options import as_typed
from config import command_line
from config.examples import examples, needed
from config.schema import GROUPS, all_options
from config.spelling import NAMES
from config.validation import is_met
from model import ACTIVATIONS, activation_of
from schedules.orders import ORDERS

# What computes a number on one rank. An option of these groups that changes none is not used.
COMPUTED = {*GROUPS["model"].__dataclass_fields__, *GROUPS["training"].__dataclass_fields__}
DERIVED = settings_without_a_line(named_in_lines())
BASE = "--layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 64 --steps 3"


def differs_from_the_run_without(case: dict, setting: Setting) -> bool:
    """Whether the option changes a loss, a gradient norm or a weight of the run on one rank."""
    others = {name: value for name, value in without_layout(case).items() if name != setting.name}
    with_it, without = reference(case), single_rank(json.dumps(others))
    if with_it["weights"].keys() != without["weights"].keys():
        return True
    return distance(with_it, without) != 0  # a NaN differs


def check_settings(settings: list[Setting], folder) -> None:
    """Run the cases of some settings; fail unless each is as on one rank and does something."""
    every = []
    for setting in settings:
        try:
            every += [(setting, case) for case in cases_of(setting, folder)]
        except UserError as error:
            pytest.fail(
                f"{setting}: {error}. Give its declaration in config/ an example=VALUE, or write a "
                "line with it into tests/data/golden/experts_options.txt"
            )
    if not every:
        return
    write_corpora(folder)
    results = run_cases(4, [case for _, case in every], folder)
    for (_, case), result in zip(every, results, strict=True):
        assert_equal_runs(case, result, reference(case))
    for setting in settings:
        cases = [case for other, case in every if other == setting]
        if setting.name in COMPUTED:
            assert any(differs_from_the_run_without(case, setting) for case in cases), (
                f"{setting} changes no number of a run: does its module read it? An option that "
                "changes nothing that is computed is one of `Run` in config/run_options.py"
            )
        for case in cases if setting.name in COMPUTED else ():
            assert "kv_lora_rank" not in case or differs_from_the_run_without(case, setting), (
                f"{setting} changes nothing with kv_lora_rank: if only attention.py reads it, its "
                "declaration says not_latent=True"
            )


def test_options_and_choices_without_a_line_equal_the_single_rank_run(tmp_path):
    """There are some only while an option is new: the golden lines name the others."""
    check_settings(DERIVED, tmp_path)


@pytest.mark.slow
def test_a_line_that_is_made_is_one_that_could_be_written(tmp_path):
    """Some choices, as if no line named them."""
    wanted = [Setting("activation", "relu"), Setting("schedule", "zb-v")]
    wanted += [Setting("attention_softcap", 1.0)]
    made = settings_without_a_line({})
    assert {*wanted} <= {*made}
    check_settings(wanted, tmp_path)


def test_every_choice_of_an_activation_and_a_schedule_is_made_somewhere():
    choices = all_options()["activation"].metadata["choices"]
    for name in choices:
        with_name = command_line.parse([*BASE.split(), "--activation", name]).model
        assert callable(activation_of(with_name)), name
    assert {*ACTIVATIONS} <= {*choices}, "name it in the choices of architecture/shape.py"
    choices = all_options()["schedule"].metadata["choices"]
    assert {*ORDERS} | {"auto"} == {*choices}, "SCHEDULES of config/schema.py names what ORDERS has"


# ---- Limits and needs ----------------------------------------------------------------------------


def words_of(name: str, value) -> list[str]:
    """An option as it is typed."""
    if all_options()[name].metadata["file_only"]:
        return ["--set", f"{name}={json.dumps(value) if isinstance(value, bool) else value}"]
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{flag}", *map(str, values)]


def parsed(chosen: dict):
    words = [word for name, value in chosen.items() for word in words_of(name, value)]
    return command_line.parse([*BASE.split(), *words])


NEEDY = [name for name, field in all_options().items() if field.metadata["needs"]]


@pytest.mark.parametrize("name", sorted({*NEEDY} - BY_HAND))
def test_an_option_is_refused_without_what_its_declaration_needs(name):
    """And taken with it."""
    field = all_options()[name]
    needs, values = field.metadata["needs"], examples(field)
    assert values, f"{name}: give its declaration an example=VALUE"
    without = {}  # the options that meet the need by default, with values that do not
    for other in needs.options:
        default = all_options()[other].default
        if default is not None and needs.is_met_by(default):
            no = [v for v in (needs.above, *examples(all_options()[other])) if v is not None]
            without[other] = next(value for value in no if not needs.is_met_by(value))
    with pytest.raises(UserError, match=f"^--(set )?(no-)?{name.replace('_', '-')}|^{name}"):
        parsed(without | {name: values[0]})
    config = parsed(needed(field) | {name: values[0]})
    assert is_met(config, needs)


CHOOSY = [name for name, field in all_options().items() if field.metadata["choices"]]


@pytest.mark.parametrize("name", CHOOSY)
def test_a_value_that_is_no_choice_is_refused(name):
    """By the list of choices, whose order is its own."""
    none = 99 if all_options()[name].type is int else "no-such-choice"
    with pytest.raises(UserError, match=f"^{as_typed(all_options()[name])} is one of .*{none}"):
        parsed({name: none})


# By type: a text that is none of its values, and what the sentence asks for.
NO_VALUE = {int: ("2.5", "a whole number"), float: ("many", "a number")}
NUMBERS = [
    name
    for name, field in all_options().items()
    if field.type in NO_VALUE and not field.metadata["choices"] and not field.metadata["nargs"]
]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_text_that_is_no_number_is_refused(name):
    text, wanted = NO_VALUE[all_options()[name].type]
    with pytest.raises(UserError, match=f"^{as_typed(all_options()[name])} takes {wanted}, not "):
        parsed({name: text})


KEYS = [name for name, field in all_options().items() if field.metadata["file_only"]]


@pytest.mark.parametrize("name", KEYS)
def test_the_flag_of_a_key_says_where_to_give_it(name):
    """Unless Megatron-LM has the flag, which means the key then."""
    flag = f"--{name.replace('_', '-')}"
    if flag.removeprefix("--") in NAMES["keys"]:
        pytest.skip(f"{flag} is Megatron-LM's")
    with pytest.raises(UserError, match=rf"^{flag} is a key of \[\w+\] .* or give --set {name}="):
        command_line.parse([*BASE.split(), flag])


LIMITED = [
    pytest.param(name, limit, id=f"{name}-{limit}")
    for name, field in all_options().items()
    for limit in ("minimum", "maximum", "above", "below")
    if field.metadata[limit] is not None
]


@pytest.mark.parametrize(("name", "limit"), LIMITED)
def test_a_number_beyond_the_limit_of_its_declaration_is_refused(name, limit):
    bound = all_options()[name].metadata[limit]
    step = {"minimum": -1, "maximum": 1, "above": 0, "below": 0}[limit]
    flag = name if all_options()[name].metadata["file_only"] else f"--{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"{flag} must be "):
        parsed({name: all_options()[name].type(bound + step)})
