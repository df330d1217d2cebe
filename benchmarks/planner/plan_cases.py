"""Random questions to `plan.py layouts`, and checks of the answers that need no measurement.

    python benchmarks/planner/plan_cases.py --seconds 300 --seed 1  # status 1 if any fails
    python benchmarks/planner/plan_cases.py --questions 1000 --seconds 500 --cases CASES.jsonl
    python benchmarks/planner/plan_cases.py --seconds 0 --cases CASES.jsonl --table FILE.md

A case is a command line: model, machine, GPUs, batch and given options, all drawn. Of its answer
it is checked that
  * it is an answer or one sentence, never another exception;
  * each listed layout is taken by train.py's own check, and is what its flags say;
  * each printed number is what `predict` says of that layout, and each given option is held;
  * no layout that train.py takes is faster than the first (all of them, in a small space);
  * more memory or a faster network makes nothing slower, and giving what was found changes nothing.
"""

import argparse
import math
import random
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import asdict, fields, replace
from functools import partial
from io import StringIO
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import plan
from base.errors import UserError
from benchmarks.results_file import ResultsFile, machine
from config import command_line
from config.schema import Config, Layout
from config.validation import check_any_length
from costs import memory
from costs.job import Job
from costs.partition_costs import blocks_of
from costs.step_time import predict, with_networks
from tools.planner import layouts
from tools.planner.closed_form import ClosedForm
from tools.planner.enumeration import LONG, RECOMPUTATIONS, SCHEDULES, Asked, Table, divisors
from tools.planner.questions import Question, prediction_data

NEAR = 1.001  # a layout is faster if it takes less than 1 / NEAR of the time
DOUBT = 0.95  # no layout is faster than this share of its closed form
MACHINES = ("a100-80", "a100-40", "h100", "h100-megatron", "v100-32", "v100-16", "b200", "cpu")
PRESETS = ("gpt2-124m", "gpt2-1.5b", "llama-3-8b", "bloom-7b1", "opt-13b")
SMALL = 8  # GPUs up to which all layouts are compared
MOST = 60_000  # layouts of a space that are compared
RECOMPUTED = ("selective", "full")
LONGEST = 600  # letters of a sentence


def drawn_model(chance: random.Random, small: bool) -> list[str]:
    """Flags of a model; some shapes cannot be split at all."""
    if not small and chance.random() < 0.4:
        return ["--model", chance.choice(PRESETS)]
    heads = chance.choice([1, 4, 6, 8, 12, 16, 25, 32])
    hidden = heads * chance.choice([32, 64, 80, 128, 256])
    words = ["--layers", chance.choice([1, 2, 3, 6, 7, 12] if small else [4, 13, 24, 40, 62])]
    words += ["--hidden", hidden, "--heads", heads]
    words += ["--vocab-size", chance.choice([100, 257, 32000, 50257, 250_001])]
    words += ["--seq-length", chance.choice([128, 1000, 1024, 2048, 4096, 8192, 32768])]
    kv_heads = [n for n in range(1, heads + 1) if heads % n == 0]
    words += ["--kv-heads", chance.choice(kv_heads)] * (chance.random() < 0.4)
    words += ["--activation", chance.choice(["swiglu", "gelu"])] * (chance.random() < 0.5)
    words += ["--positions", chance.choice(["rotary", "alibi"])] * (chance.random() < 0.5)
    words += ["--ffn-hidden", chance.choice([hidden, 3 * hidden])] * (chance.random() < 0.2)
    words += [flag for flag in ("--no-tied", "--no-bias") if chance.random() < 0.4]
    return list(map(str, words))


def drawn_options(chance: random.Random) -> list[str]:
    """Flags of layout and training that are given."""
    values: dict[str, list[Any]] = {
        "tp": [1, 2, 3, 4, 8, 16],
        "pp": [1, 2, 3, 4, 8],
        "cp": [1, 2, 4],
        "dp": [1, 2, 3, 4],
        "micro-batch-size": [1, 2, 3, 4, 7, 16],
        "schedule": [*SCHEDULES],
        "virtual-stages": [2, 3],
        "partition": ["balanced", "blocks", "layers"],
        "recompute": ["none", "selective", "full"],
        "recompute-layers": [0, 1, 2, 100],
        "zero": [0, 1, 2, 3],
        "optimizer": ["adamw", "adamw8bit", "sgd", "muon", "adafactor", "lion"],
        "precision": ["bf16", "fp16", "fp32"],
        "grad-dtype": ["fp32", "bf16"],
        "pad-vocab-multiple": [1, 64, 1000],
        "rampup-batch-size": ["2 2 100"],
        "risk": [0.001, 0.2, 1.0],
    }
    given = [name for name in values if chance.random() < 0.06]
    words = [w for n in given for w in (f"--{n}", *str(chance.choice(values[n])).split())]
    switches = ("sequence-parallel", "overlap-param-gather")
    for name in switches:
        if chance.random() < 0.06:
            words.append(chance.choice(["--", "--no-"]) + name)
    return words


