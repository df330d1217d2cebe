"""Plants faults into copies of the code, and asks check.py, called as a user calls it.

    python benchmarks/faults/check_faults.py --keep RESULTS.jsonl [--minutes 60] [--only WORD]
        [--public | --blind | --rule lion | --optimizer muon]

check_faults.toml has the faults: searches and replacements in one file, the options of a run that
uses the faulty code, and what check.py must print. A fault is found if check.py ends with status 1.
Its tensor is named if the line of the first tensor matches, and its operation if the lines of the
operations between that tensor and the last equal one, or of the likely cause, match.

With --public the faults are those of public/faults.toml: errors of other programs that public
threads describe, planted by their kind; with --blind those of blind_faults.toml. With --rule the
copies have an update rule of check_rules.toml too, with --optimizer every run has that one; the
results of these two are for the screen.

Results are kept in RESULTS.jsonl, so that the list can be run in parts. Each part writes a results
file, check.md or with --public public_errors.md, unless --only, --rule or --optimizer is given.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # the project's own modules

from base.cli import Parser
from base.errors import UserError, exit_with
from benchmarks.results_file import add_options, from_options, machine, write

FAULTS = Path(__file__).with_suffix(".toml")
RULES = FAULTS.with_name("check_rules.toml")
PUBLIC = FAULTS.parent / "public" / "faults.toml"
BLIND = FAULTS.with_name("blind_faults.toml")
RESULTS = ROOT / "benchmarks" / "results" / "check.md"
PUBLIC_RESULTS = RESULTS.with_name("public_errors.md")
NEEDLESS = ("tests/", "benchmarks/", "docs/", "scripts/", ".")  # what a run does not read
ABOUT = """Sixty faults were written before the program that is measured, from the code that they
change, by the author of both. Twenty are by somebody who does not know check.py, as a change of
the code with words on what differs first; patterns were made of these words before the first
call.

Of these twenty the first call found 16, with 15 tensors and 14 operations named. Four were not
found: with `--z-loss` check.py ended in an error; no step followed an evaluation, which leaves
behind weights that are wrong; no small tensor was as large as those that several ranks save in
parts; and a bucket of gradients had so few parameters that it never was reduced too early. Mended
were these kinds: the two sums of z-loss (and a head that returns two losses a token, which had no
record), an evaluation between steps, all sizes from which tensors take another path
(tools/checker/thresholds.py), buckets with several parameters. Two operations were named as those
of any matrix: the gradients of a tensor that attention uses, and of experts, have words of their
own now. One pattern did not think of a layout in which the first block is on a middle stage; it was
widened. With that 20 are found, with 20 tensors and 20 operations.

Of the sixty, `with ZeRO gradients are not clipped` was not found at first: no gradient of the
small run was large enough to be clipped. It always is now. Four others ended at a defect of
check.py, by which ZeRO 3 failed; with other seeds on tensor ranks the first tensor named was
head.weight, before parameters had the order of their use.

The rows are of calls of this program in a row, with two faults at a time, after all mends. `the
memory of a micro-batch is used again too early` depends on the moments of reader threads: in the
call before this one its tensor and operation were named. The two faults that show
after a resume alone have no row of these calls; they were found and named in the call before.

Other rules than AdamW, the first eighty of the list (2026-11-30, after all mends): with Lion, which
takes signs and lets rounding grow (`--rule lion`), 79 are found, with 79 tensors and 78 operations
named; the other, `a resumed optimizer counts its updates from 0`, is no fault of a rule without a
bias correction, and check.py calls it equal. With `--optimizer muon` 79 are found, with 79 tensors
and operations; the other, `after an evaluation of the average --zero 3 keeps its gathered weights`,
does not occur, since Muon is refused with ZeRO 3.

Right runs: of 200 drawn ones (check.py --random 10 --layouts 1 --seed 21, 22, ... 40), each in one
random layout, none was accused. On 2026-11-30 56 more, with mixers, with muP and without, had 230
layouts, none of which differs.

