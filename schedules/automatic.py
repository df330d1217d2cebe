"""What `--schedule auto` decides for a run: the task of compiler.py, and the layout that it gives.

    config, choice = settled(config, "cuda")     config as it is, and None, unless it says auto

Whether --vocab-pp pays is decided too, unless it is given or ruled out by --no-vocab-pp.
"""

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import inf

from config.messages import UserError
from config.schema import Config, Layout, ModelShape
from config.validation import refusal_of_vocab_pp
from schedules import vocabulary
from schedules.compiler import Choice, Task, balanced, enough_recomputed, search
from schedules.costs import sent_bytes, task_of
from schedules.partition import blocks_per_stage
from schedules.schedule import ScheduleError
from schedules.simulation import LongSchedule


def settled(config: Config, device: str) -> tuple[Config, Choice | None]:
    """With the schedule decided, and what decided it; for the largest batch of this start."""
    largest = max(level.batch for level in config.levels)
    count, layout = config.micro_batches(largest), config.layout
    refusal = refusal_of_vocab_pp(config.training, config.data, config.run)
    if layout.vocab_pp is not None:
        refusal = ""
    if refusal:
        layout = replace(layout, vocab_pp=False)
    layout, choice = settled_layout(config.model, layout, count, device)
    if refusal and choice:
        choice = replace(choice, note=f"--vocab-pp not chosen: {refusal}")
    return replace(config, layout=layout), choice


def settled_layout(
    model: ModelShape, layout: Layout, micro_batches: int, device: str = "cuda"
) -> tuple[Layout, Choice | None]:
    """As `settled`, for one number of micro-batches, where nothing refuses --vocab-pp.

    Raises UserError if nothing holds as little as --activation-memory says.
    """
    if layout.schedule != "auto":
        return replace(layout, vocab_pp=bool(layout.vocab_pp)), None
    if layout.pp == 1:
        return replace(layout, schedule="1f1b", vocab_pp=False), None
    if layout.schedule_costs == "measured":
        raise UserError(
            "--schedule-costs measured needs the run itself, which writes the numbers to run.json: "
            "give these, or counted"
        )
    task = replace(task_of(model, layout, device), micro_batches=micro_batches)
    choice = _chosen(model, layout, task, device)
    found = replace(layout, schedule=choice.name, vocab_pp=choice.vocab_pp)
    found = replace(found, partition=",".join(map(str, choice.blocks)))
    if task.recomputed:
        found = replace(found, recompute_blocks=",".join(map(str, choice.again)))
    if choice.name == "interleaved":
        found = replace(found, virtual_stages=choice.virtual)
    return found, choice


@lru_cache(maxsize=64)
def _chosen(model: ModelShape, layout: Layout, task: Task, device: str) -> Choice:
    """What the search finds, or 1F1B with --vocab-pp if that is asked for, or faster and not more
    than a rank may hold; with a sentence on that.
    """
    without = None
    with suppress(ScheduleError):
        without = search(task)
    if layout.vocab_pp is False:
        if without is None:
            raise _too_little(task, layout)
        return without
    spread, share = _spread(model, layout, task, device)
    fits = share <= 1 + 1e-9
    if not fits and (without is None or layout.vocab_pp):
        raise _too_little(task, layout)
    plain = spread if without is None else without.plain or without
    times = [one.seconds / plain.seconds for one in (spread, without) if one]
    chosen = bool(layout.vocab_pp) or (fits and times[0] == min(times))
    verdict = "given" if layout.vocab_pp else "chosen" if chosen else "not chosen"
    note = f"--vocab-pp {verdict}: in simulation 1F1B with it takes {times[0]:.3f} of the time of "
    note += f"{plain.name}, {without.name} without it {times[1]:.3f}" if without else "itself"
    note += f"; it holds {share:.2f} of what a rank may" if share else ""
    best = spread if chosen or without is None else without
    return replace(best, plain=without and without.plain, note=note)


def _spread(model: ModelShape, layout: Layout, task: Task, device: str) -> tuple[Choice, float]:
    """1F1B with --vocab-pp, and the most that a rank holds as a share of what it may.

    Beside activations that is the logits of one micro-batch, what the ranks send one another, and
    without --activation-memory the vocabulary's weights and gradients too, as in 1F1B's limit.
    """
    embedding, block, head = task.parts
    beside = head.held / task.ranks + (task.ranks + 2) * sent_bytes(model)
    most = task.limits[0]
    if layout.activation_memory is None:
        matrix = 8.0 * model.vocab_size * model.hidden / layout.tp
        matrix /= model.seq_length * layout.micro_batch_size  # of one token, as all here
        beside += matrix * (1 if model.tied else 2) / task.ranks
        most = inf if layout.vocab_pp else _held_with_matrices(task, matrix)
    parts = embedding, block, head._replace(held=0.0)
    task = replace(task, parts=parts, limits=(most - beside,) * task.ranks, spread=True)
    own = replace(layout, schedule="1f1b", vocab_pp=True)
    blocks = tuple(blocks_per_stage(model, own))
    order = LongSchedule.of(vocabulary.build(model, own, task.micro_batches, device))
    again = enough_recomputed(task, order, "1f1b", blocks) or (blocks if task.recomputed else ())
    if task.recomputed:  # the order depends on it, what the order holds does not
        own = replace(own, recompute_blocks=",".join(map(str, again)))
        order = LongSchedule.of(vocabulary.build(model, own, task.micro_batches, device))
    passes = vocabulary.pass_seconds(model, own, device)
    end = order.makespan(passes, task.transfer)
    idle = 1 - task.micro_batches * sum(passes.values()) / (end * task.ranks)
    costs = task.costs("1f1b", blocks, again)
    held = order.most_held([one.held for one in costs.stages])
    over = max(a - b for a, b in zip(held, costs.limits, strict=True))
    choice = Choice("1f1b", 1, blocks, costs, end, idle, again=again, vocab_pp=True)
    return choice, (most + over) / most if most < inf else 0.0


def _held_with_matrices(task: Task, matrix: float) -> float:
    """Of 1F1B's fullest rank, with the vocabulary's matrix on the first and on the last one."""
    blocks = task.blocks or balanced(task, range(task.ranks))
    rows = enumerate(task.costs("1f1b", blocks).stages)
    held = [(task.ranks - s) * one.held for s, one in rows]
    return max(held[0] + matrix, held[-1] + matrix, *held)


def _too_little(task: Task, layout: Layout) -> UserError:
    """What to say if nothing holds as little as the limits."""
    least = (task.recomputed or task.parts[1]).held * max(1, task.layers // task.ranks)
    least *= (layout.activation_memory or 1.0) / task.limits[0]
    return UserError(
        f"--activation-memory {layout.activation_memory}: no schedule of pp({task.ranks}) holds so "
        f"little; with --recompute {layout.recompute} one micro-batch takes {least:.3f} or more"
    )
