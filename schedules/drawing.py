"""Draws schedules and steps: as a grid of characters, and as events of a Chrome trace."""

from typing import Any

from schedules.simulation import Slot


def draw(slots: list[list[Slot]], columns: int = 48) -> str:
    """Return a grid of simulated slots, a line per rank and a column per unit of time.

    `F0` marks the first unit of an action, `==` a further unit, `..` an idle one. At most `columns`
    units are drawn; the lines of a longer schedule end in `...`. If some rank holds several stages,
    lines are named by rank instead of stage, and actions by micro-batch and stage: `F0.2`.
    """
    several = any(len({slot.action.stage for slot in row}) > 1 for row in slots)

    def name(slot: Slot) -> str:
        return f"{slot.action}.{slot.action.stage}" if several else str(slot.action)

    end = max((slot.end for row in slots for slot in row), default=0)
    width = max((len(name(slot)) for row in slots for slot in row), default=2)
    lines = []
    for number, row in enumerate(slots):
        cells = ["." * width] * min(int(end), columns)
        for slot in row:
            for t in range(int(slot.start), min(int(slot.end), columns)):
                cells[t] = name(slot).ljust(width) if t == int(slot.start) else "=" * width
        head = f"{'rank' if several else 'stage'} {number:<3}"
        lines.append(head + " ".join(cells) + (" ..." if end > columns else ""))
    return "\n".join(lines)


# ---- Chrome traces, for chrome://tracing and ui.perfetto.dev -------------------------------------


def trace_event(
    name: str, process: int, thread: int, start: float, end: float, **more: Any
) -> dict[str, Any]:
    """Return the event of a span of time in one row of a trace; start and end in seconds.

    more: further fields of the event.
    """
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"name": name, "ph": "X", "pid": process, "tid": thread} | times | more


def trace_label(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread; kind: process_name or thread_name."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the trace document, to be written as JSON, which a viewer opens."""
    return {"traceEvents": events, "displayTimeUnit": "ms"}
