"""Prints the report of a hang or a death again, as `python -m watchdog.hang_report OUT` does.

python scripts/hang_report.py OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config.messages import sentences
from watchdog.hang_report import main

if __name__ == "__main__":
    with sentences():
        main()
