"""Shows that each mend has a test that fails without it.

    python benchmarks/undo_mends.py --verdicts VERDICTS.jsonl [--minutes 5] [--only WORD]
    python benchmarks/undo_mends.py --verdicts VERDICTS.jsonl --minutes 0 --table FILE.md

Each file of benchmarks/data/mends/ lists mends: a defect, the tests that would have seen it, and
the text that stood in the code before; `environment` are variables that make a long test short,
such as MISTAKES for tests/test_mistakes.py. For each mend this program copies the tree, puts the
old text back, runs the tests, and demands that each of them fails. A test that has not ended after
--seconds has failed, and its processes are killed. An error while the tests are collected is no
failure: then the undoing is wrong, and the row says so. A defect that was left has a reason.

The list takes long, so it can be run in parts: with --minutes no mend is begun after that time,
and VERDICTS.jsonl gets a row after each mend. A mend whose tests were seen to fail is not tried
again while its entry is the same; mends that were never tried come before those that were tried
without success. benchmarks/results/mends.md is written with --table.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil
from kept import Kept, machine

ROOT = Path(__file__).resolve().parent.parent
MENDS = ROOT / "benchmarks" / "data" / "mends"
SHOWN = "every test fails without it"
LEFT = "left"
NOT_TRIED = "not tried yet"


@dataclass(frozen=True)
class Mend:
    """One defect: what was mended and how to undo it, or why it was left."""

    defect: str
    what: str
    subject: str = ""
    tests: tuple[str, ...] = ()
    undo: tuple[dict[str, str], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def digest(self) -> str:
        """A number of the whole entry, by which a verdict on it is found again."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass
class Outcome:
    """The verdict on one mend: tests that passed although it was undone, tests that never ended."""

    mend: Mend
    verdict: str
    passed: list[str] = field(default_factory=list)
    endless: list[str] = field(default_factory=list)
    commit: str = ""
    seconds: float = 0.0


def read_mends(folder: Path) -> list[Mend]:
    """All mends of all files. Raises ValueError for one without tests, undoing and reason."""
    mends = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mend", []):
            mend = Mend(
                defect=entry["defect"],
                what=entry["what"],
                subject=entry.get("subject", ""),
                tests=tuple(entry.get("tests", ())),
                undo=tuple(entry.get("undo", ())),
                environment=entry.get("environment", {}),
                why=entry.get("why", ""),
            )
            if not mend.why and not (mend.tests and mend.undo):
                raise ValueError(
                    f"{path.name}: {mend.defect} has no tests, no undoing and no reason"
                )
            mends.append(mend)
    return mends


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks, as they are in the work tree, and link the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0"):
        source = ROOT / name
        if not name or not source.is_file():
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name)
    (target / ".venv").symlink_to((ROOT / ".venv").resolve())


def undo(mend: Mend, tree: Path) -> str:
    """Put the text of before the mend into the copied tree; the reason if that is not possible."""
    for change in mend.undo:
        path = tree / change["file"]
        text = path.read_text()
        occurrences = text.count(change["text"])
        if occurrences != 1:
            return f"{change['file']} has the mended text {occurrences} times, not once"
        path.write_text(text.replace(change["text"], change["by"]))
    return ""