def drawn(chance: random.Random, small: bool) -> list[str]:
    """The words of a question after `layouts`."""
    counts = [1, 2, 3, 4, 6, 8] if small else [1, 5, 6, 12, 16, 24, 32, 48, 64, 100]
    words = [*drawn_model(chance, small), "--gpu", chance.choice(MACHINES)]
    words += ["--gpus", str(chance.choice(counts))]
    batches = [1, 7, 8, 12, 24, 32] if small else [1, 7, 60, 64, 500, 512, 2048]
    words += ["--global-batch-size", str(chance.choice(batches))]
    if chance.random() < 0.1:
        words += ["--gpus-per-node", str(chance.choice([1, 4, 6, 16]))]
    return words + drawn_options(chance)


def question_of(words: list[str]) -> Question:
    """The question as plan.py reads it; raises UserError."""
    options, rest = plan.parser().parse_known_args(["layouts", *words])
    return plan.question_of(options, rest)


def failures(words: list[str], small: bool, chance: random.Random) -> list[str]:
    """Return the mistakes of the answer as sentences; UserError if there is no answer."""
    question = question_of(words)
    answer = plan.ask(["layouts", *words])
    data: Any = answer.data
    found = [*_listed(question, data), *_command(question, data)]
    found += _monotone(question, chance) if data["ranked"] else []
    return [*found, *(_faster(question, data) if small else [])]


# ---- What is listed ------------------------------------------------------------------------------


def _listed(question: Question, data: dict[str, Any]) -> Iterator[str]:
    """Rows that are not in order, not taken, not what was given, or not as predicted."""
    run, names = question.config, {field.name for field in fields(Layout)}
    for kind in ("ranked", "risky"):
        rows = data[kind]
        seconds = [row["quantile_seconds"] for row in rows]
        if seconds != sorted(seconds):
            yield f"{kind} is not in order"
        for row in rows:
            layout = Layout(**{name: row[name] for name in names})
            at = " ".join(row["flags"])
            if (row["risk_fraction"] > question.options.risk) != (kind == "risky"):
                yield f"{at}: risk {row['risk_fraction']} is among {kind}"
            held = {name for name in names & set(question.given) if name != "dp"}
            for name in sorted(held):
                if getattr(layout, name) != getattr(run.layout, name):
                    yield f"{at}: {name} was given as {getattr(run.layout, name)}"
            taken = _taken(run, layout, question.gpus)
            if isinstance(taken, str):
                yield f"{at}: train.py refuses it: {taken}"
                continue
            if asdict(taken) != asdict(layout):
                yield f"{at}: train.py would run {taken}"
            job = Job(run.model, layout, run.training, question.machine)
            expected = prediction_data(with_networks(predict(job), job))
            if layout.schedule != "auto" and expected != {n: row[n] for n in expected}:
                seconds = expected["step_seconds"], row["step_seconds"]
                yield f"{at}: predict says {seconds[0]} s, the answer {seconds[1]}"


def _taken(run: Config, layout: Layout, gpus: int) -> Layout | str:
    """The layout that train.py would run from these flags, or why not."""
    full: Any = {"rampup_batch_size": None, "batch_schedule": None}
    training = replace(run.training, **full)
    words = [w for part in (run.model, training) for w in command_line.to_words(part)]
    try:
        parsed = command_line.parse([*words, *command_line.to_words(layout, "dp")])
        return check_any_length(parsed, gpus).layout
    except UserError as error:
        return str(error)


