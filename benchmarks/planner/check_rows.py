"""Rows of a CSV file of measurements that contradict themselves or each other.

    python benchmarks/planner/check_rows.py benchmarks/data/measured_rows.csv [--json] [--skip]

The columns are those of published_rows; tune.py writes its results.csv in them too. With a column
`machine` they are those of stated_rows (benchmarks/data/README.md, Measured rows). A cell that
cannot be read is a mistake: all of them are listed, and --skip goes on without their rows.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import sentences
from benchmarks.planner import published_rows, stated_rows
from benchmarks.planner.row_table import RowTable


def main(arguments: list[str]) -> None:
    """Print every contradiction. Raises a UserError that lists all mistakes of the file."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="rows of measurements, CSV")
    parser.add_argument("--json", action="store_true", help="print data, not a table")
    parser.add_argument("--skip", action="store_true", help="go on without rows with a mistake")
    options = parser.parse_args(arguments)
    table = read(options.file)
    if not options.skip:
        table.refuse_mistakes()
    if table.mistakes:
        print(f"note: {table.skipped()}", file=sys.stderr)
    found = published_rows.check(table.sound())
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
        return
    for finding in found:
        print(f"{finding.row_id:10} {finding.kind:9} {finding.text}")
    print(f"{len(found)} findings in {len({finding.row_id for finding in found})} rows")


def read(path: str) -> RowTable:
    """The rows of a file, with all mistakes that its reader finds."""
    table = published_rows.read_table(path)
    return stated_rows.read_sound(path).table if "machine" in table.columns else table


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
