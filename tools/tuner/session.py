"""Runs one use of the tuner: reads the command line, measures layouts, and writes the report.

    Session(options, ["--model", "gpt2-124m", ...]).run()      # options: the flags of tune.py

A trial is a short run of train.py with one layout, which is called a candidate. The search stops
when no other layout is likely to be faster (search.py), or when the budget of trials or minutes is
spent. All trials are stored in OUT/trials.jsonl; a later session goes on from them and does not run
them again.
"""

import argparse
import contextlib
import dataclasses
import math
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from base.console import IS_INSTALLED, as_typed
from base.errors import FileError, LayoutError, UserError
from base.paths import check_folder, write_file
from config import command_line
from costs import hardware
from tools.planner.layouts import Rejected
from tools.tuner import report_page, result_tables, search_space, trials
from tools.tuner.result_tables import SearchResult
from tools.tuner.search import MAX_CHANCE, Search, features
from tools.tuner.search_space import Candidate
from tools.tuner.trials import PROGRAM, STOPPING, Runner, Trial, TrialStore

TOP = 5  # the number of layouts that are printed at the end
MOST = 1e18  # a number on the command line must be below this limit
PREDICTED = 200  # a search chooses from this number of layouts, which are likely the fastest
WRITTEN = ("report.html", "table.md", "results.csv", "layouts.svg")
DEFAULT_STEPS = 1000  # the suggested training command has these --steps if the user gave no length
DEFAULT_GAIN = 1.0  # the value of --gain, in per cent of a step's seconds, if it is not given


class StoppedBySignal(BaseException):
    """Raised in the main thread by the first signal of STOPPING; number: the signal's number."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def raise_on_signals() -> None:
    """Let the first signal of STOPPING raise StoppedBySignal, and further ones have no effect.

    So the report is written once, undisturbed. tune.py calls this before a session. A signal that
    is ignored before the call, for example with nohup, stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        """Ignore all further signals of STOPPING, and raise StoppedBySignal for this one."""
        for signal_number in STOPPING:
            signal.signal(signal_number, signal.SIG_IGN)
        raise StoppedBySignal(number)

    for signal_number in STOPPING:
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, stop)


class BudgetSpent(Exception):
    """Raised when a trial is needed that would exceed the budget."""


class Budget:
    """The most trials or the most minutes that this session may take."""

    def __init__(self, text: str | None, earlier_trials: int = 0):
        """Begin to count time; read the value of --budget, or raise UserError if it is wrong.

        text: `12` for 12 trials, `90m` for 90 minutes, None for no limit. earlier_trials: the
        number of trials that were stored before this session, which do not count.
        """
        self.start = time.monotonic()
        self.earlier_trials = earlier_trials
        self.minutes = math.inf
        self.trials: float = math.inf
        try:
            if text and text.endswith("m"):
                self.minutes = float(text[:-1])
            elif text:
                self.trials = int(text)
            if text and not 0 < min(self.minutes, self.trials) < math.inf:
                raise ValueError
        except ValueError:
            wanted = "a number of trials or minutes above 0, as 12 or 90m"
            raise UserError(f"--budget is {wanted}, not {text!r}") from None
        self.ending = f"the budget of {text} is spent; run again with a larger one to continue"

    def spent(self, stored: list[Trial]) -> bool:
        """Return whether another trial would exceed the budget, so that it must not be started.

        The trial is assumed to take the median duration of this session's trials so far. stored:
        all trials, those of earlier sessions first.
        """
        ran = stored[self.earlier_trials :]
        median_seconds = 0.0
        if ran:
            median_seconds = statistics.median([trial.wall for trial in ran])
        too_long = self.elapsed() + median_seconds > 60 * self.minutes
        return too_long or len(ran) >= self.trials

    def elapsed(self) -> float:
        """Return the seconds since the session began."""
        return time.monotonic() - self.start

    def seconds_left(self) -> float:
        """Return the seconds until the budget's minutes have passed; infinite without minutes."""
        return 60 * self.minutes - self.elapsed()

    def left(self, done: int) -> str:
        """Return the remaining trials or minutes as text, to print after each trial.

        done: the number of trials of this session so far. Without a budget the text has the minutes
        that have passed.
        """
        if self.minutes < math.inf:
            return f"{max(0.0, self.seconds_left() / 60):.0f} minutes left"
        if self.trials < math.inf:
            return f"{max(0, self.trials - done)} trials left"
        return f"{self.elapsed() / 60:.0f} minutes so far"


