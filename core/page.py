"""A self-contained HTML page: sections, tables and charts; light and dark mode; no scripts.

Text is escaped and stripped of characters that XML forbids, so the page parses as XML as well as
HTML.
"""

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1c1f23; --quiet: #5b6470;
  --rule: #d8dde3; --panel: #f5f7f9; --bad: #b3261e; --good: #146c2e;
  --series-1: #0072b2; --series-2: #d55e00; --series-3: #009e73; --series-4: #b4508c;
  --series-5: #b07d00; --series-6: #3a9bd0; --series-7: #6b5bb5; --series-8: #767676; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --ink: #e6e9ec; --quiet: #9aa4af;
  --rule: #363d45; --panel: #1d2125; --bad: #ff8a80; --good: #7ddb95;
  --series-1: #56b4e9; --series-2: #f08a4b; --series-3: #3ecba0; --series-4: #e08cc0;
  --series-5: #e6b84a; --series-6: #8cc8ec; --series-7: #a99cf0; --series-8: #a8a8a8; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
p { max-width: 56rem; }
p.quiet, figcaption, caption { color: var(--quiet); font-size: .9rem; text-align: left; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .9rem; display: block;
  overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: .3rem .7rem; text-align: left;
  vertical-align: top; }
th { background: var(--panel); } td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
.bad { color: var(--bad); } .good { color: var(--good); }
pre { background: var(--panel); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: .85rem; max-height: 18rem; overflow-y: auto; }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg text.title { font-size: 14px; font-weight: 600; }
svg text.tick { fill: var(--quiet); font-size: 11px; }
svg line.grid { stroke: var(--rule); stroke-width: 1; } svg line.axis { stroke: var(--quiet); }
svg line.error { stroke: var(--ink); stroke-width: 1.4; }
figure { margin: 1rem 0; }
"""
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NUMERIC = re.compile(r"[-+−±$<>≤≥~]?[\d.,]+\s?(%|[a-zA-Z/]{0,6})?(\s?[±–(\[].*)?")


def text(value: object) -> str:
    """The text of a value, escaped; characters that XML forbids become U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", str(value)))


def paragraph(words: str, quiet: bool = False) -> str:
    """A paragraph."""
    return f'<p class="quiet">{text(words)}</p>' if quiet else f"<p>{text(words)}</p>"


def preformatted(words: str) -> str:
    """Text with its line breaks preserved."""
    return f"<pre>{text(words)}</pre>"


def figure(svg: str, caption: str = "") -> str:
    """A chart with a caption."""
    under = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg}{under}</figure>"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """A table; columns of numbers are right-aligned, columns without any value are left out."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    filled = [not cells or any(row[i] for row in cells) for i in range(len(columns))]
    columns = [name for name, keep in zip(columns, filled, strict=True) if keep]
    cells = [[cell for cell, keep in zip(row, filled, strict=True) if keep] for row in cells]
    numeric = [
        all(_NUMERIC.fullmatch(row[i].strip()) or not row[i] for row in cells) and bool(cells)
        for i in range(len(columns))
    ]
    head, body = _row("th", columns, numeric), "\n".join(_row("td", c, numeric) for c in cells)
    under = f"<caption>{text(caption)}</caption>" if caption else ""
    return f"<table>{under}<thead>{head}</thead>\n<tbody>{body}</tbody></table>"


def _row(tag: str, values: Sequence[str], numeric: Sequence[bool]) -> str:
    kinds = [' class="number"' if right else "" for right in numeric]
    pairs = zip(values, kinds, strict=True)
    cells = (f"<{tag}{kind}>{text(value)}</{tag}>" for value, kind in pairs)
    return f"<tr>{''.join(cells)}</tr>"


def section(title: str, parts: Sequence[str]) -> str:
    """A titled section of HTML parts."""
    return "\n".join([f"<section><h2>{text(title)}</h2>", *parts, "</section>"])


def page(title: str, parts: Sequence[str]) -> str:
    """A complete page of HTML parts."""
    head = (
        '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head>'
        '<meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>"
    )
    return "\n".join([head, f"<body><h1>{text(title)}</h1>", *parts, "</body></html>\n"])