def _command(question: Question, data: dict[str, Any]) -> Iterator[str]:
    """Yield the mistakes of the first layout's command."""
    if not data["ranked"]:
        return
    words = data["command"][2:]
    try:
        run = command_line.parse(words)
        if question.config.training.rampup_batch_size is None:
            run = check_any_length(run, question.gpus)
    except UserError as error:
        yield f"the first command {shlex.join(words)}: {error}"
        return
    if run.model != question.config.model:
        yield f"the first command has another model: {shlex.join(words)}"
    if replace(run.training, steps=None) != replace(question.config.training, steps=None):
        yield f"the first command trains otherwise: {shlex.join(words)}"


# ---- The first of all ----------------------------------------------------------------------------


def _fastest(question: Question) -> layouts.Ranked:
    """The first layout that is not risky."""
    found = question.rank().ranked
    return next(r for r in found if r.prediction.risk <= question.options.risk)


def _monotone(question: Question, chance: random.Random) -> Iterator[str]:
    """Better machines that are slower, and what differs when the first layout is given."""
    machine, before = question.machine, _fastest(question)
    link = replace(machine.network, bandwidth=2 * machine.network.bandwidth)
    better = {"network": replace(machine, network=link)}
    better["memory"] = replace(machine, memory=machine.memory * 1.3)
    name = chance.choice(sorted(better))
    after = _fastest(replace(question, machine=better[name]))
    if after.prediction.quantile > before.prediction.quantile * NEAR:
        yield f"more {name}: {after} instead of {before}"
    names = [f.name for f in fields(Layout) if getattr(before.layout, f.name) is not None]
    given = {*chance.sample(names, chance.randint(1, len(names)))} - {"dp"}
    held = {name: getattr(before.layout, name) for name in given}
    run = replace(question.config, layout=replace(question.config.layout, **held))
    same = _fastest(replace(question, config=run, given={*question.given, *given}))
    if same.prediction.quantile > before.prediction.quantile * NEAR:
        yield f"given {held}: {same} instead of {before}"


def space(question: Question) -> Iterator[Layout]:
    """Every layout in which the search may put the model, and many that train.py refuses."""
    run, gpus, node = question.config, question.gpus, question.machine.node
    spread, long = divisors(gpus), run.model.seq_length >= LONG
    tps, cps = [n for n in spread if n <= node], spread if long else [1]
    axes = {"tp": tps, "pp": spread, "cp": cps, "dp": spread}
    held = "partition" in question.given
    base = run.layout if held else replace(run.layout, partition="balanced")
    for values in product(*(_values(question, *axis) for axis in axes.items())):
        if math.prod(values) == gpus:
            placed = replace(base, **dict(zip(axes, values, strict=True)))
            yield from _ways(question, placed)


def _values(question: Question, name: str, tried: Iterable[Any]) -> list[Any]:
    """Return the values to try for an option: the one that was given, else all."""
    given = name in question.given
    return [getattr(question.config.layout, name)] if given else list(tried)


def _ways(question: Question, placed: Layout) -> Iterator[Layout]:
    """Every way to run a layout whose axes are known."""
    of, layers = partial(_values, question), question.config.model.layers
    share, rest = divmod(question.config.training.global_batch_size, placed.dp or 1)
    blocks = {kind: of("recompute_layers", (None, *range(1, layers + 1))) for kind in RECOMPUTED}
    blocks["none"] = of("recompute_layers", (None,))
    kinds = of("recompute", RECOMPUTATIONS)
    names = of("schedule", SCHEDULES if placed.pp > 1 else ("1f1b",))
    virtual = {name: of("virtual_stages", (None,)) for name in names}
    virtual["interleaved"] = of("virtual_stages", (None, *range(2, layers + 3)))
    either = (False, True)
    choices: dict[str, Iterable[Any]] = {
        "micro_batch_size": of("micro_batch_size", [] if rest else divisors(share)),
        "zero": of("zero", range(4)),
        "sequence_parallel": of("sequence_parallel", either if placed.tp > 1 else (None,)),
    }
    recomputed = [(kind, number) for kind in kinds for number in blocks[kind]]
    scheduled = [(name, number) for name in names for number in virtual[name]]
    for (kind, number), (name, stages), *values in product(
        recomputed, scheduled, *choices.values()
    ):
        own = {"recompute": kind, "recompute_layers": number, "schedule": name}
        own |= dict(zip(choices, values, strict=True))
        yield replace(placed, **own, virtual_stages=stages)


