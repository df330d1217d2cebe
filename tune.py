"""Measured search for the fastest layout: starts train.py for a few steps at a time.

    python tune.py --model 176b --gpu a100-80 --ranks 384 --launch "srun -n {ranks}" \\
        --global-batch-size 2048 --budget 120m
    python tune.py --config run.toml --gpu cpu --calibration runs/allreduce/calibration.toml \\
        --ranks 8 --launch "mpirun -n {ranks}" --budget 12 --try zero=0,1
    python tune.py ... --sweep micro-batch            one axis, every value
    python tune.py ... --max-params | --min-ranks     by bisection with real runs
    python tune.py --replay rows.csv --tables tables.csv

Flags that describe model, layout and training are those of train.py; a layout flag that is given
is held fixed. Every trial is kept at once in --out/trials.jsonl: stop at any moment, start again
with the same --out, and it goes on. At the end --out has table.md, results.csv and report.html.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from pathlib import Path

from config import command_line
from config.messages import Parser, UserError, exit_with
from config.schema import Config, Layout
from planner import hardware
from planner.layouts import Rejected
from tuner import replay, report, result_tables, search_space, sweeps, trials
from tuner.progress import View
from tuner.search import NOISE, Point, Search, features
from tuner.search_space import Candidate
from tuner.trials import Runner, Store, Trial


def main(arguments: list[str]) -> None:
    """Do what the command line asks; a mistake is one sentence and exit status 2."""
    try:
        own, rest = parser().parse_known_args(arguments)
        if own.replay:
            print("\n".join(replay.report(own.replay, own.tables, own.gain / 100)))
            return
        session = Session(own, rest)
        session.run()
    except UserError as mistake:
        exit_with(mistake)


def parser() -> argparse.ArgumentParser:
    """The tuner's own flags; all others are train.py's."""
    found = Parser(
        prog="tune.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Model, layout, training and data flags: see `python train.py --help`.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--launch", metavar="WORDS", help="what starts the ranks, such as 'srun -n {ranks}'")
    add("--ranks", type=int, help="ranks to use, all of them in every layout")
    add("--gpu", metavar="NAME", help="machine: " + ", ".join(hardware.names()))
    add("--calibration", metavar="FILE", help="measured rates, as benchmarks/allreduce.py writes")
    add("--models", nargs="+", metavar="PRESET", default=[], help="several shapes to choose from")
    add("--tokens", type=float, help="tokens to train on: says how many days that takes")
    add("--try", action="append", default=[], dest="tried", metavar="AXIS=V,V",
        help="values of tp, pp, an axis of the layout, or of what is swept")  # fmt: skip
    add("--budget", metavar="N|Nm", help="stop after N trials or N minutes (default: when decided)")
    add("--all", action="store_true", help="measure every layout, whatever is expected of it")
    add("--timed", type=int, default=3, help="timed steps a trial, after 2 that warm up")
    add("--time-limit", type=float, default=600.0, metavar="SECONDS", help="of one trial")
    add("--gain", type=float, default=1.0, help="per cent a layout must promise to be measured")
    add("--reference-every", type=int, default=8, metavar="N",
        help="measure the first layout again every N trials, 0: never")  # fmt: skip
    add("--sweep", choices=sweeps.SWEEPS, metavar="|".join(sweeps.SWEEPS))
    add("--max-params", action="store_true", help="the largest model that trains here")
    add("--min-ranks", action="store_true", help="the fewest ranks that hold the model")
    add("--replay", metavar="ROWS.csv", help="search among measured rows in place of runs")
    add("--tables", metavar="TABLES.csv", help="with --replay: which rows are a choice")
    return found


class Session:
    """One use of the tuner: what is asked, what is measured, what is written."""

    def __init__(self, own: argparse.Namespace, rest: list[str]):
        """Read the whole command line; raises UserError."""
        for name in ("launch", "ranks"):
            if not getattr(own, name):
                raise UserError(f"give --{name}: see python tune.py --help")
        if own.ranks < 1 or own.timed < 1 or own.time_limit <= 0:
            raise UserError("--ranks, --timed and --time-limit are above 0")
        self.own, self.rest = own, rest
        self.config = command_line.parse(rest)
        self.machine = hardware.load(own.gpu or "a100-80", own.calibration)
        self.tried = _axes(own.tried)
        out = Path(self.config.run.out)
        self.out = Path("runs/tune") if out == Path("runs/latest") else out
        self.runner = Runner(own.launch, self.out / "trials", own.timed, own.time_limit)
        self.runner.start(own.ranks)
        self.store = Store(self.out / "trials.jsonl")
        self.budget = Budget(own.budget)
        self.rejected: list[Rejected] = []
        self.wanted: dict[str, Candidate] = {}
        self.ending = "every layout has been measured"
        self.view = View(own.ranks, self.budget.left)

    @property
    def given(self) -> dict[str, list]:
        """The layout axes that are held, each with its values."""
        names = {f.name for f in dataclasses.fields(Layout)} - {"dp", "pad_vocab_multiple"}
        flags = {w[2:].split("=")[0].replace("-", "_") for w in self.rest if w.startswith("--")}
        flags |= {name.removeprefix("no_") for name in flags}
        held = {name: [getattr(self.config.layout, name)] for name in names & flags}
        return held | {name: v for name, v in self.tried.items() if name in names}

    def run(self) -> None:
        """Measure what is asked, then write the report, also after Ctrl-C."""
        interrupted = False
        try:
            with self.view:
                self._measure()
        except KeyboardInterrupt:
            interrupted = True
            self.ending = "stopped by Ctrl-C; the same command goes on from here"
        print(f"\n{self.ending}")
        written = report.write(self.result(), self.out)
        print("\n".join(written))
        if interrupted:
            sys.exit(130)

    def result(self) -> result_tables.Result:
        """All that a report says."""
        own = [t for t in self.store.trials if t.key in self.wanted]
        return result_tables.Result(
            trials=own,
            candidates=list(self.wanted.values()),
            rejected=self.rejected,
            machine=self.machine,
            ending=self.ending,
            drift=drift(own),
            command=self.command,
            tokens=self.own.tokens,
            title=self._title(),
        )

    def command(self, candidate: Candidate) -> list[str]:
        """What to type to train on that layout, into a folder beside the trials'."""
        config = candidate.config
        run = dataclasses.replace(config.run, out=str(self.out / "train"))
        training = config.training
        if training.steps is None and training.train_samples is None:
            steps = 1000
            if self.own.tokens:
                tokens = training.global_batch_size * config.model.seq_length
                steps = math.ceil(self.own.tokens / tokens)
            training = dataclasses.replace(training, steps=steps)
        config = dataclasses.replace(config, training=training, run=run)
        *start, _ = self.runner.start(candidate.ranks)
        names = ["python" if word == sys.executable else word for word in start]
        return [*names, "train.py", *search_space.words(config)]

    def _title(self) -> str:
        own = self.own
        what = own.sweep and f"sweep of {own.sweep}"
        what = (
            what or (own.max_params and "the largest model") or (own.min_ranks and "fewest ranks")
        )
        return f"{what or 'the fastest layout'} on {own.ranks} ranks"

    # -- what is measured -------------------------------------------------------------------

    def _measure(self) -> None:
        if self.own.sweep:
            values = self.tried.get(self.own.sweep.replace("-", "_"), [])
            runs, self.rejected = sweeps.sweep(
                self.own.sweep, self.config, self.machine, self.own.ranks, self.given, values
            )
            self._every(runs, "sweep")
        elif self.own.max_params or self.own.min_ranks:
            self._bound()
        else:
            for config in self._models():
                self._search(config)

    def _models(self) -> list[Config]:
        """The run asked for, or one for each of --models."""
        words = [command_line.parse(["--model", name, *self.rest]) for name in self.own.models]
        return words or [self.config]

    def _search(self, config: Config) -> None:
        found, rejected = search_space.candidates(config, self.machine, self.own.ranks, self.given)
        self.rejected += rejected
        for entry in rejected:
            self.view.say("rejected " + result_tables.rejection(entry))
        if not found:
            raise UserError(f"no layout can run on {self.own.ranks} ranks: see the reasons above")
        self.view.say(f"{len(found)} layouts can run, {len(rejected)} cannot")
        if self.own.all:
            self._every(found, "all")
            return
        search, fresh = Search([point(c) for c in found], self.own.gain / 100), 0
        self.wanted |= {c.key: c for c in found}
        for index, candidate in enumerate(found):
            for trial in self.store.of(candidate.key):
                self._tell(search, found, index, trial)
        while (index := search.next()) is not None:
            if self.budget.spent(self.store.trials):
                self.ending = self.budget.sentence
                return
            self._tell(search, found, index, self._trial(found[index]))
            fresh += 1
            if self.own.reference_every and fresh % self.own.reference_every == 0:
                self._reference(search, found)
        self._confirm(search, found)
        self.ending = (
            f"no other layout is likely to be {self.own.gain:g} % faster "
            f"(chance of each at most {search.doubt:.0%})"
        )

    def _confirm(self, search: Search, found: list[Candidate]) -> None:
        """Measure once more what noise alone may have put first, or second."""
        for index in search.contenders():
            if not self.budget.spent(self.store.trials):
                self._tell(search, found, index, self._trial(found[index], "confirm"))

    def _tell(self, search: Search, found: list[Candidate], index: int, trial: Trial) -> None:
        """What one trial says about its layout, and about those that need more memory."""
        search.tell(index, trial.median if trial.status == "ok" else None)
        if trial.status == "oom":
            for other, candidate in enumerate(found):
                if other != index and other in search.left and needs_more(candidate, found[index]):
                    search.tell(other, None)
                    reason = f"needs more memory than {trial.label}, which ran out of it"
                    self.rejected.append(Rejected({"layout": candidate.label}, reason))
        search.noise = noise([t for i in search.told for t in self.store.of(found[i].key)])

    def _reference(self, search: Search, found: list[Candidate]) -> None:
        """Measure the first layout that ran once more, to see whether the machine has changed."""
        index = next((i for i in search.told), None)
        if index is not None and not self.budget.spent(self.store.trials):
            self._tell(search, found, index, self._trial(found[index], "reference"))

    def _every(self, runs: list[Candidate], tag: str) -> None:
        """Measure all that have no trial yet, in order, and the first one again now and then."""
        self.wanted |= {c.key: c for c in runs}
        for number, candidate in enumerate(runs):
            if self.store.of(candidate.key):
                continue
            if self.budget.spent(self.store.trials):
                self.ending = self.budget.sentence
                return
            self._trial(candidate, tag)
            every = self.own.reference_every
            if tag == "all" and every and number % every == every - 1:
                self._trial(runs[0], "reference")

    def _bound(self) -> None:
        def attempt(candidate: Candidate) -> bool:
            self.wanted[candidate.key] = candidate
            known = self.store.of(candidate.key)
            return (known[-1] if known else self._trial(candidate)).status == "ok"

        ask = sweeps.largest if self.own.max_params else sweeps.fewest
        bound = ask(self.config, self.machine, self.own.ranks, self.given, attempt)
        self.ending = result_tables.bound(bound.best, bound.beyond)

    def _trial(self, candidate: Candidate, tag: str = "") -> Trial:
        """Run, store, show."""
        number = len(self.store.trials)
        self.view.starts(candidate, number)
        trial = trials.run(candidate, self.runner, number, tag)
        self.store.add(trial)
        self.view.shows(trial)
        return trial


