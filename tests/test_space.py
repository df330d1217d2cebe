"""The space of a search: if this failed, a layout would be tried twice, never, or be refused."""

import dataclasses

from config import command_line
from config.schema import Layout
from costs import hardware, risk
from tools.planner import enumeration
from tools.tuner import search_space

SHAPE = "--layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --global-batch-size 16"


def config(*more: str):
    return command_line.parse([*SHAPE.split(), *more])


def candidates(*more: str, given=None):
    return search_space.candidates(config(*more), hardware.load("cpu"), 8, given or {})[:2]


def test_arguments_give_the_same_run_again():
    run = config("--no-bias", "--positions", "rotary", "--lr", "1e-2", "--data", "a", "b")
    found, _, _ = search_space.candidates(run, hardware.load("cpu"), 8, {})
    for candidate in found[::25]:
        again = command_line.parse(search_space.to_cli_args(candidate.config))
        assert again == candidate.config


def test_no_two_candidates_run_the_same_program():
    found, _ = candidates()
    assert len({c.key for c in found}) == len(found)
    assert len({c.label for c in found}) == len(found)
    one = [c for c in found if c.config.layout.pp == 1 and c.config.layout.tp == 1]
    assert {c.config.layout.schedule for c in one} == {"1f1b"}
    assert not any(c.config.layout.sequence_parallel for c in one)


def test_every_choice_of_config_is_tried():
    found, _ = candidates()
    tried = {axis: search_space.choices(axis) for axis in ("zero", "sequence_parallel")}
    tried["schedule"] = enumeration.SCHEDULES  # a schedule need not be in it, and auto is not
    assert {*enumeration.SCHEDULES} <= {*search_space.choices("schedule")}
    for axis, every in tried.items():
        assert {getattr(c.config.layout, axis) for c in found} - {None} == {*every}
    assert {"balanced", "blocks"} <= {c.config.layout.partition for c in found}
    assert {(c.config.layout.tp, c.config.layout.pp) for c in found} >= {(1, 1), (4, 2), (2, 4)}
    assert all(c.ranks == 8 for c in found)
    seconds = [c.prediction.seconds for c in found]
    assert seconds == sorted(seconds)


def test_options_that_go_with_some_others_are_tried_with_these():
    found, _ = candidates(given={"zero": [1], "partition": ["balanced"]})
    at = [c.config.layout for c in found]
    assert {one.virtual_stages for one in at if one.schedule == "interleaved"} >= {2, 3}
    blocks = {one.recompute_layers for one in at if one.recompute == "full"}
    assert blocks == {None, 1}  # so little is enough here
    assert {one.recompute_layers for one in at if one.recompute == "none"} == {None}
    assert {one.cp for one in at} == {1}


def test_the_options_of_zero_3_are_tried_where_it_is():
    """Each choice of both, unless one is held; without it, and on one replica, the default."""

    def choices(layouts) -> set[tuple[bool, bool]]:
        return {(one.sync_each_batch, one.reshard_after_forward) for one in layouts}

    found, rejected = candidates()
    layouts = [c.config.layout for c in found]
    sharded = [one for one in layouts if one.zero == 3 and one.dp * one.cp > 1]
    assert choices(sharded) == {(True, True), (True, False), (False, True), (False, False)}
    assert choices(one for one in layouts if one not in sharded) == {(True, True)}
    assert rejected == candidates(given={"zero": [0, 1, 2]})[1]
    # Gradients of a single micro-batch are reduced once in any case.
    assert all(one.sync_each_batch for one in sharded if one.micro_batch_size * one.dp == 16)
    alone, _ = candidates(given={"zero": [3], "sync_each_batch": [False]})
    several = [c.config.layout for c in alone if c.config.layout.dp > 1]
    assert choices(several) == {(False, True), (False, False)}
    assert choices(c.config.layout for c in candidates(given={"pp": [2]})[0]) == {(True, True)}
    adafactor, _ = candidates("--optimizer", "adafactor")
    assert choices(c.config.layout for c in adafactor) == {(True, True)}


