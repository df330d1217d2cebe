"""Shows that each mend has a test that fails without it.

    python benchmarks/undo_mends.py --keep VERDICTS.jsonl [--minutes 5] [--only WORD]
    python benchmarks/undo_mends.py --keep VERDICTS.jsonl --minutes 0 --table FILE.md

Each file of benchmarks/data/mends/ lists mends: a defect, the tests that would have seen it, and
the text that stood in the code before; `environment` are variables that make a long test short,
such as MISTAKES for tests/test_mistakes.py. For each mend this program unpacks HEAD, puts the old
text back, runs the tests, and demands that each of them fails. A test that has not ended after
--seconds has failed, and its processes are killed. An error while the tests are collected is no
failure: then the undoing is wrong, and the row says so. A defect that was left has a reason, `why`.

The list takes long, so it can be run in parts: VERDICTS.jsonl gets a row after each mend. A mend
whose tests were seen to fail is not tried again while its entry is the same; mends that were never
tried come before those that were tried without success. benchmarks/results/mends.md is written with
--table.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import kept
from limited import run_limited

ROOT = Path(__file__).resolve().parent.parent
MENDS = ROOT / "benchmarks" / "data" / "mends"
SHOWN = "every test fails without it"
LEFT = "left"
NOT_TRIED = "not tried yet"
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
Mend = dict[str, Any]  # an entry of the list; digest: of the entry, by which a verdict is found


def read_mends(folder: Path) -> list[Mend]:
    """All mends of all files. Raises ValueError for one without tests, undoing and reason."""
    mends = []
    for path in sorted(folder.glob("*.toml")):
        for mend in tomllib.loads(path.read_text())["mend"]:
            if not (mend.get("why") or (mend.get("tests") and mend.get("undo"))):
                raise ValueError(
                    f"{path.name}: {mend['defect']} has no tests, no undoing and no reason"
                )
            digest = hashlib.sha256(json.dumps(mend, sort_keys=True).encode()).hexdigest()
            mends.append(mend | {"digest": digest[:16]})
    return mends


def undo(mend: Mend, tree: Path) -> str:
    """Put the text of before the mend into a copy of the tree; the reason if that is not possible.

    The copy is that of the last commit.
    """
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x"], cwd=tree, input=packed.stdout, check=True)
    (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
    for change in mend["undo"]:
        path = tree / change["file"]
        text = path.read_text()
        occurrences = text.count(change["text"])
        if occurrences != 1:
            return f"{change['file']} has the mended text {occurrences} times, not once"
        path.write_text(text.replace(change["text"], change["by"]))
    return ""


def run_tests(tests: list[str], tree: Path, seconds: float, environment: dict) -> dict[str, str]:
    """Run test cases; return each outcome by its id: passed, failed, error, skipped or endless.

    environment: variables for the tests. Each test is run alone if all together do not end, so that
    the endless ones are known.
    """
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
    status = run_limited(command, seconds, cwd=tree, env={**os.environ, **environment}, **QUIET)
    if status is not None:
        return read_report(report) if report.exists() else {}
    if len(tests) == 1:
        return {tests[0]: "endless"}
    outcomes = {}
    for test in tests:
        outcomes.update(run_tests([test], tree, seconds, environment))
    return outcomes


def read_report(report: Path) -> dict[str, str]:
    """The outcome of each test case in a report of pytest."""
    meanings = {"failure": "failed", "error": "error", "skipped": "skipped"}
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        found = [meaning for tag, meaning in meanings.items() if case.find(tag) is not None]
        outcomes[f"{path}::{case.get('name')}"] = found[-1] if found else "passed"
    return outcomes


def verdict_on(mend: Mend, seconds: float) -> dict:
    """Undo one mend in a copy of the tree and run its tests; seconds: the limit of their run.

    passed: tests that passed although it was undone; endless: those that did not end.
    """
    found: dict = {"verdict": SHOWN, "passed": [], "endless": []}
    if mend.get("why"):
        return found | {"verdict": LEFT}
    with tempfile.TemporaryDirectory(prefix="undone-", ignore_cleanup_errors=True) as folder:
        problem = undo(mend, Path(folder))
        if problem:
            return found | {"verdict": problem}
        environment = mend.get("environment", {})
        outcomes = run_tests(mend["tests"], Path(folder), seconds, environment)
    for test in mend["tests"]:
        # All cases of a test that is parametrised count, unless one is named.
        results = {outcomes[id] for id in outcomes if id == test or id.startswith(f"{test}[")}
        if results <= {"error", "skipped"}:
            return found | {"verdict": f"{test} did not run"}
        if "endless" in results:
            found["endless"].append(test)
        elif "failed" not in results:
            found["passed"].append(test)
            found["verdict"] = "a test passes without the mend"
    return found


def sort_key(mend: Mend) -> list[tuple[int, str]]:
    """Sort `attack 9` before `attack 10`."""
    words = mend["defect"].replace(".", " ").split()
    return [(int(word), "") if word.isdigit() else (0, word) for word in words]


def page(mends: list[Mend], rows: dict[str, dict], seconds: float) -> str:
    """The results file: what was run where, the counts, and the table."""
    verdicts = [rows[mend["digest"]]["verdict"] for mend in mends]
    shown, left, untried = (verdicts.count(verdict) for verdict in (SHOWN, LEFT, NOT_TRIED))
    endless = sum(bool(row["endless"]) for row in rows.values())
    commits = ", ".join(sorted({row["commit"] for row in rows.values() if "commit" in row}))
    hours = sum(row.get("seconds", 0.0) for row in rows.values()) / 3600
    lines = [
        "# Each mend undone: do its tests fail?",
        "",
        f"    python benchmarks/undo_mends.py --keep FILE.jsonl --seconds {seconds:g}",
        "",
        f"Machine: {kept.machine()}, shared.",
        f"The trees were those of {commits}.",
        "",
        f"{len(mends)} entries of benchmarks/data/mends: with {shown} mends undone every one",
        f"of their tests failed, {left} defects were left with a reason, "
        f"{len(mends) - shown - left - untried} are not shown by",
        f"their tests, {untried} were not tried. Of the {shown}, {endless} have a test that did",
        f"not end within {seconds:g} s, which counts as failed. The tests took {hours:.1f} hours,",
        "two mends at a time. That the same tests pass with the mends is what the suite shows.",
        "",
        "| defect | mended | commit, tests | undone |",
        "|---|---|---|---|",
    ]
    for mend in sorted(mends, key=sort_key):
        begin = f"| {mend['defect']} | {mend['what']} |"
        if mend.get("why"):
            lines.append(f"{begin} not mended: {mend['why']} | |")
            continue
        row = rows[mend["digest"]]
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in mend["tests"])
        passed = ": " + ", ".join(row["passed"]) if row["passed"] else ""
        endless_tests = "; without an end: " + ", ".join(row["endless"]) if row["endless"] else ""
        verdict = f"{row['verdict']}{passed}{endless_tests}"
        lines.append(f"{begin} {mend.get('subject', '')}; {tests} | {verdict} |")
    return "\n".join([*lines, "", ""])


def main() -> int:
    """Try the mends that have no verdict yet; return 1 if some remain, or are not shown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only mends whose defect contains this word")
    parser.add_argument("--jobs", type=int, default=2, help="mends that are tried at a time")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit for a mend's tests")
    parser.add_argument("--table", type=Path, help="write the results to this file")
    kept.add_options(parser, required=False)
    options = parser.parse_args()
    mends = [mend for mend in read_mends(MENDS) if options.only in mend["defect"]]
    keep = kept.from_options(options)
    tried = {row["digest"]: row for row in keep.rows()}
    commit = kept.commit()

    def settle(mend: Mend) -> list[dict]:
        """Try one mend, and record its verdict."""
        began = time.monotonic()
        row = {"digest": mend["digest"], "defect": mend["defect"], "commit": commit}
        row |= verdict_on(mend, options.seconds)
        row["seconds"] = round(time.monotonic() - began, 1)
        tried[mend["digest"]] = row
        words = [row["verdict"], *row["passed"]]
        print(f"{mend['defect']}: {' '.join(words)} ({row['seconds']} s)", flush=True)
        return [row]

    new = [mend for mend in mends if mend["digest"] not in tried]
    again = [mend for mend in mends if mend not in new]
    again = [mend for mend in again if tried[mend["digest"]]["verdict"] not in (SHOWN, LEFT)]
    keep.run(settle, new + again, options.jobs)
    untried = {"verdict": NOT_TRIED, "passed": [], "endless": []}
    rows = {mend["digest"]: tried.get(mend["digest"], untried) for mend in mends}
    if options.table:
        options.table.write_text(page(mends, rows, options.seconds))
    wrong = [row for row in rows.values() if row["verdict"] not in (LEFT, SHOWN)]
    print(f"{len(mends)} defects, {len(wrong)} whose tests do not show it or were not run")
    return min(1, len(wrong))


if __name__ == "__main__":
    sys.exit(main())
