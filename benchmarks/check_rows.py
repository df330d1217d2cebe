"""Rows of a CSV file of measurements that contradict themselves or each other.

    python benchmarks/check_rows.py benchmarks/data/measured_rows.csv [--json]

The columns are those of published_rows; tune.py writes its results.csv in them too.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import published_rows

from config.messages import Parser, UserError, exit_with


def main(arguments: list[str]) -> None:
    """Print every contradiction; a user's mistake is one sentence and exit status 2."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="rows of measurements, CSV")
    parser.add_argument("--json", action="store_true", help="print data, not a table")
    try:
        options = parser.parse_args(arguments)
        found = published_rows.check(published_rows.read(options.file))
    except UserError as error:
        exit_with(error)
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
        return
    for finding in found:
        print(f"{finding.row_id:10} {finding.kind:9} {finding.text}")
    print(f"{len(found)} findings in {len({finding.row_id for finding in found})} rows")


if __name__ == "__main__":
    main(sys.argv[1:])
