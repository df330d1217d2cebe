"""Says in advance which epochs of each corpus the phases of a run read (--phases).

print("\n".join(table(config)))       a line for each phase and corpus, and notes
repeated(readings, plan)              only the notes: corpora that are read too often
"""

from dataclasses import dataclass

from base.errors import CorpusError
from config.phases import PhasePlan, PlacedPhase
from config.schema import Config
from config.timeline import Timeline
from corpora.corpus_splits import Corpora


@dataclass(frozen=True)
class Reading:
    """What a phase reads of a corpus.

    begin, end: epochs of the corpus that are read before the phase and after it. samples: so many.
    """

    phase: PlacedPhase
    prefix: str
    begin: float
    end: float
    samples: int


def readings(config: Config, corpora: Corpora | None = None) -> list[Reading]:
    """Return what each phase reads of each of its corpora; [] if tokens are random.

    corpora: those of the run, if they are open.
    """
    timeline = Timeline(config)
    if not timeline.phases or config.data.data == ("synthetic",):
        return []
    corpora = corpora or Corpora(config)
    found = []
    read: dict[str, int] = {}
    parts = corpora.phase_samples()
    sizes = corpora.epoch_tokens()
    ends = [phase.samples for phase in timeline.phases[1:]] + [timeline.total_samples]
    for phase, part, stop in zip(timeline.phases, parts, ends):
        if part is None:
            continue
        counts = part.count_by_corpus(phase.samples, max(phase.samples, stop))
        for prefix, count in counts.items():
            before = read.get(prefix, 0)
            read[prefix] = before + count * phase.length
            size = sizes[prefix]
            found.append(Reading(phase, prefix, before / size, read[prefix] / size, count))
    return found


def repeated(found: list[Reading], plan: PhasePlan | None) -> list[str]:
    """Return a note for each corpus that is read more often than max_epochs says."""
    limits = dict(plan.max_epochs) if plan else {}
    last = {reading.prefix: reading for reading in found}
    notes = [
        f"{prefix} is read {last[prefix].end:.2f} times, and max_epochs is {most:g}"
        for prefix, most in limits.items()
        if prefix in last and last[prefix].end > most
    ]
    unread = [prefix for prefix in limits if prefix not in last]
    return notes + [f"max_epochs names {prefix}, which no phase reads" for prefix in unread]


def table(config: Config) -> list[str]:
    """Return the lines of `scripts/corpus.py order`; UserError if the run has no phases."""
    timeline = Timeline(config)
    if not timeline.phases:
        raise CorpusError(
            "order shows the phases of a run: give --phases FILE, or a run with phases"
        )
    found = readings(config)
    total = timeline.tokens_at(timeline.total_samples)
    lines = [f"{timeline.total_steps} steps, {total:,} tokens, {timeline.total_samples:,} samples"]
    ends = [phase.step for phase in timeline.phases[1:]] + [timeline.total_steps]
    for phase, end in zip(timeline.phases, ends):
        what = f"{phase.batch} samples of {phase.length} tokens"
        rate = f", rate {phase.settings.lr_schedule}" if phase.settings.has_rate else ""
        steps = f"steps {phase.step + 1} to {end}" if end > phase.step else "never reached"
        begun = ", begun" if phase.is_begun else ""
        lines.append(f"{phase.name}: {steps}, from {phase.tokens:,} tokens, {what}{rate}{begun}")
        for one in found:
            if one.phase == phase:
                lines.append(
                    f"    {one.prefix}: epochs {one.begin:.3f} to {one.end:.3f}, "
                    f"{one.samples:,} samples"
                )
    return lines + [f"note: {note}" for note in repeated(found, config.plan)]
