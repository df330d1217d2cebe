"""Shows that each mend has a test that fails without it.

    python benchmarks/undo_mends.py [--only WORD] [--jobs 2] [--table benchmarks/results/mends.md]

Each file of benchmarks/data/mends/ lists mends: a defect, the tests that would have seen it, and
the text that stood in the code before. For each mend this program copies the tree, puts the old
text back, runs the tests, and demands that each of them fails. An error while the tests are
collected is no failure: then the undoing is wrong, and the row says so. A defect that was left has
a reason.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
MENDS = ROOT / "benchmarks" / "data" / "mends"
SECONDS = 900  # for the tests of one mend; a test that waits for ever without its mend has failed


@dataclass(frozen=True)
class Mend:
    """One defect: what was mended and how to undo it, or why it was left."""

    defect: str
    what: str
    subject: str = ""
    tests: tuple[str, ...] = ()
    undo: tuple[dict[str, str], ...] = ()
    why: str = ""


@dataclass
class Outcome:
    """The verdict on one mend, and the tests that passed although the mend was undone."""

    mend: Mend
    verdict: str
    passed: list[str] = field(default_factory=list)


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


def run_tests(tests: tuple[str, ...], tree: Path) -> dict[str, str]:
    """What became of each test case, by its id: passed, failed, error or skipped."""
    report = tree / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
    try:
        subprocess.run(command, cwd=tree, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(tests, "failed")
    if not report.exists():
        return {}
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


def try_without(mend: Mend) -> Outcome:
    """Undo one mend in a copy of the tree and run its tests."""
    if mend.why:
        return Outcome(mend, "left")
    with tempfile.TemporaryDirectory(prefix="undone-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        problem = undo(mend, tree)
        if problem:
            return Outcome(mend, problem)
        outcomes = run_tests(mend.tests, tree)
    passed = []
    for test in mend.tests:
        results = outcomes_of(test, outcomes)
        if not results or set(results) <= {"error", "skipped"}:
            return Outcome(mend, f"{test} did not run")
        if "failed" not in results:
            passed.append(test)
    if passed:
        return Outcome(mend, "a test passes without the mend", passed)
    return Outcome(mend, "every test fails without it")


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
        lines.append(f"| {mend.defect} | {mend.what} | {mend.subject}; {tests} | {verdict} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only mends whose defect contains this word")
    parser.add_argument("--jobs", type=int, default=2, help="mends that are tried at a time")
    parser.add_argument("--table", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    mends = [mend for mend in read_mends(MENDS) if options.only in mend.defect]
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(try_without, mends):
            print(
                f"{outcome.mend.defect}: {outcome.verdict} {' '.join(outcome.passed)}", flush=True
            )
            outcomes.append(outcome)
    text = table(outcomes)
    if options.table:
        options.table.write_text(text)
    wrong = [o for o in outcomes if o.verdict not in ("left", "every test fails without it")]
    print(f"{len(outcomes)} defects, {len(wrong)} whose tests do not show it")
    return min(1, len(wrong))


if __name__ == "__main__":
    sys.exit(main())
