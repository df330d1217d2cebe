"""Schedules written by hand for tests: several stages a rank, and a backward that is split."""

from schedules.schedule import Action, Schedule, check


def interleaved(ranks: int, virtual: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards; stage s is on rank s % ranks."""
    stages, rows = ranks * virtual, []
    for rank in range(ranks):
        own = [s for s in range(stages) if s % ranks == rank]
        forwards = [Action("F", s, m) for s in own for m in range(micro_batches)]
        backwards = [Action("B", s, m) for s in reversed(own) for m in range(micro_batches)]
        rows.append(tuple(forwards + backwards))
    schedule = Schedule("interleaved", tuple(rows), tuple(s % ranks for s in range(stages)))
    check(schedule, micro_batches, backward=True)
    return schedule


def there_and_back(ranks: int, micro_batches: int) -> Schedule:
    """Two stages a rank, the last stage on rank 0 again: neighbours on one rank in the middle."""
    stages = 2 * ranks
    rank_of = tuple(min(s, stages - 1 - s) for s in range(stages))
    rows = []
    for rank in range(ranks):
        own = [s for s in range(stages) if rank_of[s] == rank]
        forwards = [Action("F", s, m) for m in range(micro_batches) for s in own]
        backwards = [Action("B", s, m) for m in range(micro_batches) for s in reversed(own)]
        rows.append(tuple(forwards + backwards))
    schedule = Schedule("there and back", tuple(rows), rank_of)
    check(schedule, micro_batches, backward=True)
    return schedule


def split(schedule: Schedule, micro_batches: int, delay: int = 1) -> Schedule:
    """The schedule with every backward split, and each W put `delay` backwards after its B."""
    rows = []
    for actions in schedule.ranks:
        row, waiting = [], []
        for action in actions:
            row.append(action)
            if action.kind == "B":
                waiting.append(Action("W", action.stage, action.micro_batch))
            if len(waiting) > delay:
                row.append(waiting.pop(0))
        rows.append(tuple(row + waiting))
    result = Schedule(f"{schedule.name}, split", tuple(rows), schedule.rank_of)
    check(result, micro_batches, backward=True)
    return result
