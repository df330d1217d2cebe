"""Counts the lines of Python by room, beside the limits: `python scripts/line_counts.py`.

A room is a file of the root or a wing, as in DESIGN.md. The limits are those that
tests/test_house.py enforces; this script only prints.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ("train", "trainer", "data", "pipeline", "model", "attention", "loss", "parallel", "zero")
OUTSIDE = ("benchmarks", "tests", "scripts")  # folders that the total leaves out
ENGINE_LIMIT, TOTAL_LIMIT = 2_800, 29_400


def lines_of(paths: list[Path]) -> int:
    """Lines of these files together, blank ones and comments included."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def count() -> dict[str, int]:
    """Lines by engine, entries (the other root files), wing, and folder outside of the total."""
    root = sorted(ROOT.glob("*.py"))
    wings = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    found = {
        "engine": lines_of([path for path in root if path.stem in ENGINE]),
        "entries": lines_of([path for path in root if path.stem not in ENGINE]),
    }
    for folder in (*wings, *OUTSIDE):
        found[f"{folder}/"] = lines_of(sorted((ROOT / folder).glob("*.py")))
    return found


def total(found: dict[str, int]) -> int:
    """The lines that the total limit is about."""
    return sum(lines for name, lines in found.items() if name.rstrip("/") not in OUTSIDE)


def main() -> None:
    """Print one line per room, then both totals with their limits."""
    found = count()
    print("lines of Python")
    for name, lines in found.items():
        note = "  not in the total" if name.rstrip("/") in OUTSIDE else ""
        print(f"  {name:16} {lines:7,}{note}")
    print(f"  {'engine':16} {found['engine']:7,}  of at most {ENGINE_LIMIT:,}")
    print(f"  {'total':16} {total(found):7,}  of at most {TOTAL_LIMIT:,}")


if __name__ == "__main__":
    main()