A call by itself, on two cores that did nothing else (14:25): `check.py` alone, a dense model, 59
layouts in 81 s, the first verdict after 6 s; a model of 64 experts (`--experts 64
--experts-per-token 8 --balance sequence`), 68 layouts in 122 s, the first verdict after 7 s."""
STRANGERS = "twenty by somebody who does not know check.py"
MISSED = "twelve that a review planted and an earlier check.py did not find"
OF_KINDS = "eleven others of the same kinds: precision, evaluation, resume, decoding, larger groups"
LIMIT = 900.0  # seconds of a call
EDIT = ("find", "replace")


def faults_of(lists: Sequence[Path]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the faults of the last of these lists, and the runs that any of them names."""
    runs: dict[str, str] = {}
    for path in lists:
        table = tomllib.loads(path.read_text())
        runs |= table["runs"]
    return table["fault"], runs


def copy_of_code(folder: Path) -> None:
    """Copy what git has of the code, with changes that are not committed."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if not name.startswith(NEEDLESS) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def edits(fault: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs (find, replace) of a fault."""
    texts = [fault[key] if isinstance(fault[key], list) else [fault[key]] for key in EDIT]
    return list(zip(*texts, strict=True))


def planted(fault: dict[str, Any], root: Path) -> str:
    """Return the text of the fault's file with the fault; UserError unless its texts are there.

    Each must be there once. One that begins with an indentation is of whole lines: in the middle of
    a line it would be another function's, and the fault would end the run.
    """
    text = "\n" + (root / fault["file"]).read_text()
    for find, replace in edits(fault):
        begin = "\n" if find.startswith(" ") else ""
        if (times := text.count(begin + find)) != 1:
            raise UserError(f"{fault['name']}: {fault['file']} has its text {times} times")
        text = text.replace(begin + find, begin + replace)
    return text.removeprefix("\n")


def add_rule(rule: str, folder: Path) -> str:
    """Add an update rule of check_rules.toml to a copy, and return the options of a run with it."""
    table = tomllib.loads(RULES.read_text())[rule]
    path = folder / table["file"]
    path.write_text(path.read_text() + table["text"])
    return str(table.get("options", ""))


def asked(runs: dict[str, str], fault: dict[str, Any], rule: str = "") -> list[dict[str, Any]]:
    """Plant a fault, call check.py and return a row of what it said.

    rule: of check_rules.toml, which the copy has too; none if empty.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_code(folder)
        (folder / fault["file"]).write_text(planted(fault, folder))
        words = f"{runs.get(fault.get('run', ''), '')} {fault.get('options', '')}"
        options = shlex.split(f"{words} {add_rule(rule, folder) if rule else ''}")
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "check.py", *options],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        seconds = time.monotonic() - began
    lines = done.stdout.splitlines()
    said = lines_of(done.stdout)
    before = next((n for n, x in enumerate(lines) if x.split(" ")[0].isupper()), len(lines))
    row = {"name": fault["name"], "status": done.returncode, "seconds": seconds, "before": before}
    row |= {"said": said, "text": done.stdout[-3000:] + done.stderr[-1500:]}
    print(row["status"], f"{seconds:.0f} s", judged(fault, row), fault["name"], flush=True)
    print("     ", said["first"], "|", said["between"], "|", said["likely"], flush=True)
    return [row]


def lines_of(verdict: str) -> dict[str, str]:
    """Return what the lines of a verdict say, by their first words; "" for one that is missing.

    If there are two mistakes, the lines of the first one count.
    """
    lines = verdict.partition("another difference")[0].splitlines()
    said = {
        word: " ".join(x.strip()[len(word) :].strip() for x in lines if x.startswith(f"  {word}"))
        for word in ("where", "layout", "first", "between", "likely", "refused", "error", "hangs")
    }
    if not said["first"]:  # what one rank finds by itself has no layout
        said["first"] = next((x for x in lines if x.startswith("WRONG on one rank")), "")
    return said


def judged(fault: dict[str, Any], row: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether a fault was found, its tensor named, and its operation named."""
    said = row["said"]
    found = row["status"] == 1
    tensor = found and bool(re.search(fault["tensor"], said["first"]))
    operation = bool(re.search(fault["operation"], f"{said['between']} {said['likely']}"))
    return found, tensor, found and operation