def point(candidate: Candidate) -> Point:
    """A candidate as the search sees it."""
    return Point(candidate.label, candidate.prediction.seconds, features(candidate.config))


def needs_more(candidate: Candidate, than: Candidate) -> bool:
    """Whether a layout surely takes no less memory: the same, with more kept or larger pieces."""
    a, b = candidate.config.layout, than.config.layout
    kept = ("full", "selective", "none")
    same = dataclasses.replace(a, micro_batch_size=b.micro_batch_size, recompute=b.recompute) == b
    more = kept.index(a.recompute) >= kept.index(b.recompute)
    return same and more and a.micro_batch_size >= b.micro_batch_size


def noise(measured: list[Trial]) -> float:
    """Standard deviation of the logarithm of one trial's median.

    From the trials of layouts that were repeated; while there are few, from the steps of each.
    """
    ran = [t for t in measured if t.status == "ok"]
    groups: dict[str, list[float]] = {}
    for trial in ran:
        groups.setdefault(trial.key, []).append(math.log(trial.median))
    pairs = [(len(g) - 1, statistics.variance(g)) for g in groups.values() if len(g) > 1]
    free = sum(count for count, _ in pairs)
    # Of three steps, the range is some 1.7 deviations, and their median varies 0.67 as much.
    steps = statistics.median([0.4 * t.spread for t in ran]) if ran else NOISE
    prior = 3  # as many repeats is the guess from the steps worth
    total = prior * steps**2 + sum(count * variance for count, variance in pairs)
    return min(0.3, max(NOISE, math.sqrt(total / (prior + free))))


