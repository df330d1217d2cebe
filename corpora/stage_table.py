"""Says in advance which epochs of each corpus the stages of a run read (--stages).

print("\n".join(table(config)))       a line for each stage and corpus, and notes
repeated(readings, plan)              only the notes: corpora that are read too often
"""

from dataclasses import dataclass

from base.errors import UserError
from config.schema import Config
from config.stages import PlacedStage, StagePlan
from corpora.corpus_splits import Corpora


@dataclass(frozen=True)
class Reading:
    """What a stage reads of a corpus.

    begin, end: epochs of the corpus that are read before the stage and after it. samples: so many.
    """

    stage: PlacedStage
    prefix: str
    begin: float
    end: float
    samples: int


def readings(config: Config, corpora: Corpora | None = None) -> list[Reading]:
    """Return what each stage reads of each of its corpora; [] if tokens are random.

    corpora: those of the run, if they are open.
    """
    if not config.stages or config.data.data == ("synthetic",):
        return []
    corpora = corpora or Corpora(config)
    found = []
    read: dict[str, int] = {}
    parts = corpora.staged()
    sizes = corpora.epoch_tokens()
    ends = [stage.samples for stage in config.stages[1:]] + [config.total_samples]
    for stage, part, stop in zip(config.stages, parts, ends):
        if part is None:
            continue
        counts = part.count_by_corpus(stage.samples, max(stage.samples, stop))
        for prefix, count in counts.items():
            before = read.get(prefix, 0)
            read[prefix] = before + count * stage.length
            size = sizes[prefix]
            found.append(Reading(stage, prefix, before / size, read[prefix] / size, count))
    return found


def repeated(found: list[Reading], plan: StagePlan | None) -> list[str]:
    """Return a note for each corpus that is read more often than max_epochs says."""
    limits = dict(plan.max_epochs) if plan else {}
    last = {reading.prefix: reading for reading in found}
    notes = [
        f"{prefix} is read {last[prefix].end:.2f} times, and max_epochs is {most:g}"
        for prefix, most in limits.items()
        if prefix in last and last[prefix].end > most
    ]
    unread = [prefix for prefix in limits if prefix not in last]
    return notes + [f"max_epochs names {prefix}, which no stage reads" for prefix in unread]


def table(config: Config) -> list[str]:
    """Return the lines of `scripts/corpus.py order`; UserError if the run has no stages."""
    if not config.stages:
        raise UserError("order shows the stages of a run: give --stages FILE, or a run with stages")
    found = readings(config)
    total = config.tokens_at(config.total_samples)
    lines = [f"{config.total_steps} steps, {total:,} tokens, {config.total_samples:,} samples"]
    ends = [stage.step for stage in config.stages[1:]] + [config.total_steps]
    for stage, end in zip(config.stages, ends):
        what = f"{stage.batch} samples of {stage.length} tokens"
        rate = f", rate {stage.stage.lr_schedule}" if stage.stage.has_rate else ""
        steps = f"steps {stage.step + 1} to {end}" if end > stage.step else "never reached"
        begun = ", begun" if stage.is_begun else ""
        lines.append(f"{stage.name}: {steps}, from {stage.tokens:,} tokens, {what}{rate}{begun}")
        for one in found:
            if one.stage == stage:
                lines.append(
                    f"    {one.prefix}: epochs {one.begin:.3f} to {one.end:.3f}, "
                    f"{one.samples:,} samples"
                )
    return lines + [f"note: {note}" for note in repeated(found, config.plan)]