def test_cp_is_tried_with_long_samples():
    run = config("--seq-length", "8192", "--pp", "1")
    given = {"pp": [1], "zero": [1], "sequence_parallel": [False], "micro_batch_size": [1]}
    found, _, _ = search_space.candidates(run, hardware.load("h100"), 8, given)
    places = {(c.config.layout.tp, c.config.layout.cp, c.config.layout.dp) for c in found}
    assert places >= {(1, 1, 8), (1, 2, 4), (1, 8, 1), (2, 4, 1), (4, 2, 1)}
    assert all(c.ranks == 8 for c in found)
    assert len({c.label for c in found}) == len({c.key for c in found}) == len(found)
    held, _, _ = search_space.candidates(run, hardware.load("h100"), 8, given | {"cp": [2]})
    assert {c.config.layout.cp for c in held} == {2}


def test_what_surely_needs_more_memory():
    def candidate(*more: str) -> search_space.Candidate:
        return search_space.Candidate(config("--pp", "2", "--dp", "1", *more), None)

    none, every = candidate(), candidate("--recompute", "full")
    first = candidate("--recompute", "full", "--recompute-layers", "1")
    scores = candidate("--recompute", "selective")
    wider = candidate("--cp", "2")
    more = search_space.needs_more_memory
    surely = [(none, every), (none, first), (none, scores), (every, every)]
    for one, other in [*surely, (first, first)]:
        assert more(one, other)
    for one, other in [(every, first), (scores, first), (first, scores), (none, wider)]:
        assert not more(one, other)
    assert not more(wider, none)


def test_a_ramp_up_rejects_what_cannot_run_it():
    held = {"recompute": ["none"], "partition": ["balanced"]}
    every, _ = candidates(given=held)
    rampup = ("--rampup-batch-size", "4", "4", "64")
    found, rejected = candidates(*rampup, given=held)
    assert 0 < len(found) < len(every)
    assert any("does not divide" in r.reason and "(4)" in r.reason for r in rejected)


def test_the_key_leaves_out_length_and_folder():
    def key(*more: str) -> str:
        held = {"zero": [1], "partition": ["balanced"], "schedule": ["1f1b"]}
        return candidates(*more, given=held)[0][0].key

    assert key("--steps", "5") == key("--steps", "500", "--out", "elsewhere")
    assert key("--steps", "5") != key("--lr", "1e-3")


def test_layouts_above_the_risk_are_no_candidates():
    run, machine = config("--hidden", "4096", "--layers", "16"), hardware.load("a100-80")
    held = {"zero": [1], "schedule": ["1f1b"], "recompute": ["none"]}
    every = search_space.candidates(run, machine, 8, held).found
    third = sorted(map(_needed, every))[len(every) // 3]  # some places then have risky layouts only
    per_safe_byte = machine.memory / risk.safe_bytes(machine, 0.05)
    tight = dataclasses.replace(machine, memory=third * 1.01 * per_safe_byte)
    found, rejected, _ = search_space.candidates(run, tight, 8, held, 0.05)
    assert 0 < len(found) < len(every)
    assert all(c.prediction.risk <= 0.05 for c in found)
    assert len(search_space.candidates(run, tight, 8, held).found) > len(found)
    assert any("above --risk(5%)" in entry.reason for entry in rejected)


def _needed(candidate: search_space.Candidate) -> float:
    return max(stage.total for stage in candidate.prediction.memory)


def test_of_many_layouts_the_likely_fastest_are_predicted_and_one_of_each_place():
    run, machine = config(), hardware.load("cpu")
    every = search_space.candidates(run, machine, 8, {})
    some = search_space.candidates(run, machine, 8, {}, most=100)
    assert every.slower == 0
    assert len(some.found) < 300 < len(every.found)
    assert some.slower > len(every.found) - 300
    assert some.found[0].prediction.seconds == every.found[0].prediction.seconds
    seconds = every.found[0].prediction.seconds
    near = [c for c in every.found if c.prediction.seconds < 1.2 * seconds]
    places = {_place(c.config.layout) for c in near}
    assert places <= {_place(c.config.layout) for c in some.found}
    assert len(places) > 4
    alone = search_space.candidates(run, machine, 8, {}, most=1)
    assert places <= {_place(c.config.layout) for c in alone.found}


def _place(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.pp, layout.micro_batch_size


def test_auto_is_searched_for_where_it_is_asked_for():
    given = {"schedule": ["1f1b", "auto"], "zero": [1], "pp": [2], "recompute": ["none"]}
    found, _ = candidates(given=given)
    assert {c.config.layout.schedule for c in found} == {"1f1b", "auto"}
    alone, _ = candidates(given=given | {"schedule": ["auto"]})
    assert {c.config.layout.schedule for c in alone} == {"auto"}
