"""Answers questions about runs from the files in their folders, while they train and after.

    python runs.py list [FOLDER]                 which runs are there, and in what do they differ?
    python runs.py show RUN                      what has one run done, how fast, with what?
    python runs.py chart RUN ... [--out FILE]    a page of losses over tokens, seconds and FLOPs
    python runs.py page RUN ... [--out FILE]     a page for the morning: loss, tasks, speed, corpora
    python runs.py against recipes/NAME RUN      is a run the known one, in any layout? Status 1: no
    python runs.py diff RUN_A RUN_B [--json]     why do two runs differ? Exit status 1: they do
    python runs.py diff RUN                      does a restart repeat the steps before the stop?
    python runs.py diff RUN --spikes             in what do spikes differ from the step before?
    python runs.py diff CHECKPOINT RUN           which tensors of two checkpoints differ?
    python runs.py diff RUN --with-transformers FOLDER     is the imported model transformers'?

numerics/ has the answers; only the last command needs torch, and none needs a GPU. train.py
--trace-numerics writes what `diff` compares tensor by tensor.
"""

import argparse
import json
import os
import sys
from pathlib import Path

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors, paths  # imported first: it prints an error if Python is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    from base.cli import Parser
    from base.errors import UserError
    from checkpointing.folders import is_checkpoint
    from tools.numerics import against, chart, diff, layers, page, run_page, spikes, table

# The columns of the table of `runs.py list` by which it can be sorted.
SORTS = ("run", "state", "step", "tokens", "loss", "validation", "tokens/s", "parameters", "date")


def run_command(arguments: list[str]) -> int:
    """Run the command that the words after runs.py name; return the exit status.

    The parser puts the command's function into `given.answer`, for example `_diff`. Raise UserError
    if a folder is no run.
    """
    given = _parser().parse_args(arguments)
    return given.answer(given)


def _diff(given: argparse.Namespace) -> int:
    """Print how two runs or checkpoints differ; return the exit status: 1 if they do, else 0.

    The options and arguments decide what is compared, as the file's docstring lists. given: the
    parsed command line.
    """
    if given.spikes:  # each spike of a run, and the step before the spike
        result = spikes.compare(given.run_a)
        text = spikes.text(result)
    elif given.with_transformers:  # a run, and the same model in transformers
        result = diff.compare_with_transformers(given.run_a, given.with_transformers)
        text = diff.text(result)
    elif given.run_b is None:  # one run: its steps before and after a restart
        result = diff.compare_restart(given.run_a)
        text = diff.text(result)
    elif is_checkpoint(str(given.run_a)) or is_checkpoint(str(given.run_b)):
        from tools.numerics import states  # imported here: only checkpoints need h5py

        result = states.compare(given.run_a, given.run_b)
        text = states.text(result)
    else:  # two runs
        result = diff.compare(given.run_a, given.run_b)
        text = diff.text(result)
    if given.picture:
        if given.run_b is None:
            raise UserError("--picture needs two runs with traces")
        picture = layers.page(layers.by_layer(given.run_a, given.run_b), text)
        paths.write_file(given.picture, picture)
    if given.json:
        text = json.dumps(result, indent=1)
    print(errors.printable(text))
    return int(result["differs"])


def _against(given: argparse.Namespace) -> int:
    """Print whether a run is that of a recipe; return the exit status: 1 if it is not, else 0."""
    found = against.compare(given.recipe, given.run)
    text = json.dumps(found, indent=1) if given.json else against.text(found)
    print(errors.printable(text))
    return int(found["differs"])


def _show(given: argparse.Namespace) -> int:
    """Print one run on one screen, for `runs.py show`; return the exit status 0."""
    print(errors.printable(page.text(given.run)))
    return 0


def _chart(given: argparse.Namespace) -> int:
    """Write a page of losses, or print them as bars with --text; return the exit status 0."""
    curves = chart.read_curves(given.runs)
    if given.text:
        print(errors.printable(chart.bars(curves)))
    else:
        paths.write_file(given.out, chart.page(curves))
        print(f"written: {given.out}")
    return 0


def _page(given: argparse.Namespace) -> int:
    """Write a page with a picture of each run; return the exit status 0."""
    paths.check_file(given.out)
    paths.write_file(given.out, run_page.page(given.runs))
    print(f"written: {given.out}")
    return 0


def _list(given: argparse.Namespace) -> int:
    """Print a table of the runs in a folder, or all columns with --json; return exit status 0."""
    rows, notes = table.table(given.folder, given.sort)
    if given.json:
        print(json.dumps({"runs": rows, "notes": notes}, indent=1))
    else:
        print(errors.printable(table.text(rows, notes)))
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser; each command sets `answer`, the function that runs the command."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("list", help="which runs are there, and in what do they differ?")
    command.set_defaults(answer=_list)
    text = "folder with the folders of runs, default: runs"
    command.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", help=text, default="runs"
    )
    text = "column to sort by, default: date"
    command.add_argument("--sort", choices=SORTS, default="date", help=text)
    command.add_argument("--json", action="store_true", help="print all columns as JSON")
    command = commands.add_parser("show", help="one run on one screen")
    command.set_defaults(answer=_show)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    command = commands.add_parser("chart", help="losses of runs over tokens, seconds and FLOPs")
    command.set_defaults(answer=_chart)
    command.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folders of runs")
    text = "HTML page to write, default: chart.html"
    command.add_argument("--out", metavar="FILE", default="chart.html", help=text)
    command.add_argument("--text", action="store_true", help="print bars and write no page")
    text = "loss, tasks, speed, rate and corpora of each run, with phases, resumes and spikes"
    command = commands.add_parser("page", help=text)
    command.set_defaults(answer=_page)
    command.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folders of runs")
    text = "HTML page to write, default: page.html"
    command.add_argument("--out", metavar="FILE", default="page.html", help=text)
    command = commands.add_parser("against", help="is a run the known one of a recipe?")
    command.set_defaults(answer=_against)
    text = "folder of a known run, such as recipes/dense-1m"
    command.add_argument("recipe", metavar="RECIPE", type=Path, help=text)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    command.add_argument("--json", action="store_true", help="print all that was found as JSON")
    command = commands.add_parser("diff", help="why do two runs differ?")
    command.set_defaults(answer=_diff)
    text = "explain the spikes of RUN_A (train.py --on-spike) against the steps before them"
    command.add_argument("--spikes", action="store_true", help=text)
    command.add_argument(
        "run_a", metavar="RUN_A", type=Path, help="folder of a run, or of a checkpoint"
    )
    text = "another one; left out: RUN_A before and after its last stop"
    command.add_argument("run_b", metavar="RUN_B", type=Path, nargs="?", help=text)
    text = "compare the first traced step of RUN_A with transformers' model in FOLDER, by layer"
    command.add_argument("--with-transformers", metavar="FOLDER", type=Path, help=text)
    text = "HTML page to write, with a picture of the differences by layer and step"
    command.add_argument("--picture", metavar="FILE", help=text)
    command.add_argument("--json", action="store_true", help="print all that was found as JSON")
    return parser


if __name__ == "__main__":
    with errors.sentences():
        sys.exit(run_command(sys.argv[1:]))
