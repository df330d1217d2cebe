"""A training program that users run in place of train.py, as a table of facts and its command.

    machine = program.on(hardware.load("h100"), model)     # its rates and its terms of the time
    program.refusal(run, layout)                           # why it cannot run a layout, or ""
    program.words(run, layout, gpus, fp8)                  # the words of its own command

What a program does otherwise than Trine are facts of engines.toml. A program offers its own options
only: the values of a layout's fields in `values`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from architecture.shape import ModelShape
from base.errors import UserError
from config.schema import Config, Layout
from costs import hardware
from costs.hardware import Machine
from tools.planner import engines, releases
from tools.planner.engines import ProgramSoftware


@dataclass(frozen=True)
class Program:
    """A training program that users run in place of train.py.

    values: for fields of Layout, the values that are tried.
    """

    name: str
    version: str  # the release whose options the command has (releases.toml)
    engine: str  # a table of engines.toml; of models without experts
    rates: str  # the table whose machines have the rates of such programs
    expert_engine: str  # the same, of models with experts
    facts: dict[str, Any]  # facts of the printed command, over those of the engine
    expert_kind: type[ProgramSoftware]  # of models with experts
    expert_facts: dict[str, Any]
    values: dict[str, list[Any]]
    refusal: Callable[[Config, Layout], str]  # why the program cannot run a layout, or ""
    words: Callable[[Config, Layout, int, bool], list[str]]  # its command, after the launcher
    layout_words: Callable[[Config, Layout], list[str]]  # of these, the options of the layout
    notes: Callable[[Config, Layout, bool], list[str]]  # what the command has stand-ins for
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

    @property
    def release(self) -> str:
        """Return the release that a command is for, with its date, and which others there are."""
        return releases.says(self.name, self.version)

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
