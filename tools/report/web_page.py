"""One HTML page with text, tables and pictures, of one file: no script, and nothing from elsewhere.

    page = document("Runs", [heading("runs/a"), inline(svg), text("step 1 of 2\\n...")])

Everything that a caller passes as text is escaped here, since names in it may come from files.
"""

import html
import re
from collections.abc import Iterable, Sequence

from base.errors import printable

# The beginning of a page, before its title. If the user's screen is dark, "light dark" makes the
# browser show light text on a dark background. Text is as large as a line of 70 characters allows;
# longer lines are wrapped, so that nothing leaves the page.
HEAD = """<!doctype html>
<meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width">
<style>
body { font-family: sans-serif }
h1 { font-size: 1.3em }
h2 { font-size: 1.1em; margin-top: 2em; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: min(13px, 2vw) }
table { border-collapse: collapse; font-size: 13px }
td, th { padding: 2px 8px; text-align: right; border-bottom: 1px solid #8884 }
td.text, th.text { text-align: left }
div.wide { overflow-x: auto }
</style>
"""


def document(title: str, parts: Iterable[str]) -> str:
    """Return an HTML page with a title and parts, which the other functions return."""
    shown = escaped(title)
    return f"{HEAD}<title>{shown}</title>\n<h1>{shown}</h1>\n" + "\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Return a text of one line as it is written into a page."""
    return html.escape(printable(text, keep=""))


def heading(text: str) -> str:
    """Return a heading below the page's title."""
    return f"<h2>{escaped(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{escaped(text)}</p>"


def lines(text: str) -> str:
    """Return a text with its line breaks and columns."""
    return f"<pre>{html.escape(printable(text))}</pre>"


def inline(svg: str) -> str:
    """Return a picture, an SVG element, without the ids by which matplotlib names its groups.

    All pictures of a page would have the same ones. The ids of definitions, which the picture
    refers to, stay: they are hashes.
    """
    return re.sub(r'<g id="[^"]*">', "<g>", svg)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], texts: Sequence[str]) -> str:
    """Return a table; texts: the columns whose cells begin at the left."""
    kinds = [' class="text"' if name in texts else "" for name in columns]
    head = "".join(f"<th{kind}>{escaped(name)}</th>" for kind, name in zip(kinds, columns))
    text = [f"<tr>{head}</tr>"]
    for row in rows:
        cells = zip(kinds, row, strict=True)
        line = "".join(f"<td{kind}>{escaped(str(cell))}</td>" for kind, cell in cells)
        text.append(f"<tr>{line}</tr>")
    return f'<div class="wide"><table>{"".join(text)}</table></div>'
