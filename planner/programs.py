"""Other training programs for which the planner answers: `plan.py layouts --for megatron`.

    program = programs.of("megatron")
    machine = program.on(hardware.load("h100"), model)     # its rates and its terms of the time
    program.refusal(run, layout)                           # why it cannot run a layout, or ""
    program.words(run, layout, gpus)                       # the words of its own command

What a program does otherwise than Trine are facts of engines.toml. A program offers its own options
only: the values of a layout's fields in `values`. megatron_words.py and torchtitan_words.py write
the commands of a version that they name. To add a program, add its engine and its words.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from config.errors import UserError, nearest
from config.schema import Config, Layout, ModelShape
from planner import engines, hardware, megatron_words, torchtitan_words
from planner.engines import Engine
from planner.enumeration import VARIED
from planner.expert_engines import ExpertEngine
from planner.hardware import Machine


@dataclass(frozen=True)
class Program:
    """A training program that users run in place of train.py.

    values: for fields of Layout, the values that are tried.
    """

    name: str
    version: str  # the version whose options the command has
    engine: str  # a table of engines.toml; of models without experts
    rates: str  # the table whose machines have the rates of such programs
    expert_engine: str  # the same, of models with experts
    facts: dict[str, Any]  # facts of the printed command, over those of the engine
    expert_kind: type[Engine]  # of models with experts
    expert_facts: dict[str, Any]
    values: dict[str, list[Any]]
    refusal: Callable[[Config, Layout], str]  # why the program cannot run a layout, or ""
    words: Callable[[Config, Layout, int, bool], list[str]]  # its command, after the launcher
    layout_words: Callable[[Config, Layout], list[str]]  # of these, the options of the layout
    notes: Callable[[Config, Layout], list[str]]  # what the command has stand-ins for
    says: frozenset[str]  # options of train.py that the command says, or that are refused

    def machine(self, name: str, calibration: str | None = None) -> Machine:
        """Return the machine of a name with the rates of this program's published runs, if any."""
        machine = hardware.load(name, calibration)
        own = engines.programs()[self.rates].get("machines", {}).get(machine.name)
        if own is None or calibration:
            return machine
        return replace(hardware.load(own), note=f"{name}: planned with the rates of {own}")

    def on(self, machine: Machine, model: ModelShape, fp8: bool = False) -> Machine:
        """Return the machine with this program's terms of time and memory in place of Trine's.

        fp8: whether linear layers compute in fp8; raise UserError for a GPU that has none.
        """
        if fp8 and not machine.fp8:
            raise UserError(f"--fp8: {machine.device} has no fp8 arithmetic")
        has_experts = model.experts > 1
        facts = engines.programs()[self.expert_engine if has_experts else self.engine]["software"]
        facts = facts | self.facts | {"fp8": fp8}
        if not has_experts:
            return engines.on(machine, facts)
        return engines.on(machine, facts | self.expert_facts, kind=self.expert_kind)

    def left_out(self, given: Collection[str]) -> list[str]:
        """Return a sentence with the given options that the command does not say, if there are any.

        given: the names of options of train.py that the user gave.
        """
        unsaid = {*given} - self.says - {"model", "config"}
        names = sorted(name.replace("_", "-") for name in unsaid)
        return [f"not in {self.name}'s command: {', '.join(names)}"] if names else []

    def check(self, given: dict[str, Any]) -> None:
        """Raise UserError for a layout's option that the program does not have.

        given: the fields of Layout that the user gave, with their values.
        """
        for name, value in given.items():
            has = self.values.get(name)
            if has is not None and value not in has and value is not None:
                flag = name.replace("_", "-")
                known = ", ".join(map(str, has))
                raise UserError(f"--{flag} {value}: {self.name} has {known} (--for {self.name})")


PROGRAMS = {
    "megatron": Program(
        name="megatron",
        version=megatron_words.VERSION,
        engine="nemo-2025",
        rates="nemo-2025",
        expert_engine="megatron-experts",
        facts={},
        expert_kind=ExpertEngine,
        expert_facts={"sent_once": False},  # of the dispatcher that the command names
        values={
            "schedule": ["1f1b", "interleaved"],
            "virtual_stages": [2, 3, 4, 5, 6, 8, 10],  # those of published runs
            "zero": [1, 0],
            "recompute": ["none", "full"],
            "sequence_parallel": [True, False],
            "partition": ["balanced"],
        },
        refusal=megatron_words.refusal,
        words=megatron_words.words,
        layout_words=megatron_words.layout_words,
        notes=megatron_words.notes,
        says=megatron_words.SAYS,
    ),
    "torchtitan": Program(
        name="torchtitan",
        version=torchtitan_words.VERSION,
        engine="torchtitan",
        rates="automodel",  # its own rows are of a cluster with another H100
        expert_engine="torchtitan",
        facts={"fused_norms": True, "fused_elementwise": True, "keeps_products": True},  # compiled
        expert_kind=Engine,  # no run with experts was measured: Trine's formulas
        expert_facts={},
        values={
            "schedule": ["1f1b", "gpipe", "interleaved", "zb-v"],
            "virtual_stages": [2, 4],
            "zero": [1, 3],
            "recompute": ["none", "selective", "full"],
            "recompute_layers": [None],
            "sequence_parallel": [True],
            "partition": ["blocks"],
        },
        refusal=torchtitan_words.refusal,
        words=torchtitan_words.words,
        layout_words=torchtitan_words.layout_words,
        notes=torchtitan_words.notes,
        says=torchtitan_words.SAYS,
    ),
}


def of(name: str) -> Program:
    """Return the program of a name; raise UserError if there is none."""
    if name not in PROGRAMS:
        known = ", ".join(PROGRAMS)
        meant = nearest(name, list(PROGRAMS)) or ""
        raise UserError(f"--for {name!r}: there are {known}{meant}; without --for it is train.py")
    return PROGRAMS[name]


def trials(program: Program) -> dict[str, Any]:
    """Return the values of a program's options as Asked.fixed has them: one value, or a list."""
    return {
        name: values[0] if len(values) == 1 and name not in VARIED else list(values)
        for name, values in program.values.items()
    }
