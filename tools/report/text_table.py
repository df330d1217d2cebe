"""Lines of a table with aligned columns, for a terminal."""

from collections.abc import Collection

WIDTH = 120  # width of a table that fits in a terminal, in characters
TEXTS = ("recompute", "schedule", "ramp-up")  # columns that are aligned to the left


def columns(rows: list[list[str]], texts: Collection[str] = TEXTS) -> list[str]:
    """Return the lines of a table with aligned columns; the first row has the columns' names.

    Columns with a name in `texts` are aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # A wide table has only one space between its columns, and none before the first.
    is_wide = sum(widths) + 2 * len(widths) > WIDTH
    gap = " " if is_wide else "  "
    lines = []
    for row in rows:
        line = ""
        for name, cell, width in zip(rows[0], row, widths, strict=True):
            aligned = cell.ljust(width) if name in texts else cell.rjust(width)
            line += gap + aligned
        lines.append(line.rstrip()[is_wide:])
    return lines
