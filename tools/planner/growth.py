"""Plans a run whose nodes grow with its batch: the fastest safe layout of each segment.

    python plan.py rampup ... --nodes-by-batch 192:18 400:32 2048:48 --train-samples 220000000

A small batch keeps few GPUs busy: on fewer nodes its steps take longer, but cost fewer GPU-hours.
The user says from which batch size on the run has how many nodes. A level is a batch size of the
ramp-up with its steps; a segment is consecutive levels on the same nodes, with one layout.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from base.errors import LayoutError, UserError
from base.paths import write_file
from config.batch_schedule import Level
from config.schema import Config, Layout, Training
from config.timeline import Timeline
from costs.job import Job
from costs.step_time import predict
from tools.planner import duration_questions
from tools.planner.duration_questions import DAY
from tools.planner.questions import FULL_BATCH, Answer, Question

KEPT = (
    4  # layouts that are the fastest at a segment's last batch; of them the fastest segment counts
)
HOUR = 3600.0  # seconds
# The options of a layout that a segment's command sets, because the planner may choose them.
SEARCHED = ("tp", "pp", "micro_batch_size", "recompute", "zero", "partition")


class NodeSegment(NamedTuple):
    """Consecutive levels of a ramp-up on the same number of nodes.

    begin, stop: the samples at which the segment begins and stops; 0 at the ends of the run, where
    train.py needs neither.
    """

    levels: list[Level]
    nodes: int
    begin: int
    stop: int


def levels_of_run(config: Config) -> list[Level]:
    """Return the levels that the run reaches, each with its number of steps.

    The last level gets the steps that remain of the run. Raise UserError if the user did not give
    the length of the run.
    """
    training = config.training
    if training.steps is None and training.train_samples is None:
        raise UserError("how long is the run? give --train-samples or --steps")
    levels = []
    timeline = Timeline(config)
    for level in timeline.batches.levels():
        left = timeline.total_steps - level.first_step
        if left > 0:
            levels.append(replace(level, steps=min(level.steps or left, left)))
    return levels


def read_starts(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs (batch size, nodes) of --nodes-by-batch; raise UserError for other words."""
    starts = []
    for word in words:
        batch, colon, nodes = word.partition(":")
        if not (colon and batch.isdecimal() and nodes.isdecimal() and int(nodes)):
            raise UserError(f"--nodes-by-batch takes BATCH:NODES, such as 192:18, not {word!r}")
        starts.append((int(batch), int(nodes)))
    return starts


def segments_of(levels: Sequence[Level], starts: Sequence[tuple[int, int]]) -> list[NodeSegment]:
    """Return the segments of a run's levels.

    starts: by segment, its first batch size and its nodes. Raise UserError if these are not batch
    sizes of the ramp-up in their order, from the first one on.
    """
    sizes = [level.batch for level in levels]
    firsts: list[int] = []  # by segment, the number of its first level
    for batch, nodes in starts:
        after = firsts[-1] + 1 if firsts else 0
        if batch not in sizes[after:]:
            shown = f"{', '.join(map(str, sizes[after : after + 4]))} ... {sizes[-1]}"
            raise UserError(
                f"--nodes-by-batch {batch}:{nodes}: the ramp-up has no batch {batch} there; "
                f"it goes on with {shown if len(sizes) > 4 else sizes[after:]}"
            )
        firsts.append(sizes.index(batch, after))
    if firsts[0]:
        raise UserError(
            f"--nodes-by-batch begins with {starts[0][0]}, but the ramp-up with {sizes[0]}"
        )
    found = []
    for (_, nodes), first, end in zip(starts, firsts, [*firsts[1:], len(levels)], strict=True):
        stop = levels[end].consumed if end < len(levels) else 0
        found.append(NodeSegment(list(levels[first:end]), nodes, levels[first].consumed, stop))
    return found


def fastest(question: Question, segment: NodeSegment) -> tuple[Layout, float]:
    """Return the layout with which a segment takes the fewest seconds, and these seconds.

    It can run every batch size of the segment, and its risk is at most --risk. Options of the
    layout that the user gave are fixed. Raise UserError if there is no such layout.
    """
    gpus = segment.nodes * question.machine.node
    run = question.config
    # The configuration of this segment's start, by which train.py would check the layout.
    bounds: dict[str, Any] = {"begin_at_samples": segment.begin, "stop_at_samples": segment.stop}
    started = replace(run, run=replace(run.run, resume=run.run.resume or "auto", **bounds))
    last = segment.levels[-1].batch
    sized = replace(run, training=_with_batch(run, last))
    options = Namespace(**vars(question.options) | {"nodes": None, "gpus": gpus})
    asked = replace(question, options=options, config=sized)
    answer = asked.rank(KEPT, starts=started)
    safe = [line.layout for line in answer.ranked if line.prediction.risk <= options.risk]
    timed = [(seconds_of(question, layout, segment), layout) for layout in safe[:KEPT]]
    if not timed:
        sizes = f"{segment.levels[0].batch} to {last}"
        where = f"{segment.nodes} nodes ({gpus} GPUs of {question.machine.name})"
        why = "".join(f", such as: {entry.reason}" for entry in answer.rejected[:1])
        raise LayoutError(f"no layout on {where} fits and runs the batches {sizes}{why}")
    seconds, layout = min(timed, key=lambda one: one[0])
    return layout, seconds


