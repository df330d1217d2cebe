"""Ten published ideas and a wrong version of each: does a reader of `--json` alone keep the right?

    python benchmarks/faults/ideas.py --keep RESULTS.jsonl [--minutes 30]

It does what AGENTS.md tells a program to do: copy the code, apply the patch of examples/ideas, call
`check.py --json` with the options that the idea is about, keep the change if `status` is 0 and drop
it else. It reads no line that is for people. A wrong version is made by one replacement of
examples/ideas/wrong.toml. Results are kept in RESULTS.jsonl, so that the list can be run in parts;
each part writes results/ideas.md.
"""

import json
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # the project's own modules

from base.errors import UserError, exit_with
from benchmarks.faults.check_faults import copy_of_code
from benchmarks.results_file import head, main_in_parts

IDEAS = ROOT / "examples" / "ideas"
WRONG = tomllib.loads((IDEAS / "wrong.toml").read_text())
RESULTS = ROOT / "benchmarks" / "results" / "ideas.md"
CHECK_MINUTES = 1  # after which check.py begins no layout
LIMIT = 900.0  # seconds of a call


def asked(name: str) -> list[dict[str, Any]]:
    """Return the row of an idea, `NAME`, or of its wrong version, `NAME wrong`."""
    idea, _, is_wrong = name.partition(" ")
    case = WRONG[idea]
    with tempfile.TemporaryDirectory(prefix="trine-idea-") as folder:
        copy_of_code(Path(folder))
        patch = ["git", "apply", str(IDEAS / f"{idea}.patch")]
        done = subprocess.run(patch, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"examples/ideas/{idea}.patch does not apply: {done.stderr.strip()}")
        if is_wrong:
            file = Path(folder, case["file"])
            text = file.read_text()
            if text.count(case["right"]) != 1:
                raise UserError(f"{case['file']} with {idea} does not have {case['right']!r} once")
            file.write_text(text.replace(case["right"], case["wrong"]))
        words = [sys.executable, "check.py", "--json", "--minutes", str(CHECK_MINUTES)]
        words += case.get("options", "").split()
        began = time.monotonic()
        call = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    answer = json.loads(call.stdout)
    ran = [layout["outcome"] for layout in answer.get("layouts", [])]
    first = answer["differences"][0] if answer.get("differences") else {}
    return [
        {
            "name": name,
            "kept": answer["status"] == 0,
            "status": answer["status"],
            "layouts": len(ran),
            "equal": ran.count("equal"),
            "where": first.get("where"),
            "text": first.get("text") or answer.get("error"),
            "seconds": round(time.monotonic() - began),
        }
    ]


def report(rows: list[dict[str, Any]]) -> str:
    """Return the results file of the rows so far."""
    row_of = {row["name"]: row for row in rows}
    right = [row_of[name] for name in WRONG if name in row_of]
    wrong = [row_of[f"{name} wrong"] for name in WRONG if f"{name} wrong" in row_of]
    kept, dropped = sum(row["kept"] for row in right), sum(not row["kept"] for row in wrong)
    lines = head(
        "Ten ideas and their wrong versions, by `--json` alone",
        "python benchmarks/faults/ideas.py --keep RESULTS.jsonl",
        "Other programs used the machine too.",
    )
    lines += [
        f"Kept: {kept} of {len(right)} right ones. Dropped: {dropped} of {len(wrong)} wrong ones. A"
        " call is `check.py --json --minutes 1` with the idea's options, or 2 where a row has"
        " more than 130 s; what it"
        " reads of the answer is `status`. The wrong versions were written before the calls, by the"
        " author of the patches, who knows check.py.",
        "",
        "| idea | right: kept, layouts equal | wrong version | dropped, layouts equal | where | "
        "first difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, case in WRONG.items():
        a, b = row_of.get(name), row_of.get(f"{name} wrong")
        cells = [name, _cell(a, True), case["why"], _cell(b, False)]
        cells += [str(b["where"] or ""), str(b["text"] or "")] if b else ["", ""]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _cell(row: dict[str, Any] | None, is_right: bool) -> str:
    """Return what came of a call: whether it was as it should be, and of how many layouts."""
    if row is None:
        return "not run"
    if row["status"] > 1:
        return f"no verdict, status {row['status']}: no layout in {row['seconds']} s"
    verdict = "yes" if row["kept"] == is_right else f"**no**, status {row['status']}"
    return f"{verdict}, {row['equal']} of {row['layouts']}, {row['seconds']} s"


if __name__ == "__main__":
    try:
        names = [f"{name}{end}" for name in WRONG for end in ("", " wrong")]
        main_in_parts(__doc__, RESULTS, names, asked, report)
    except UserError as error:
        exit_with(error)