def report(faults: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Return the text of the results file."""
    row_of = {row["name"]: row for row in rows}
    done = [fault for fault in faults if fault["name"] in row_of]
    lines = ["# Faults planted by hand, and what check.py says", ""]
    lines += ["    python benchmarks/faults/check_faults.py --keep RESULTS.jsonl", ""]
    lines += [(__doc__ or "").split("\n\n")[2], "", f"{machine()}.", ""]
    lines += ["| faults | run | found | tensor named | operation named |"]
    lines += ["| --- | --: | --: | --: | --: |"]
    for name, some in (
        ("all", done),
        ("the first twenty", [fault for fault in done if fault.get("first")]),
        (STRANGERS, [fault for fault in done if fault.get("stranger")]),
        (MISSED, [fault for fault in done if fault.get("review")]),
        (OF_KINDS, [fault for fault in done if fault.get("of_kinds")]),
    ):
        results = [judged(fault, row_of[fault["name"]]) for fault in some]
        columns = [str(sum(result[n] for result in results)) for n in range(3)]
        lines.append(f"| {name} | {len(some)} | {' | '.join(columns)} |")
    lines += ["", ABOUT, ""]
    lines += ["| fault | found | tensor | operation | first tensor | likely | s |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --: |"]
    for fault in done:
        row = row_of[fault["name"]]
        marks = ["yes" if mark else "**no**" for mark in judged(fault, row)]
        said = row["said"]
        cells = [fault["name"], *marks, said["first"] or said["error"] or said["hangs"]]
        cells += [said["likely"], f"{row['seconds']:.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def line_of_find(said: dict[str, str]) -> str:
    """Return the line of a verdict that names a fault, shortened to a cell of a table."""
    line = said["first"] or said["error"] or said["hangs"] or said["refused"]
    return " ".join(line.split())


def public_report(faults: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Return the text of the results file of public errors."""
    row_of = {row["name"]: row for row in rows}
    done = [fault for fault in faults if fault["name"] in row_of]
    results = [judged(fault, row_of[fault["name"]]) for fault in done]
    found, named, operations = (sum(result[n] for result in results) for n in range(3))
    lines = ["# Public errors of other programs, planted by kind", ""]
    lines += ["    python benchmarks/faults/check_faults.py --public --keep RESULTS.jsonl", ""]
    lines += [f"Of {len(done)} planted errors {found} are found by one call, with {named} tensors"]
    lines += [
        f"and {operations} operations named. The patterns were written before the first call, but"
    ]
    lines += ["for what public/faults.toml says of them.", ""]
    left = "; ".join(fault["name"] for fault in faults if fault["name"] not in row_of)
    lines += [f"Not run: {left}.", ""] if left else []
    lines += [f"{machine()}, which other programs used too.", ""]
    lines += ["| thread | what was wrong there | check.py | found | the first line | likely | s |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --: |"]
    for fault, (is_found, is_named, _) in zip(done, results, strict=True):
        row = row_of[fault["name"]]
        part = f" (here: {fault['part']})" if "part" in fault else ""
        call = f"{fault['run']} {fault.get('options', '')}".strip()
        mark = "yes" if is_named else ("yes, other tensor" if is_found else "**no**")
        cells = [fault["thread"], fault["kind"] + part, f"`{call}`", mark]
        cells += [line_of_find(row["said"]), row["said"]["likely"], f"{row['seconds']:.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Ask about the faults that are missing in the file of results."""
    parser = Parser("check_faults.py", description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--only", default="", help="faults whose name has this word")
    parser.add_argument("--public", action="store_true", help="the errors of public/faults.toml")
    parser.add_argument("--blind", action="store_true", help="the sixty of blind_faults.toml")
    parser.add_argument("--at-once", type=int, default=1, help="calls at a time")
    parser.add_argument("--rule", default="", choices=["", *tomllib.loads(RULES.read_text())])
    parser.add_argument("--optimizer", default="", help="of every run")
    given = parser.parse_args()
    keep = from_options(given)
    further = PUBLIC if given.public else BLIND if given.blind else None
    faults, runs = faults_of([FAULTS, further] if further else [FAULTS])
    known = {row["name"] for row in keep.rows()}
    left = [f for f in faults if f["name"] not in known and given.only in f["name"]]
    if given.optimizer:
        more = f" --optimizer {given.optimizer}"
        left = [f | {"options": f.get("options", "") + more} for f in left]
    keep.run(partial(asked, runs, rule=given.rule), left, given.at_once)
    if given.rule or given.optimizer or given.only or given.blind:
        return
    results, text = (PUBLIC_RESULTS, public_report) if given.public else (RESULTS, report)
    write(results, text(faults, keep.rows()))
    print(f"written: {results.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with(error)