def _with_batch(run: Config, batch: int) -> Training:
    """Return the training options of a run with one batch size from the first step on."""
    return replace(run.training, **FULL_BATCH | {"global_batch_size": batch})


def seconds_of(question: Question, layout: Layout, segment: NodeSegment) -> float:
    """Return the predicted seconds of all steps of a segment of a ramp-up, at its batch sizes."""
    if layout.schedule == "auto":  # the run takes a schedule that is never slower than 1F1B
        layout = replace(layout, schedule="1f1b")
    run = question.config
    seconds = 0.0
    for level in segment.levels:
        job = Job(run.model, layout, _with_batch(run, level.batch), question.machine)
        seconds += (level.steps or 0) * predict(job).seconds
    return seconds


# ---- The answer ----------------------------------------------------------------------------------


def rampup(question: Question) -> Answer:
    """Return the answer of `plan.py rampup`; raise UserError for options that do not go together.

    With --nodes-by-batch it is the fastest layout of each segment, which is also written to the
    file of --jobs; without, it says on what each batch size can run (`duration_questions.rampup`).
    """
    options = question.options
    if options.submit and not options.jobs:
        raise UserError("--submit needs --jobs FILE, from which the jobs have their segments")
    found = duration_questions.rampup(question)  # raises UserError if the run has no ramp-up
    if options.nodes_by_batch is None:
        if options.jobs:
            raise UserError("--jobs needs --nodes-by-batch BATCH:NODES ..., the run's segments")
        return found
    if options.nodes or options.gpus:
        name = "nodes" if options.nodes else "gpus"
        raise UserError(f"--nodes-by-batch names the nodes of each segment: leave out --{name}")
    starts = read_starts(options.nodes_by_batch)
    segments = []
    for segment in segments_of(levels_of_run(question.config), starts):
        segments.append(_facts(segment, *fastest(question, segment), question.machine.node))
    data: dict[str, Any] = {
        name: sum(one[name] for one in segments) for name in ("days", "gpu_hours")
    }
    # The file of --jobs is read by scripts/growing_jobs.py, which submits a job for each segment.
    # It recognises the run by `model` and `batches`, and passes the words in `sbatch` to sbatch.
    data |= {"segments": segments, "model": asdict(question.config.model)}
    data |= {
        "batches": Timeline(question.config).batches.starts,
        "sbatch": (options.submit or "").split(),
    }
    write_file(options.jobs, json.dumps(data, indent=1) + "\n")
    return Answer(_text(data), data)


def _facts(segment: NodeSegment, layout: Layout, seconds: float, node: int) -> dict[str, Any]:
    """Return the data of a segment: nodes, times, train.py's options. node: the GPUs of a node."""
    options = {name: getattr(layout, name) for name in SEARCHED}
    if segment.begin:
        options["begin_at_samples"] = segment.begin
    if segment.stop:
        options["stop_at_samples"] = segment.stop
    words = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    gpus = segment.nodes * node
    return {
        "nodes": segment.nodes,
        "gpus": gpus,
        "batches": [segment.levels[0].batch, segment.levels[-1].batch],
        "begin_at_samples": segment.begin,
        "stop_at_samples": segment.stop,
        "days": seconds / DAY,
        "gpu_hours": gpus * seconds / HOUR,
        "layout": asdict(layout),
        "words": " ".join(words).split(),
    }


def _text(data: dict[str, Any]) -> str:
    """Return the text of the answer: a line for each segment, then the sums. data: see `rampup`."""
    lines = [" nodes      batches     days   GPU-hours  train.py"]
    for segment in data["segments"]:
        sizes = " to ".join(map(str, segment["batches"]))
        times = f"{segment['days']:9.2f}{segment['gpu_hours']:12,.0f}"
        lines.append(f"{segment['nodes']:6}{sizes:>13}{times}  {' '.join(segment['words'])}")
    total = f"{data['days']:.2f} days, {data['gpu_hours']:,.0f} GPU-hours"
    lines.append(f"{total}, without restarts and the time in the queue")
    return "\n".join(lines)