def say(line: str) -> None:
    """Print a line without delay, also if the output is a pipe, which Python would buffer."""
    print(line, flush=True)


class Session:
    """A search for the fastest layout of one model on a number of ranks."""

    def __init__(self, options: argparse.Namespace, train_arguments: list[str]):
        """Check the command line and read the stored trials; raise UserError for a mistake.

        options: the flags of tune.py. train_arguments: the words for train.py.
        """
        for name in ("launch", "gpus"):
            if getattr(options, name) is None:
                raise UserError(f"give --{name}: see python tune.py --help")
        if options.all and options.gain is not None:
            raise UserError("--gain is of a search: leave it out, or --all")
        if options.gain is None:
            options.gain = DEFAULT_GAIN
        for name in ("gpus", "timed", "time_limit"):
            value = getattr(options, name)
            if not 0 < value < MOST:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} must be above 0, below {MOST:g}, not {value}")
        if not 0 <= options.gain < MOST:
            raise UserError(f"--gain must be at least 0 and below {MOST:g}, not {options.gain}")
        if not 0 < options.risk <= 1:
            raise UserError(f"--risk must be above 0 and at most 1, not {options.risk:g}")
        self.options = options
        self.machine = hardware.load(options.gpu or "a100-80", options.calibration)
        request = self._request(train_arguments)
        for note in (self.machine.note, *request.notes):
            if note:
                print(f"note: {note}", file=sys.stderr)
        self.config = request.config
        # By the name of a layout option that the command line gives, the values to try. An option
        # of train.py has one value; --try may give several, and takes precedence.
        given_axes = request.given.intersection(search_space.AXES)
        self.held = {name: [getattr(self.config.layout, name)] for name in given_axes}
        self.held |= search_space.tried_values(options.tried)
        base = self.config.model
        names = search_space.tried_models(options.tried)
        self.models = {name: search_space.model_of(name, base) for name in names} or {"": base}
        self.out = Path(self.config.run.out)
        folder = self.out / "trials"
        self.runner = Runner(options.launch, folder, options.timed, options.time_limit)
        launcher = self.runner.launch_command(options.gpus)[0]
        check_folder("--out", self.config.run.out)
        self.store = TrialStore(self.out / "trials.jsonl")
        if self.store.note:
            print(f"note: {self.store.note}", file=sys.stderr)
        self.budget = Budget(options.budget, earlier_trials=len(self.store.trials))
        if not shutil.which(launcher):
            raise FileError(f"cannot start {launcher!r} of --launch: there is no such program")
        self.rejected: list[Rejected] = []
        self.wanted: dict[str, Candidate] = {}  # by key: the layouts that the report lists
        self.ending = "every layout has been measured"
        self.finished: list[Trial] = []  # trials of this session

    def _request(self, arguments: list[str]) -> command_line.Request:
        """Return the configuration that train.py's arguments ask for.

        The defaults are the folder runs/tune and the precision of --gpu, or fp32 with --device cpu.
        """
        precision = self.machine.precision

        def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
            """Return defaults for options that the user did not give; given: the other options."""
            on_cpu = given.get("device") == "cpu"
            return {"out": "runs/tune", "precision": "fp32" if on_cpu else precision}

        names = search_space.tried_models(self.options.tried)
        if names and "--model" not in arguments and not search_space.SHAPE.fullmatch(names[0]):
            arguments = [*arguments, "--model", names[0]]
        return command_line.parse_request(arguments, defaults=defaults)

    def run(self) -> None:
        """Measure layouts, then write the report, also after a signal or a spent budget.

        After a signal, raise StoppedBySignal when the report is written.
        """
        stopped: StoppedBySignal | None = None
        try:
            self._measure()
        except BudgetSpent:
            self.ending = self.budget.ending
        except StoppedBySignal as error:
            stopped = error
            name = "Ctrl-C"
            if error.number != signal.SIGINT:
                name = signal.Signals(error.number).name
            self.ending = f"stopped by {name}; run the same command again to continue"
        print(f"\n{self.ending}")
        print("\n".join(write_report(self.result(), self.out)))
        if stopped:
            raise stopped

    def result(self) -> SearchResult:
        """Return everything that the report contains, with trials of earlier sessions too."""
        return SearchResult(
            trials=[trial for trial in self.store.trials if trial.key in self.wanted],
            candidates=list(self.wanted.values()),
            rejected=self.rejected,
            machine=self.machine,
            ending=self.ending,
            command=self.command,
            title=f"the fastest layout on {self.options.gpus} ranks",
        )

    def command(self, candidate: Candidate) -> list[str]:
        """Return the words of the command that trains on a candidate's layout in OUT/train.

        The report suggests it to the user. If the user gave no length, it has DEFAULT_STEPS steps.
        """
        config = candidate.config
        run = dataclasses.replace(config.run, out=str(self.out / "train"))
        training = config.training
        if training.steps is None and training.train_samples is None:
            training = dataclasses.replace(training, steps=DEFAULT_STEPS)
        config = dataclasses.replace(config, training=training, run=run)
        # Leave out the last word, the path of train.py.
        *launcher, _ = self.runner.launch_command(candidate.ranks)
        program = ["train.py"] if not IS_INSTALLED else [PROGRAM]  # torchrun starts a file
        if launcher[-1:] == [sys.executable]:
            *launcher, _ = launcher
            program = as_typed("python train.py").split()
        return [*launcher, *program, *search_space.to_cli_args(config)]

    # ---- What is measured ------------------------------------------------------------------------

    def _measure(self) -> None:
        """Measure layouts until the fastest is known; raise BudgetSpent if the budget is spent.

        With --all every layout gets one trial. Otherwise the search chooses the next layout after
        each trial; at the end the best layouts are measured once more if they are close.
        """
        config = self.config
        ranks = self.options.gpus
        most = math.inf if self.options.all else PREDICTED
        candidates, slower = list[Candidate](), 0
        for name, model in self.models.items():
            say(f"predicting every layout of {model.layers} blocks on {ranks} ranks")
            of_model = dataclasses.replace(config, model=model)
            found, rejected, left = search_space.candidates(
                of_model, self.machine, ranks, self.held, self.options.risk, most
            )
            candidates += [dataclasses.replace(candidate, model=name) for candidate in found]
            self.rejected += rejected
            slower += left
        candidates.sort(key=lambda candidate: candidate.prediction.seconds)
        for entry in self.rejected:
            say("rejected " + result_tables.rejection_line(entry))
        say(f"{len(candidates)} layouts can run, {len(self.rejected)} cannot")
        if slower:
            say(f"{slower} more are likely slower than most of these: not predicted")
        if not candidates:
            raise LayoutError(f"no layout can run on {ranks} ranks: see the reasons above")
        self.wanted = {candidate.key: candidate for candidate in candidates}
        if self.options.all:
            for candidate in candidates:
                if not self.store.of(candidate.key):
                    self._trial(candidate, "all")
            return
        predicted = [candidate.prediction.seconds for candidate in candidates]
        positions = [features(candidate.config) for candidate in candidates]
        search = Search(predicted, positions, self.options.gain / 100)
        # The search begins with the trials that earlier sessions have stored.
        for number, candidate in enumerate(candidates):
            for trial in self.store.of(candidate.key):
                self._add(search, candidates, number, trial)
        while (index := search.next()) is not None:
            trial = self._trial(candidates[index])
            self._add(search, candidates, index, trial)
        # Repeat the trials of layouts that noise alone may separate. If the budget ends meanwhile,
        # the search has its result nevertheless.
        with contextlib.suppress(BudgetSpent):
            for contender in search.contenders():
                trial = self._trial(candidates[contender], "confirm")
                self._add(search, candidates, contender, trial)
        self.ending = (
            f"no other layout is likely to be {self.options.gain:g} % faster "
            f"(chance of each at most {MAX_CHANCE:.0%})"
        )

    def _add(self, search: Search, candidates: list[Candidate], index: int, trial: Trial) -> None:
        """Add the result of a trial to the search; index: the candidate's index in `candidates`.

        If the trial ran out of memory, untried candidates that surely need more memory are rejected
        without a trial. The search's noise, how much repeated trials vary, is estimated again.
        """
        seconds = trial.median if trial.status == "ok" else None
        search.add(index, seconds)
        if trial.status == "oom":
            reason = f"needs more memory than {trial.label}, which ran out of it"
            for untried in search.untried:
                other = candidates[untried]
                if search_space.needs_more_memory(other, candidates[index]):
                    search.add(untried, None)
                    self.rejected.append(Rejected({"layout": other.label}, reason))
        trials_of_measured: list[Trial] = []
        for measured in search.measured:
            trials_of_measured += self.store.of(candidates[measured].key)
        search.noise = trials.noise(trials_of_measured)

    def _trial(self, candidate: Candidate, tag: str = "") -> Trial:
        """Run a trial of a candidate; store, print and return the trial.

        tag: a word that says why it runs, if the search did not choose it: `all` or `confirm`.
        Raise BudgetSpent if the budget does not allow the trial, or ends while it runs; then the
        trial is not stored, because it says nothing about the layout.
        """
        if self.budget.spent(self.store.trials):
            raise BudgetSpent
        # A trial must not run longer than the budget lasts. If the budget is shorter than the time
        # limit of a trial and the trial did not end, the budget ended it.
        limit = min(self.runner.time_limit, self.budget.seconds_left())
        runner = dataclasses.replace(self.runner, time_limit=limit)
        trial = trials.run(candidate, runner, len(self.store.trials), tag)
        if trial.status == "hang" and runner != self.runner:
            say(f"{candidate.label}: stopped, the budget is spent; not stored")
            raise BudgetSpent
        self.store.add(trial)
        self._print_outcome(trial)
        return trial

    def _print_outcome(self, trial: Trial) -> None:
        """Print a line about the trial that has just ended, and add it to `self.finished`.

        If it ran, the line has its seconds and the planner's, says whether it is the fastest trial
        of this session, and how much of the budget is left.
        """
        ran_before = [earlier for earlier in self.finished if earlier.status == "ok"]
        self.finished.append(trial)
        text = f"{trial.status}: {trial.reason}"
        if trial.status == "ok":
            text = (
                f"{trial.median:9.3f} s ({trial.spread:4.0%} spread), "
                f"predicted {trial.predicted:8.3f}, {max(trial.peak_memory) / 1e9:.2f} GB"
            )
            if all(trial.median < earlier.median for earlier in ran_before):
                text += " best so far"
            text += f"; {self.budget.left(len(self.finished))}"
        say(f"trial {len(self.finished):3} {trial.label:36} {text}")


def write_report(result: SearchResult, out: Path) -> list[str]:
    """Write report.html, table.md, results.csv and layouts.svg into the folder `out`.

    Return the lines to print: the fastest layouts, a summary, and a command that trains.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_file(str(out / "table.md"), "\n".join(result_tables.markdown(result)) + "\n")
    write_file(str(out / "results.csv"), result_tables.csv_text(result))
    write_file(str(out / "report.html"), report_page.page(result))
    result_tables.draw(result, str(out / "layouts.svg"))
    ranked = result.ranked
    lines = [*map(result_tables.top_line, ranked[:TOP]), "", *result_tables.summary(result)]
    if ranked:
        command = shlex.join(result.command(ranked[0].candidate))
        lines += ["", "to train on the fastest:", f"    {command}"]
    return [*lines, "", f"written: {', '.join(f'{out}/{name}' for name in WRITTEN)}"]
