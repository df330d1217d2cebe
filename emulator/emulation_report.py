"""An emulated step beside the planner's, in words and as data; and a calibration fitted to it.

answer = report(config, world, machine, stages, price)
answer.text, answer.data
answer.rates        # with which the planner has the computation take as long: a calibration's
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from config.model_stats import model_flops
from config.schema import Config
from emulator.emulation import AFTER, StageMeasured, StageSeconds, composed, priced
from emulator.stand_ins import Operation
from planner import memory, step_time
from planner.hardware import Machine
from planner.job import Job
from schedules.orders import build

HALVINGS = 60  # of a bisection: to the last digit
NAMES = {"seconds": "seconds per step", "tokens_per_second": "tokens/s", "mfu": "MFU"}


class Report(NamedTuple):
    """What an emulation says."""

    text: str
    data: dict[str, Any]
    rates: dict[str, Any]


def report(
    config: Config,
    world: int,
    machine: Machine,
    stages: list[StageMeasured],
    price: Callable[[Operation], float],
) -> Report:
    """Compose the step of `config` from its stages, and compare it with the planner's."""
    layout, model, size = config.layout, config.model, config.training.global_batch_size
    job = Job(model, layout, config.training, machine)
    schedule = build(layout.schedule, layout.pp, job.micro_batches)
    rounds = job.micro_batches if layout.zero == 2 else 1
    rows = [priced(stage, price, rounds) for stage in stages]
    sent = [each for stage in stages for own in stage.operations.values() for each in own]
    transfer = max((price(each) for each in sent if each.kind == "send"), default=0.0)
    hides = not stages[0].device.endswith("CPU cores")
    step = composed(schedule, rows, transfer, hides, layout.overlap_param_gather)
    plan = step_time.predict(model, layout, config.training, machine)
    data = {"device": stages[0].device, "threads": stages[0].threads, "ranks": world}
    data |= {"ranks_run": [stage.rank for stage in stages], **asdict(step), "transfer": transfer}
    data["tokens_per_second"] = size * model.seq_length / step.seconds
    data["mfu"] = model_flops(model, size) / (step.seconds * world * machine.peak)
    data["plan"] = {name: getattr(plan, name) for name in (*NAMES, "parts")}
    data["stages"] = [
        {"stage": s, **asdict(row), "bytes": stage.bytes, "plan": asdict(passes) | held}
        for s, (row, stage, passes, held) in enumerate(
            zip(rows, stages, step_time.stage_passes(job), memory.of_run(config), strict=True)
        )
    ]
    return Report(_text(data), data, _rates(job, stages, rows))


def _text(data: dict[str, Any]) -> str:
    runs, plan = ", ".join(map(str, data["ranks_run"])), data["plan"]
    lines = [
        f"{data['ranks']} ranks, of which {runs} were run in turn on {data['device']}, "
        f"{data['threads']} threads; milliseconds, GB, and plan.py's",
        "  stage   F (collectives)     plan   B (collectives)     plan   reduce   update     plan"
        "  gather      GB    plan",
    ]
    for row in data["stages"]:
        line, own = f"  {row['stage']:5}", row["plan"]
        for kind, name in (("F", "forward"), ("B", "backward")):
            line += f"{1e3 * row['actions'][kind]:9.2f} ({1e3 * row['crossing'][kind]:7.2f})"
            line += f"{1e3 * own[name]:9.2f}"
        cells = (row["reduce"], row["after"], plan["parts"]["optimizer"], row["gather"])
        line += "".join(f"{1e3 * cell:9.2f}" for cell in cells)
        held = sum(own[part] for part in memory.OF_RUN)
        lines.append(f"{line}{row['bytes'] / 1e9:8.3f}{held / 1e9:8.3f}")
    parts = ", ".join(f"{name} {1e3 * own:.1f}" for name, own in data["parts"].items())
    lines += [
        f"{title}: {data[key]:,.4g}, plan.py: {plan[key]:,.4g}" for key, title in NAMES.items()
    ]
    return "\n".join([*lines, f"of a step, milliseconds: {parts}"])


def _rates(job: Job, stages: list[StageMeasured], rows: list[StageSeconds]) -> dict[str, Any]:
    """The memory's bandwidth by the update; then GEMMs and attention by one factor, so that the
    planner's seconds of all stages, without what crosses ranks, are those measured.
    """
    update = step_time.step_parts(job)["optimizer"] / max(s.seconds[AFTER] for s in stages)
    free = replace(job.machine.nvlink, latency=0.0, bandwidth=1e30)
    machine = replace(job.machine, nvlink=free, network=free)
    machine = replace(machine, bandwidth=job.machine.bandwidth * update)
    target = sum(sum(row.actions.values()) - sum(row.crossing.values()) for row in rows)
    low, high = 1e-3, 1e3
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        gemm, flash = job.machine.gemm_fraction * middle, job.machine.flash_fraction * middle
        machine = replace(machine, gemm_fraction=gemm, flash_fraction=flash)
        passes = step_time.stage_passes(job._replace(machine=machine))
        low, high = (middle, high) if sum(map(sum, passes)) > target else (low, middle)
    rates = {"bandwidth": machine.bandwidth, "gemm_fraction": gemm, "flash_fraction": flash}
    return {"device": stages[0].device, **rates}
