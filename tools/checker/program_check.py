"""The check of a user's program or module: its layouts, on ranks of this process or of a launcher.

status = check_program(given, launch)     given: the options of check.py
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from base.errors import LayoutError, UserError
from distributed.launch import Launch
from distributed.placement import allowed_cores
from tools.checker.engine import Outcome
from tools.checker.launched import Launched, meet_launched
from tools.checker.modules import read_module
from tools.checker.program_engine import ProgramEngine
from tools.checker.program_runs import Meeting
from tools.checker.programs import Program, ProgramLayout, read_program
from tools.checker.ranks import fork_all
from tools.checker.session import Session


def check_program(
    given: Namespace, changed: Mapping[str, str], at_once: int, launch: Launch
) -> int:
    """Check what --program or --module names, print the verdict, and return the exit status.

    changed: see `read_program`. at_once: layouts that run at the same time. launch: whose ranks
    are used if they are several; its rank 0 prints, and all return the same.
    """
    if given.program:
        program = read_program(Path(given.program), changed)
    else:
        program = read_module(given.module, changed)
    ranks = _most_ranks(given, launch)
    layouts = _layouts(program, given, ranks, launch)
    if launch.size == 1:
        return _judge(program, layouts, given, ranks, at_once)
    launched = meet_launched(launch, program, given.cuda)
    return launched.lead(lambda: _judge(program, layouts, given, ranks, 1, launched))


def _most_ranks(given: Namespace, launch: Launch) -> int:
    """Return the most ranks of a layout; UserError if the launcher has started fewer."""
    if launch.size == 1:
        return given.ranks or (8 if len(allowed_cores()) >= 8 else 4)
    if given.ranks and given.ranks > launch.size:
        raise UserError(
            f"--ranks {given.ranks}: {launch.launcher} has started {launch.size} ranks: start "
            f"more, or give --ranks {launch.size}"
        )
    if given.at_once and given.at_once > 1:
        raise UserError(
            f"--at-once {given.at_once}: the ranks that {launch.launcher} has started do one "
            f"layout at a time: leave it out"
        )
    return given.ranks or launch.size


def _layouts(program: Program, given: Namespace, ranks: int, launch: Launch) -> list[ProgramLayout]:
    """Return the layouts to run; UserError if there are none, or one that the ranks are not for."""
    layouts = program.chosen(given.layout or (), ranks)[: given.layouts]
    for layout in layouts:
        if launch.size > 1 and layout.ranks > launch.size:
            raise UserError(
                f"--layout {layout.name!r} has {layout.ranks} ranks, and {launch.launcher} has "
                f"started {launch.size}"
            )
    if not layouts:
        raise LayoutError(f"{program.path.name} has no layout but one rank, on up to {ranks} ranks")
    return layouts


def _judge(
    program: Program,
    layouts: Sequence[ProgramLayout],
    given: Namespace,
    ranks: int,
    at_once: int,
    launched: Launched | None = None,
) -> int:
    """Run the layouts and return the exit status; launched: of which this is rank 0."""
    session = Session(given.json, given.all, given.minutes)
    session.say(*_introduction(program, layouts, given, ranks, launched))
    meeting = launched.meeting if launched else Meeting(given.cuda)
    start = launched.start if launched else fork_all
    # Ranks of several nodes have a folder in common only where the user works.
    shared = None if launched is None or launched.is_one_node else os.getcwd()
    with (
        ProgramEngine(program, layouts, at_once, meeting=meeting, start=start) as engine,
        tempfile.TemporaryDirectory(prefix="trine-check-", dir=shared) as folder,
    ):

        def outcomes(may_begin: Callable[[], bool]) -> Iterator[Outcome]:
            """Yield what comes of the layouts, and then of runs that load what another saved."""
            yield from engine.run(may_begin)
            if may_begin():
                yield from engine.resume(Path(folder))

        about = {"program": str(program.path)}
        return session.judge(engine, outcomes, len(layouts), about, engine.notes)


def _introduction(
    program: Program,
    layouts: Sequence[ProgramLayout],
    given: Namespace,
    ranks: int,
    launched: Launched | None,
) -> Iterator[str]:
    """Yield the first printed lines: how many layouts, on which ranks, and which are left out."""
    number = f"{len(layouts)} layouts" if len(layouts) > 1 else "1 layout"
    most = max(layout.ranks for layout in layouts)
    yield f"{program.path.name}: {number} of up to {most} ranks, each against one rank"
    if launched is not None:
        yield (
            f"on the {launched.size} ranks that {launched.launcher} has started, or on the first "
            f"of them"
        )
    left_out = [x for x in program.layouts[1:] if x.ranks > ranks and not given.layout]
    if left_out:
        names = ", ".join(f"{layout.name} ({layout.ranks})" for layout in left_out)
        yield f"not run, of more than {ranks} ranks: {names}"
