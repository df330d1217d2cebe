"""One use of the tuner: reads what is asked, measures it, writes the report.

    Session(options, ["--model", "gpt2-124m", ...]).run()      # options: the flags of tune.py

A search stops when it is decided (search.py) or when the budget is spent. Trials that are stored
already are not run again.
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

from config import command_line
from config.messages import UserError, check_folder
from planner import hardware
from planner.layouts import Rejected
from tuner import result_tables, search_space, trials
from tuner.result_tables import SearchResult
from tuner.search import MAX_CHANCE, Search, features
from tuner.search_space import Candidate
from tuner.trials import Outcome, Rehearser, Runner, Trial, TrialStore

TOP = 5  # layouts that are printed at the end
MOST = 1e18  # of the numbers on the command line
PREDICTED = 200  # layouts that a search chooses from: those that are likely the fastest
DEFAULT_STEPS = 1000  # of the suggested training command, if no length is given
DEFAULT_GAIN = 1.0  # per cent
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedBySignal(BaseException):
    """Raised in the main thread by the first of the signals in STOPPING; number: which one."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def raise_on_signals() -> None:
    """From here on the first signal raises StoppedBySignal, and further ones have no effect.

    A signal that is ignored, as by nohup, stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise StoppedBySignal(number)

    for each in STOPPING:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, stop)


class BudgetSpent(Exception):
    """A trial is needed for which the budget has no room."""


class Budget:
    """How much may be spent in this session: trials, or minutes."""

    def __init__(self, text: str | None, earlier_trials: int = 0):
        """`12` trials, `90m` minutes, or None; UserError for anything else.

        `earlier_trials` were stored before this session and do not count.
        """
        self.start = time.monotonic()
        self.earlier_trials = earlier_trials
        self.minutes = self.trials = math.inf
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
        """Whether another trial, of the median duration so far, would exceed the budget."""
        own = [trial for trial in stored[self.earlier_trials :] if trial.command]  # that ran
        typical = statistics.median([t.wall for t in own]) if own else 0.0
        return len(own) >= self.trials or self.elapsed() + typical > 60 * self.minutes

    def elapsed(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.start

    def seconds_left(self) -> float:
        """Until its minutes have passed; infinite without."""
        return 60 * self.minutes - self.elapsed()

    def left(self, done: int) -> str:
        """Return what is left after `done` trials, for the progress line."""
        if self.minutes < math.inf:
            return f"{max(0.0, self.seconds_left() / 60):.0f} minutes left"
        if self.trials < math.inf:
            rest = max(0, self.trials - done)
            minutes = rest * self.elapsed() / max(1, done) / 60
            return f"at most {rest} trials left, {minutes:.0f} minutes"
        return f"{self.elapsed() / 60:.0f} minutes so far"


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


class Session:
    """A search: what is asked, what is measured, and where the report is written."""

    def __init__(self, options: argparse.Namespace, train_arguments: list[str]):
        """Read the whole command line: tune.py's flags and train.py's; raises UserError."""
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
        for note in [*filter(None, [self.machine.note]), *request.notes]:
            print(f"note: {note}", file=sys.stderr)
        self.config = request.config
        # The values of each layout axis that is held; --try replaces what was given otherwise.
        axes = request.given.intersection(search_space.AXES)
        self.held = {name: [getattr(self.config.layout, name)] for name in axes}
        self.held |= search_space.tried_values(options.tried)
        self.out = Path(self.config.run.out)
        folder = self.out / "trials"
        self.runner = Runner(options.launch, folder, options.timed, options.time_limit)
        launcher = self.runner.launch_command(options.gpus)[0]
        check_folder("--out", self.config.run.out)
        self.store = TrialStore(self.out / "trials.jsonl")
        self.budget = Budget(options.budget, earlier_trials=len(self.store.trials))
        self.rehearser: Rehearser | None = None
        on_gpus = self.machine.device != "CPU" and self.config.run.device != "cpu"
        if on_gpus and not options.no_rehearse:
            self.rehearser = Rehearser(self.machine.name, options.calibration)
        else:  # what a rehearsal rejected before may run now
            self.store.trials = [trial for trial in self.store.trials if trial.command]
        if not shutil.which(launcher):
            raise UserError(f"cannot start {launcher!r} of --launch: there is no such program")
        self.rejected: list[Rejected] = []
        self.wanted: dict[str, Candidate] = {}  # by key: the layouts that the report lists
        self.ending = "every layout has been measured"
        self.finished: list[Trial] = []  # trials of this session

    def _request(self, arguments: list[str]) -> command_line.Request:
        """The run that train.py's flags ask for, with its own folder if none is given, and with the
        precision of --gpu, or of CPUs if --device says so.
        """
        precision = self.machine.precision

        def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
            on_cpu = given.get("device") == "cpu"
            return {"out": "runs/tune", "precision": "fp32" if on_cpu else precision}

        return command_line.parse_request(arguments, defaults=defaults)

    def run(self) -> None:
        """Measure what is asked, then write the report, also if StoppedBySignal is raised."""
        stopped: StoppedBySignal | None = None
        try:
            self._measure()
        except BudgetSpent:
            self.ending = self.budget.ending
        except StoppedBySignal as error:
            stopped = error
            name = signal.Signals(error.number).name
            name = "Ctrl-C" if error.number == signal.SIGINT else name
            self.ending = f"stopped by {name}; run the same command again to continue"
        print(f"\n{self.ending}")
        print("\n".join(write_report(self.result(), self.out)))
        if stopped:
            raise stopped

    def result(self) -> SearchResult:
        """Everything that the report contains."""
        return SearchResult(
            trials=[t for t in self.store.trials if t.key in self.wanted],
            candidates=list(self.wanted.values()),
            rejected=self.rejected,
            machine=self.machine,
            ending=self.ending,
            command=self.command,
            title=f"the fastest layout on {self.options.gpus} ranks",
        )

    def command(self, candidate: Candidate) -> list[str]:
        """Return the command that trains on that layout, into a folder beside the trials'."""
        config = candidate.config
        run = dataclasses.replace(config.run, out=str(self.out / "train"))
        training = config.training
        if training.steps is None and training.train_samples is None:
            training = dataclasses.replace(training, steps=DEFAULT_STEPS)
        config = dataclasses.replace(config, training=training, run=run)
        *start, _ = self.runner.launch_command(candidate.ranks)
        names = ["python" if word == sys.executable else word for word in start]
        return [*names, "train.py", *search_space.to_cli_args(config)]

    # ---- What is measured ------------------------------------------------------------------------

    def _measure(self) -> None:
        """Measure layouts until the fastest is known, or the budget is spent."""
        config = self.config
        ranks = self.options.gpus
        say(f"predicting every layout of {config.model.layers} blocks on {ranks} ranks")
        about = config, self.machine, ranks, self.held, self.options.risk
        most = math.inf if self.options.all else PREDICTED
        found, self.rejected, slower = search_space.candidates(*about, most)
        for entry in self.rejected:
            say("rejected " + result_tables.rejection_line(entry))
        say(f"{len(found)} layouts can run, {len(self.rejected)} cannot")
        if slower:
            say(f"{slower} more are likely slower than most of these: not predicted")
        if not found:
            raise UserError(f"no layout can run on {ranks} ranks: see the reasons above")
        self.wanted = {candidate.key: candidate for candidate in found}
        if self.options.all:
            for candidate in found:
                if not self.store.of(candidate.key):
                    self._trial(candidate, "all")
            return
        predicted = [candidate.prediction.seconds for candidate in found]
        positions = [features(candidate.config) for candidate in found]
        search = Search(predicted, positions, self.options.gain / 100)
        for number, candidate in enumerate(found):
            for trial in self.store.of(candidate.key):
                self._add(search, found, number, trial)
        while (index := search.next()) is not None:
            self._add(search, found, index, self._trial(found[index]))
        with contextlib.suppress(BudgetSpent):
            for contender in search.contenders():
                trial = self._trial(found[contender], "confirm")
                self._add(search, found, contender, trial)
        self.ending = (
            f"no other layout is likely to be {self.options.gain:g} % faster "
            f"(chance of each at most {MAX_CHANCE:.0%})"
        )

    def _add(self, search: Search, found: list[Candidate], index: int, trial: Trial) -> None:
        """Add one trial to a search; out of memory also rules out layouts that need more of it."""
        search.add(index, trial.median if trial.status == "ok" else None)
        if trial.status == "oom":
            reason = f"needs more memory than {trial.label}, which ran out of it"
            for other in search.untried:
                if search_space.needs_more_memory(found[other], found[index]):
                    search.add(other, None)
                    self.rejected.append(Rejected({"layout": found[other].label}, reason))
        ran = [t for i in search.measured for t in self.store.of(found[i].key)]
        search.noise = trials.noise(ran)

    def _trial(self, candidate: Candidate, tag: str = "") -> Trial:
        """Run one trial, store it, show it. A layout without one is rehearsed before, and not run
        if that rejects it. BudgetSpent if the budget has no room for it, or ends before it does.
        """
        number = len(self.store.trials)
        rehearsed = Outcome()
        if self.rehearser and not self.store.of(candidate.key):
            say(f"rehearsing {candidate.label} on fake GPUs")
            rehearsed = self.rehearser.rehearse(candidate, self._runner(), number)
            say(f"rehearsed {candidate.label} in {rehearsed.text}")
        if rehearsed.finding:
            trial = trials.rejected(candidate, rehearsed.finding, rehearsed.seconds, tag)
        else:
            runner = self._runner()
            trial = trials.run(candidate, runner, number, tag)
            if trial.status == "hang" and runner != self.runner:
                say(f"{candidate.label}: stopped, the budget is spent; not stored")
                raise BudgetSpent
            trial = dataclasses.replace(trial, rehearsal=rehearsed.seconds)
        self.store.add(trial)
        self._print_outcome(trial)
        return trial

    def _print_outcome(self, trial: Trial) -> None:
        """Print a trial of this session in one line."""
        ran = [each for each in self.finished if each.status == "ok"]
        self.finished.append(trial)
        text = f"{trial.status}: {trial.reason}"
        if trial.status == "ok":
            text = (
                f"{trial.median:9.3f} s ({trial.spread:4.0%} spread), "
                f"predicted {trial.predicted:8.3f}, {max(trial.peak_memory) / 1e9:.2f} GB"
            )
            if all(trial.median < each.median for each in ran):
                text += " best so far"
            started = sum(bool(each.command) for each in self.finished)
            text += f"; {self.budget.left(started)}"
        say(f"trial {len(self.finished):3} {trial.label:36} {text}")

    def _runner(self) -> Runner:
        """How a trial is run that ends with the budget at the latest; BudgetSpent."""
        if self.budget.spent(self.store.trials):
            raise BudgetSpent
        limit = min(self.runner.time_limit, self.budget.seconds_left())
        return dataclasses.replace(self.runner, time_limit=limit)


def write_report(result: SearchResult, out: Path) -> list[str]:
    """Write table.md, results.csv and layouts.svg into `out`; the lines to print about them."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text("\n".join(result_tables.markdown(result)) + "\n")
    (out / "results.csv").write_text(result_tables.csv_text(result))
    result_tables.draw(result, str(out / "layouts.svg"))
    ranked = result.ranked
    lines = [*map(result_tables.top_line, ranked[:TOP]), "", *result_tables.summary(result)]
    if ranked:
        command = shlex.join(result.command(ranked[0].candidate))
        lines += ["", "to train on the fastest:", f"    {command}"]
    return [*lines, "", f"written: {out}/table.md, {out}/results.csv, {out}/layouts.svg"]