def least_of(job: Job) -> float:
    """The seconds by closed form that a step of one layout takes at least."""
    model, layout, training, machine, _ = job
    asked = Asked(model, training, machine, int(job.gpus))
    columns = layout.micro_batch_size, layout.zero, layout.recompute, bool(job.sequence_parallel)
    table = Table(asked, [layout], *(np.array([value]) for value in (0, *columns)))
    blocks = enumerate(blocks_of(job))
    recomputed = max(layout.recomputed_blocks(count, stage) for stage, count in blocks)
    _, least = ClosedForm(table).seconds(np.array([[recomputed]]))
    return float(least[0])


def _faster(question: Question, data: dict[str, Any]) -> Iterator[str]:
    """A layout that train.py takes, is not risky, and is a better bet than the first."""
    run, machine = question.config, question.compared_on
    full: Any = {"rampup_batch_size": None, "batch_schedule": None}
    run = replace(run, training=replace(run.training, **full))
    best = float("inf")
    if data["ranked"]:
        best = data["ranked"][0]["quantile_seconds"]
    for layout in islice(space(question), MOST):
        try:
            layout = check_any_length(replace(run, layout=layout), question.gpus).layout
        except UserError:
            continue
        job = Job(run.model, layout, run.training, machine)
        if least_of(job) * DOUBT >= best:
            continue
        if memory.fullest(job).total > machine.memory:
            continue
        found = predict(job)
        if found.risk <= question.options.risk and found.quantile * NEAR < best:
            yield f"{' '.join(command_line.to_words(layout))}: {found.quantile} s, first {best}"
            return


def checked(words: list[str], small: bool, chance: random.Random) -> tuple[list[str], bool]:
    """Return the mistakes as `failures` does, with any exception; and whether there was an answer,
    not a sentence in its place.
    """
    with redirect_stderr(StringIO()):
        try:
            return failures(words, small, chance), True
        except UserError as error:
            text = str(error)
            return [] if text.strip() and len(text) < LONGEST else [f"no sentence: {text!r}"], False
        except Exception:
            return [traceback.format_exc()], False


class Case(NamedTuple):
    """A question that was asked: its number, its words, and what was found."""

    number: int
    words: list[str]
    seconds: float  # processor time
    answered: bool  # by a table, and not by a sentence
    failures: list[str]


def asked(seed: int, number: int) -> Case:
    """One question, drawn from the seed and its number alone, so that any part can be repeated."""
    chance, small = random.Random(f"{seed} {number}"), number % 2 == 0
    words, began = drawn(chance, small), time.process_time()
    found, answered = checked(words, small, chance)
    return Case(number, words, time.process_time() - began, answered, found)


def result_lines(cases: list[Case], command: str) -> list[str]:
    """Return the outcomes of all questions, in Markdown."""
    seconds = sorted(case.seconds for case in cases)
    wrong = [case for case in cases if case.failures]
    lines = ["# Random questions to plan.py layouts", "", f"    {command}", ""]
    lines += [f"{machine()}.", ""]
    lines += [
        f"{len(cases)} questions, {sum(case.answered for case in cases)} answered by a table, the "
        f"others by one sentence; {len(wrong)} with failures. Processor seconds of a question with "
        f"its checks: median {seconds[len(seconds) // 2]:.2f}, largest {seconds[-1]:.1f}.",
    ]
    for case in wrong:
        lines += ["", f"    plan.py layouts {shlex.join(case.words)}", "", *case.failures]
    return lines


def main() -> int:
    """Ask until the time is over or all is asked; failures decide the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="after which no more are asked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=10**5, help="in all parts together")
    parser.add_argument("--cases", type=Path, metavar="FILE.jsonl", help="goes on after its last")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write what all parts found")
    options = parser.parse_args()
    keep = ResultsFile(options.cases, options.seconds / 60)
    cases = [Case(**row) for row in keep.rows()]

    def ask(number: int) -> list[dict[str, Any]]:
        """The row of one question; what is wrong with its answer is printed."""
        case = asked(options.seed, number)
        cases.append(case)
        for text in case.failures:
            print(f"plan.py layouts {shlex.join(case.words)}\n    {text}", flush=True)
        return [case._asdict()]

    keep.run(ask, range(len(cases), options.questions))
    wrong = sum(len(case.failures) for case in cases)
    print(f"{len(cases)} questions, {sum(c.answered for c in cases)} answered, {wrong} failures")
    if options.table:
        command = f"python benchmarks/planner/plan_cases.py --questions {len(cases)} "
        command += f"--seed {options.seed}"
        options.table.write_text("\n".join(result_lines(cases, command)) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