def end_all(program: subprocess.Popen) -> None:
    """Kill a program with all that it has started, also in other process groups."""
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(program.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    program.wait()


def run_tests(
    tests: tuple[str, ...], tree: Path, seconds: float, environment: dict[str, str]
) -> dict[str, str]:
    """Run test cases; return each outcome by its id: passed, failed, error, skipped or endless.

    environment: variables for the tests. Each test is run alone if all together do not end, so that
    the endless ones are known.
    """
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    variables = {**os.environ, **environment}
    program = subprocess.Popen(command, cwd=tree, env=variables, start_new_session=True, **quiet)
    try:
        program.wait(seconds)
    except subprocess.TimeoutExpired:
        end_all(program)
        if len(tests) == 1:
            return {tests[0]: "endless"}
        outcomes = {}
        for test in tests:
            outcomes.update(run_tests((test,), tree, seconds, environment))
        return outcomes
    return read_report(report) if report.exists() else {}


def read_report(report: Path) -> dict[str, str]:
    """The outcome of each test case in a report of pytest."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        outcome = "passed"
        for tag, meaning in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if case.find(tag) is not None:
                outcome = meaning
        outcomes[f"{path}::{case.get('name')}"] = outcome
    return outcomes


def outcomes_of(test: str, outcomes: dict[str, str]) -> list[str]:
    """The outcomes of a test; of all its cases if it is parametrised and no case is named."""
    exact = outcomes.get(test)
    if exact is not None:
        return [exact]
    return [outcome for name, outcome in outcomes.items() if name.startswith(f"{test}[")]


def try_without(mend: Mend, seconds: float) -> Outcome:
    """Undo one mend in a copy of the tree and run its tests; seconds: the limit of their run."""
    if mend.why:
        return Outcome(mend, LEFT)
    with tempfile.TemporaryDirectory(prefix="undone-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder)
        copy_tree(tree)
        problem = undo(mend, tree)
        if problem:
            return Outcome(mend, problem)
        outcomes = run_tests(mend.tests, tree, seconds, mend.environment)
    passed = []
    endless = []
    for test in mend.tests:
        results = outcomes_of(test, outcomes)
        if not results or set(results) <= {"error", "skipped"}:
            return Outcome(mend, f"{test} did not run")
        if "endless" in results:
            endless.append(test)
        elif "failed" not in results:
            passed.append(test)
    if passed:
        return Outcome(mend, "a test passes without the mend", passed, endless)
    return Outcome(mend, SHOWN, passed, endless)


def timed(mend: Mend, seconds: float, commit: str) -> Outcome:
    """`try_without`, with what it took and the commit of the tree."""
    began = time.monotonic()
    outcome = try_without(mend, seconds)
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.commit = commit
    return outcome


def read_verdicts(keep: Kept, mends: list[Mend]) -> dict[str, Outcome]:
    """The last verdict on each mend whose entry has not changed since, by the entry's digest."""
    by_digest = {mend.digest: mend for mend in mends}
    verdicts = {}
    for row in keep.rows():
        mend = by_digest.get(row.pop("digest"))
        if mend is not None:
            row.pop("defect")
            verdicts[mend.digest] = Outcome(mend, **row)
    return verdicts


def row_of(outcome: Outcome) -> dict:
    """The row of the file of verdicts."""
    row = {"digest": outcome.mend.digest, "defect": outcome.mend.defect}
    return row | {key: value for key, value in vars(outcome).items() if key != "mend"}


def still_to_try(mends: list[Mend], verdicts: dict[str, Outcome]) -> list[Mend]:
    """Mends without a verdict, then those whose tests did not show them at the last try."""
    new = [mend for mend in mends if mend.digest not in verdicts]
    settled = (SHOWN, LEFT)
    again = [mend for mend in mends if mend not in new]
    return new + [mend for mend in again if verdicts[mend.digest].verdict not in settled]


def sort_key(outcome: Outcome) -> list[tuple[int, str]]:
    """Sort `attack 9` before `attack 10`."""
    words = outcome.mend.defect.replace(".", " ").split()
    return [(int(word), "") if word.isdigit() else (0, word) for word in words]


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table in Markdown."""
    lines = ["| defect | mended | commit, tests | undone |", "|---|---|---|---|"]
    for outcome in sorted(outcomes, key=sort_key):
        mend = outcome.mend
        if mend.why:
            lines.append(f"| {mend.defect} | {mend.what} | not mended: {mend.why} | |")
            continue
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in mend.tests)
        verdict = outcome.verdict
        if outcome.passed:
            verdict += ": " + ", ".join(outcome.passed)
        if outcome.endless:
            verdict += "; without an end: " + ", ".join(outcome.endless)
        lines.append(f"| {mend.defect} | {mend.what} | {mend.subject}; {tests} | {verdict} |")
    return "\n".join(lines) + "\n"


def page(outcomes: list[Outcome], seconds: float) -> str:
    """The results file: what was run where, the counts, and the table."""
    shown = sum(outcome.verdict == SHOWN for outcome in outcomes)
    left = sum(outcome.verdict == LEFT for outcome in outcomes)
    untried = sum(outcome.verdict == NOT_TRIED for outcome in outcomes)
    endless = sum(bool(outcome.endless) for outcome in outcomes)
    commits = ", ".join(sorted({outcome.commit for outcome in outcomes if outcome.commit}))
    hours = sum(outcome.seconds for outcome in outcomes) / 3600
    other = len(outcomes) - shown - left - untried
    lines = [
        "# Each mend undone: do its tests fail?",
        "",
        f"    python benchmarks/undo_mends.py --verdicts FILE.jsonl --seconds {seconds:g}",
        "",
        f"Machine: {machine()}, shared.",
        f"The trees were those of {commits}.",
        "",
        f"{len(outcomes)} entries of benchmarks/data/mends: with {shown} mends undone every one",
        f"of their tests failed, {left} defects were left with a reason, {other} are not shown by",
        f"their tests, {untried} were not tried. Of the {shown}, {endless} have a test that did",
        f"not end within {seconds:g} s, which counts as failed. The tests took {hours:.1f} hours,",
        "two mends at a time. That the same tests pass with the mends is what the suite shows.",
        "",
        table(outcomes),
    ]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only mends whose defect contains this word")
    parser.add_argument("--jobs", type=int, default=2, help="mends that are tried at a time")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit for a mend's tests")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mend after that")
    parser.add_argument("--verdicts", type=Path, help="read and append verdicts, a row for each")
    parser.add_argument("--table", type=Path, help="write the results to this file")
    return parser.parse_args()


def main() -> int:
    """Try the mends that have no verdict yet; return 1 if some remain, or are not shown."""
    options = arguments()
    mends = [mend for mend in read_mends(MENDS) if options.only in mend.defect]
    keep = Kept(options.verdicts, options.minutes)
    verdicts = read_verdicts(keep, mends)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()

    def settle(mend: Mend) -> list[dict]:
        """Try one mend, and record its verdict."""
        outcome = timed(mend, options.seconds, commit)
        verdicts[mend.digest] = outcome
        words = [outcome.verdict, *outcome.passed]
        print(f"{mend.defect}: {' '.join(words)} ({outcome.seconds} s)", flush=True)
        return [row_of(outcome)]

    keep.run(settle, still_to_try(mends, verdicts), options.jobs)
    outcomes = [verdicts.get(mend.digest, Outcome(mend, NOT_TRIED)) for mend in mends]
    if options.table:
        options.table.write_text(page(outcomes, options.seconds))
    wrong = [o for o in outcomes if o.verdict not in (LEFT, SHOWN)]
    print(f"{len(outcomes)} defects, {len(wrong)} whose tests do not show it or were not run")
    return min(1, len(wrong))


if __name__ == "__main__":
    sys.exit(main())