def drift(measured: list[Trial]) -> list[float]:
    """Of the layout that was repeated most, each trial's seconds over its first's."""
    groups: dict[str, list[float]] = {}
    for trial in measured:
        if trial.status == "ok":
            groups.setdefault(trial.key, []).append(trial.median)
    longest = max(groups.values(), key=len, default=[])
    return [seconds / longest[0] for seconds in longest] if len(longest) > 1 else []


class Budget:
    """How much may be spent in this session: trials, or minutes."""

    def __init__(self, text: str | None):
        """`12` trials, `90m` minutes, or None; UserError for anything else."""
        self.began, self.first = time.monotonic(), None
        self.minutes = self.trials = math.inf
        try:
            if text and text.endswith("m"):
                self.minutes = float(text[:-1])
            elif text:
                self.trials = int(text)
        except ValueError:
            raise UserError(f"--budget is trials or minutes, as 12 or 90m, not {text!r}") from None
        self.sentence = f"the budget of {text} is spent; a larger one goes on from here"

    def spent(self, stored: list[Trial]) -> bool:
        """Whether another trial, as long as the earlier ones, would be too much."""
        if self.first is None:
            self.first = len(stored)
        own = stored[self.first :]
        typical = statistics.median([t.wall for t in own]) if own else 0.0
        if len(own) >= self.trials:
            return True
        return self.elapsed() + typical > 60 * self.minutes

    def elapsed(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.began

    def left(self, done: int) -> str:
        """What is left, for the live view."""
        if self.minutes < math.inf:
            return f"{max(0.0, self.minutes - self.elapsed() / 60):.0f} minutes left"
        if self.trials < math.inf:
            each = self.elapsed() / done / 60 if done else 0.0
            rest = max(0, self.trials - done)
            return f"at most {rest} trials left" + (f", {rest * each:.0f} minutes" if done else "")
        return f"{self.elapsed() / 60:.0f} minutes so far"


def _axes(texts: list[str]) -> dict[str, list]:
    """The values of each --try AXIS=V,V; UserError for an unknown axis or value."""
    found: dict[str, list] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        known = ("tp", "pp", *search_space.INNER, *search_space.OUTER)
        swept = [s.replace("-", "_") for s in sweeps.SWEEPS]
        if name not in (*known, *swept) or not values:
            raise UserError(
                f"--try takes AXIS=V,V with AXIS one of {', '.join(known)}, not {text!r}"
            )
        found[name] = [_value(name, value) for value in values.split(",")]
    return found


def _value(name: str, text: str):
    """A value of an axis, as config.py has it."""
    if text in ("true", "false"):
        return text == "true"
    value = int(text) if text.isdigit() else text
    field = {f.name: f for f in dataclasses.fields(Layout)}.get(name)
    if field and field.metadata["choices"] and value not in field.metadata["choices"]:
        choices = ", ".join(map(str, field.metadata["choices"]))
        raise UserError(f"--try {name}: {text} is not one of {choices}")
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
