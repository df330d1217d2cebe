"""Measured search for the fastest layout: starts train.py for a few steps at a time.

    python tune.py --model 176b --gpu a100-80 --gpus 384 --launch "srun -n {ranks}" \\
        --global-batch-size 2048 --budget 120m
    python tune.py --config run.toml --gpu cpu --calibration runs/allreduce/calibration.toml \\
        --gpus 8 --launch "mpirun -n {ranks}" --budget 12 --try zero=0,1

Flags that describe model, layout and training are those of train.py; a layout option that a flag
or the --config file gives is held fixed. Every trial is stored at once in --out/trials.jsonl: stop
at any moment, run the same command again, and the search continues. At the end --out has
report.html, table.md, results.csv and layouts.svg.
"""

import argparse
import contextlib
import json
import os
import sys

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors  # imported first, because it refuses a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    from base.cli import Parser
    from costs import hardware, risk
    from tools.tuner import result_tables
    from tools.tuner.session import Session, StoppedBySignal, raise_on_signals


def main(arguments: list[str]) -> None:
    """Run the search of a command line; a UserError is printed as one line, with exit status 2.

    The exit status is 1 if no trial trained, though trials were run or the budget was spent. SIGINT
    (Ctrl-C), SIGTERM and SIGHUP end the running trial; the exit status is 128 + signal number.
    """
    raise_on_signals()
    try:
        with errors.sentences():
            options, train_arguments = parser().parse_known_args(arguments)
            session = Session(options, train_arguments)
            with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
                session.run()
    except StoppedBySignal as stopped:
        sys.exit(128 + stopped.number)
    trials = session.result().trials
    # If the budget has ended the first trial, `trials` is empty although a trial was run. If no
    # trial was run, because there was nothing to measure, the exit status is 0.
    trials_were_run = trials or session.ending == session.budget.ending
    any_trained = any(trial.status == "ok" for trial in trials)
    status = int(bool(trials_were_run) and not any_trained)
    if options.json:
        print(json.dumps({"status": status} | result_tables.data(session.result())))
    if status:
        sys.exit(status)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tuner's flags; the parser of train.py reads all other flags."""
    found = Parser(
        prog="tune.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Model, layout, training and data flags: see `python train.py --help`.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--launch", metavar="WORDS", help="what starts the ranks, such as 'srun -n {ranks}'")
    found.add_gpus("ranks to use, one for each GPU, all of them in every layout")
    add(
        "--gpu",
        metavar="NAME",
        help="machine: a family such as a100, or one of " + ", ".join(hardware.names()),
    )
    add(
        "--calibration",
        metavar="FILE",
        help="measured rates, as benchmarks/network/allreduce.py writes",
    )
    add("--try", action="append", default=[], dest="tried", metavar="AXIS=V,V",
        help="values to try of tp, pp, or another axis of the layout; model=A,B: models or shapes "
        "(blocks x hidden x heads x MLP) of one size")  # fmt: skip
    add(
        "--budget",
        metavar="N|Nm",
        help="stop after N trials, or Nm: N minutes (default: once decided)",
    )
    add("--timed", type=int, default=3, help="timed steps of a trial, after 2 warm-up steps")
    add("--time-limit", type=float, default=600.0, metavar="SECONDS", help="time limit of a trial")
    text = "measure a layout only if it may be faster by this many per cent (default 1)"
    add("--gain", type=float, help=text)
    add("--risk", type=float, metavar="P",
        default=risk.DEFAULT,
        help="skip layouts with a larger risk of running out of memory (default 0.05)")  # fmt: skip
    add("--all", action="store_true", help="measure every layout, whatever its prediction")
    add("--json", action="store_true", help="print the result as JSON; lines go to stderr")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
