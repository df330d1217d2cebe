"""An emulated step beside the planner's, in words and as data; and a calibration fitted to it.

    answer = report(config, world, machine, stages, links)
    answer.text, answer.data
    answer.calibration                # a file for plan.py --calibration and tune.py --calibration
"""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

from config.model_stats import model_flops
from config.schema import Config
from emulator.emulation import StageMeasured, Step, emulated
from emulator.links import Links
from planner import memory, step_time
from planner.hardware import Machine
from planner.job import Job
from schedules.schedule import build

GIGABYTE = 1e9
HALVINGS = 60  # of a bisection: to the last digit


class Report(NamedTuple):
    """What an emulation says, for people, for programs and for the planner."""

    text: str
    data: dict[str, Any]
    calibration: str


def report(
    config: Config, world: int, machine: Machine, stages: list[StageMeasured], links: Links
) -> Report:
    """Compose the step of `config`, and compare it with the planner's for `machine`."""
    layout, training = config.layout, config.training
    batch = max(level.batch for level in config.batches.levels())
    job = Job(config.model, layout, replace(training, global_batch_size=batch), machine)
    schedule = build(layout.schedule, layout.pp, job.micro_batches)
    step = emulated(config, stages, schedule, links, hides=stages[0].device_type == "cuda")
    plan = step_time.predict(job.model, layout, job.training, machine)
    tokens = batch * config.model.seq_length / step.seconds
    mfu = model_flops(config.model, batch) / (step.seconds * world * machine.peak)
    data = {
        "device": stages[0].device,
        "threads": stages[0].threads,
        "ranks": world,
        "ranks_run": [stage.rank for stage in stages],
        "seconds": step.seconds,
        "parts": step.parts,
        "tokens_per_second": tokens,
        "mfu": mfu,
        "stages": _rows(job, config, stages, step),
        "plan": {"seconds": plan.seconds, "parts": plan.parts, "mfu": plan.mfu},
    }
    data["plan"]["tokens_per_second"] = plan.tokens_per_second
    return Report(_text(data, machine), data, _calibration(job, stages, step, links))


def _rows(
    job: Job, config: Config, stages: list[StageMeasured], step: Step
) -> list[dict[str, Any]]:
    """Seconds and bytes of every stage, with the planner's."""
    passes, held = step_time.stage_passes(job), memory.of_run(config)
    after = step_time.step_parts(job)
    rows = []
    for measured, composed, planned, bytes_ in zip(stages, step.stages, passes, held):
        plan = {"F": planned.forward, "B": planned.backward, "bytes": sum(bytes_.values())}
        plan |= {"optimizer": after["optimizer"], "reduce": after["reduce"]}
        row = {"stage": measured.stage, **asdict(composed), "bytes": measured.bytes}
        rows.append(row | {"plan": plan})
    return rows


def _text(data: dict[str, Any], machine: Machine) -> str:
    plan, runs = data["plan"], data["ranks_run"]
    lines = [
        f"{data['ranks']} ranks, {len(runs)} of them run in turn on {data['device']}, "
        f"{data['threads']} threads: ranks {', '.join(map(str, runs))}",
        "Milliseconds of an action, with its tensor-parallel collectives and these alone; of what "
        "follows; GB. plan: plan.py's prediction.",
        f"  stage{'F':>9}{'alone':>8}{'plan':>9}{'B':>10}{'alone':>8}{'plan':>9}{'reduce':>9}"
        f"{'optimizer':>11}{'plan':>9}{'gather':>8}{'GB':>8}{'plan':>8}",
    ]
    for row in data["stages"]:
        actions, crossing, own = row["actions"], row["crossing"], row["plan"]
        cells = [actions["F"], crossing["F"], own["F"], actions["B"], crossing["B"], own["B"]]
        cells += [row["reduce"], row["optimizer"], own["optimizer"], row["gather"]]
        widths = (9, 8, 9, 10, 8, 9, 9, 11, 9, 8)
        line = "".join(f"{1e3 * cell:{width}.2f}" for cell, width in zip(cells, widths))
        memory_of = f"{row['bytes'] / GIGABYTE:8.3f}{own['bytes'] / GIGABYTE:8.3f}"
        lines.append(f"  {row['stage']:5}{line}{memory_of}")
    parts = ", ".join(f"{name} {1e3 * own:.1f}" for name, own in data["parts"].items())
    names = {"seconds": "seconds per step", "tokens_per_second": "tokens/s", "mfu": "MFU"}
    for key, name in names.items():
        lines.append(f"{name}: {data[key]:,.4g} (plan.py on {machine.name}: {plan[key]:,.4g})")
    return "\n".join([*lines, f"of a step, milliseconds: {parts}"])


# ---- Calibration ---------------------------------------------------------------------------------


def _calibration(job: Job, stages: list[StageMeasured], step: Step, links: Links) -> str:
    """Rates with which the planner has this computation take as long as it took here.

    The memory's bandwidth by the optimizer; then GEMMs and attention by one factor.
    """
    plan = step_time.step_parts(job)["optimizer"]
    own = max(stage.seconds["after"] for stage in stages)
    bandwidth = job.machine.bandwidth * plan / own
    crossing = sum(sum(stage.crossing.values()) for stage in step.stages)
    target = sum(sum(stage.actions.values()) for stage in step.stages) - crossing
    alone = replace(job.machine.nvlink, latency=0.0, bandwidth=1e30)  # nothing but computation
    machine = replace(job.machine, bandwidth=bandwidth, nvlink=alone, network=alone)

    def rates(factor: float) -> dict[str, float]:
        names = ("gemm_fraction", "flash_fraction")
        return {name: getattr(machine, name) * factor for name in names}

    low, high = 1e-3, 1e3
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        passes = step_time.stage_passes(job._replace(machine=replace(machine, **rates(middle))))
        too_long = sum(map(sum, passes)) > target
        low, high = (middle, high) if too_long else (low, middle)
    lines = [f'device = "{stages[0].device}"', f"bandwidth = {bandwidth:.4g}"]
    lines += [f"{name} = {value:.4g}" for name, value in rates(low).items()]
    for name, entry in links.rates().items():
        lines += ["", f"[{name}]", *(f"{key} = {value:.4g}" for key, value in entry.items())]
    return "\n".join(lines) + "\n"
