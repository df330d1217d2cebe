"""Runs the commands of the documentation in a clone, as written or scaled down.

    git clone . /tmp/clone
    python benchmarks/commands.py --clone /tmp/clone         writes benchmarks/results/commands.md
    python benchmarks/commands.py --clone /tmp/clone --only sample
    python benchmarks/commands.py --missing                  compares the list with the pages

The list, benchmarks/data/commands.toml, has in the order in which they run, for each command:
`written`, as on the page; `run`, what is run in its place, and `how`, why; or `skip`, why it is not
run. `before` is run first and makes what the command needs. `CLONE/commands.json` has the outcomes:
what has run well is not run again, unless `--only` names it; `CLONE/commands.log` has what was
printed.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from limited import run_limited

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "benchmarks" / "data" / "commands.toml"
RESULTS = ROOT / "benchmarks" / "results" / "commands.md"
LIMIT = 600.0  # seconds of one command
PROGRAMS = ["plan", "tune", "train", "rehearse", "sample", "supervise", "checkpoint", "corpus"]
START = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:python|bash|mpirun|srun|sbatch|torchrun|pip|uv|git|module|docker"
    r"|apptainer|source|\.venv/bin/\w+|trine-[a-z]+|(?:" + "|".join(PROGRAMS) + r")\.py)(?=\s)"
)


def pages() -> list[Path]:
    """The pages whose commands are run: all that a user reads but the log of experiments."""
    docs = sorted((ROOT / "docs").glob("*.md"))
    names = [ROOT / "README.md", *docs, ROOT / "CONTRIBUTING.md"]
    return [page for page in names if page.name != "log.md"]


def commands(text: str) -> list[str]:
    """The commands of a page: in its code blocks, and between backticks.

    Between backticks a name without options is a program, and no command.
    """
    found = []
    for line in _joined(text).splitlines():
        code = line.strip()
        if line.startswith("    ") and START.match(code + " "):
            found.append(_plain(re.sub(r"\s+#.*$", "", code)))
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    quoted = map(_plain, re.findall(r"`([^`]+)`", lines))
    return found + [q for q in quoted if START.match(q) and re.search(r"[ /.]-|/| \.", q)]


def _joined(text: str) -> str:
    """The text with each command on one line: a command goes on after a backslash."""
    return re.sub(r"\\\n\s*", "", text)


def _plain(command: str) -> str:
    return re.sub(r"\s+", " ", command).strip()


def missing() -> list[str]:
    """Commands of the pages that the list does not have."""
    listed = {entry["written"] for entry in entries()}
    return [
        f"{page.name}: {command}"
        for page in pages()
        for command in dict.fromkeys(commands(page.read_text()))
        if command not in listed
    ]


def gone() -> list[str]:
    """Commands of the list that are on no page any more."""
    text = " ".join(_plain(_joined(page.read_text())) for page in pages())
    return [entry["written"] for entry in entries() if entry["written"] not in text]


def entries() -> list[dict]:
    """The list, in its order; written commands have single spaces."""
    with open(LIST, "rb") as file:
        found = tomllib.load(file)
    first = found["shell"]
    return [
        entry | {"written": _plain(entry["written"]), "before": first + entry.get("before", "")}
        for entry in found["command"]
    ]


# ---- Running -------------------------------------------------------------------------------------


def run(entry: dict, clone: Path) -> dict:
    """Run a command; return its status, its seconds and the last line that it printed."""
    command = entry.get("run", entry["written"])
    command = re.sub(r"^(" + "|".join(PROGRAMS) + r")\.py", r"python \1.py", command)
    script = "\n".join(["set -euo pipefail", entry["before"], command])
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    path = [each for each in environment["PATH"].split(":") if ".venv" not in each]
    environment["PATH"] = ":".join([str(clone / ".venv" / "bin"), *path])
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        words = ["bash", "-c", script]
        status = run_limited(words, LIMIT, cwd=clone, env=environment, **streams)
        output.seek(0)
        text = output.read()
    with (clone / "commands.log").open("a") as log:
        log.write(f"$ {command}\n{text}\n")
    lines = [line.strip()[:100] for line in text.splitlines() if re.search(r"\w", line)]
    last = lines[-1] if lines else ""
    return {"status": status, "seconds": time.monotonic() - began, "last": last}


def failed(entry: dict, outcome: dict) -> bool:
    """Whether a command ended otherwise than its entry says."""
    return outcome["status"] != entry.get("status", 0)


def row(entry: dict, outcome: dict | None) -> str:
    """A row of the table."""
    cell = entry["written"].replace("|", "\\|")
    if "skip" in entry:
        return f"| `{cell}` | not run: {entry['skip']} | |"
    how = entry.get("how", "as written")
    if outcome is None:
        return f"| `{cell}` | {how} | not run yet |"
    said = "**FAILED** " if failed(entry, outcome) else ""
    last = outcome["last"].replace("|", "\\|").replace("`", "'")
    result = f"{said}status {outcome['status']}, {outcome['seconds']:.0f} s; `{last}`"
    return f"| `{cell}` | {how} | {result} |"


def report(outcomes: dict[str, dict]) -> list[str]:
    """The lines of the results file."""
    listed = entries()
    table = [row(each, outcomes.get(each["written"])) for each in listed]
    ran = [each for each in listed if each["written"] in outcomes]
    as_written = sum("run" not in each for each in ran)
    skipped = sum("skip" in each for each in listed)
    bad = [each for each in ran if failed(each, outcomes[each["written"]])]
    return [
        "# The commands of the documentation",
        "",
        "    python benchmarks/commands.py --clone FRESH_CLONE",
        "",
        f"{len(listed)} commands of README.md, docs/ and CONTRIBUTING.md, in a fresh clone that",
        f"`bash scripts/setup.sh` had set up: {as_written} as written, {len(ran) - as_written} in "
        "another form that the table",
        f"states, {skipped} cannot run here, {len(listed) - len(ran) - skipped} are not run yet; "
        f"{len(bad)} failed. Python {platform.python_version()},",
        f"{os.cpu_count()} cores of a machine that others used:",
        "seconds say little, and not all rows are of one commit, since what has run well is kept.",
        "`...` of a command stands for the options that the table's way names.",
        "",
        "| command | how it was run | result, last line |",
        "| --- | --- | --- |",
        *table,
    ]


def main() -> int:
    """Run what is asked for; 1 if a command failed, or if the list is not that of the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clone", type=Path, help="a clone with .venv, or in which setup.sh runs")
    parser.add_argument("--only", default="", help="commands that contain this text")
    parser.add_argument("--missing", action="store_true", help="compare list and pages, run none")
    o = parser.parse_args()
    differences = missing() + [f"on no page: {command}" for command in gone()]
    if o.missing or o.clone is None:
        print("\n".join(differences))
        return 1 if differences else 0
    kept = o.clone / "commands.json"
    outcomes = json.loads(kept.read_text()) if kept.exists() else {}
    bad = 0
    for entry in entries():
        earlier = outcomes.get(entry["written"])
        done = earlier is not None and not failed(entry, earlier)
        if "skip" in entry or o.only not in entry["written"] or (done and not o.only):
            continue
        outcome = outcomes[entry["written"]] = run(entry, o.clone)
        bad += failed(entry, outcome)
        word = "FAILED" if failed(entry, outcome) else "ok"
        print(word, f"{outcome['seconds']:.0f} s", entry["written"], flush=True)
        kept.write_text(json.dumps(outcomes, indent=1))
        RESULTS.write_text("\n".join(report(outcomes)) + "\n")
    return 1 if bad or differences else 0


if __name__ == "__main__":
    sys.exit(main())
