"""Random pages with tables, code and formulas between navigation and footers, and what they say.

`page(seed)` writes the HTML by hand, with the forms of several highlighters and formula writers;
`parsed` reads Markdown with markdown-it-py, which is no part of the renderer.
"""

import html
import random
from typing import Any, NamedTuple

from markdown_it import MarkdownIt

SENTENCES = (
    "The river rises in the mountains, and it is fed by several lakes on its way to the sea.",
    "In the spring of that year, the engineers measured the flow at four places along the valley.",
    "Most of the figures were published later, because the first report had been lost in a fire.",
    "We compare the two methods below; neither of them is better in all of the cases.",
    "As one can see, the values that were measured agree with the theory, with a few exceptions.",
)
WORDS = ("alpha", "beta|pipe", "*", "snake_case", "_x_", "3.5", "-7", "<b>", "a`b", "R&D",
         "&lt;", "10 %", "`", "C:\\", "x\\|y", "$5", "é", "日本", "[1]", "#", "1.", "~~~",
         "a*b*c")  # fmt: skip
CODE_LINES = ("def f(x):", "    return x * 2", "", "\tif a < b && c:", "# comment", "a = `b`",
              "```",
              "  - item", "s = \"<td>&amp;\"", "        deep", "|x|y|", "~~~", "1 + 1", "x_1 = y_2",
              "", "print('é')", "\\begin{x}")  # fmt: skip
FORMULAS = (r"x^2", r"\frac{a}{b}", r"a_{1} < b_{2}", r"\sum_{i=1}^n i", r"\|v\|", r"e^{i\pi} + 1",
            r"a & b", r"\mathbb{R}^*", r"x \in \{1, 2\}")  # fmt: skip


class Made(NamedTuple):
    """The page, and its tables, code (with language) and formulas (with display) in order."""

    source: str
    tables: list[list[list[str]]]
    code: list[tuple[str, str]]
    formulas: list[tuple[str, bool]]


def page(seed: int) -> Made:
    """One page with everything."""
    rng = random.Random(seed)
    made = Made("", [], [], [])
    parts = ["<h1>A title of the page</h1>", _prose(rng)]
    kinds = ["table", "code", "formula", *rng.choices(("table", "code", "formula", "list"), k=3)]
    rng.shuffle(kinds)
    for kind in kinds:
        parts.append(
            {"table": _table, "code": _code, "formula": _formula, "list": _list}[kind](rng, made)
        )
        parts.append(_prose(rng))
    menu = "".join(f"<li><a href=/{n}>Menu {n}</a></li>" for n in range(rng.randint(5, 25)))
    before = rng.choice((f"<nav><ul>{menu}</ul></nav>", f"<div class=menu><ul>{menu}</ul></div>",
                         f"<header><a href=/>Home</a><ul>{menu}</ul></header>", ""))  # fmt: skip
    after = rng.choice(("<footer><p>© 2024 All rights reserved. <a href=/p>More</a></p></footer>",
                        "<div class=footer><ul><li><a href=/c>Contact</a><li>Imprint</ul></div>",
                        ""))  # fmt: skip
    wrap = rng.choice(("<main><article>{}</article></main>", "<div class=content>{}</div>",
                       "<table><tr><td>{}</td></tr></table>", "<article>{}</article>"))  # fmt: skip
    body = f"{before}{wrap.format(rng.choice(('', chr(10))).join(parts))}{after}"
    source = f"<!DOCTYPE html><html><head><title>t</title></head><body>{body}</body></html>"
    return made._replace(source=source)


def _prose(rng: random.Random) -> str:
    return "".join(f"<p>{' '.join(rng.choices(SENTENCES, k=rng.randint(2, 4)))}</p>"
                   for _ in range(rng.randint(1, 2)))  # fmt: skip


def _cell_text(rng: random.Random) -> tuple[str, str]:
    """(source, text) of a cell; lines of the text are separated by line feeds."""
    words = [rng.choice(WORDS) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    text, shown = " ".join(words), html.escape(" ".join(words), quote=False)
    form = rng.random()
    if words and form < 0.15:
        return f"<code>{shown}</code>", text
    if words and form < 0.3:
        return f"{shown}<br>{shown}", f"{text}\n{text}"
    if words and form < 0.4:
        return f"<p>{shown}</p><p>{shown}</p>", f"{text}\n{text}"
    if words and form < 0.5:
        return f"<b>{shown}</b> <a href=/x>\n {shown}</a>", f"{text} {text}"
    return shown, text


def _table(rng: random.Random, made: Made) -> str:
    rows, columns = rng.randint(2, 6), rng.randint(2, 5)
    grid: list[list[str | None]] = [[None] * columns for _ in range(rows)]
    lines = []
    for r in range(rows):
        cells = []
        for c in range(columns):
            if grid[r][c] is not None:
                continue
            wide = high = 1
            if rng.random() < 0.15 and r:
                while c + wide < columns and grid[r][c + wide] is None and rng.random() < 0.5:
                    wide += 1
                high = rng.randint(1, rows - r)
            if wide == columns:
                wide = 1
            source, text = _cell_text(rng)
            if not text and (not c or r < 2):  # a table of one column of text is no grid
                source = text = f"row {r}"
            for y in range(high):
                for x in range(wide):
                    grid[r + y][c + x] = text
            spans = (f" colspan={wide}" if wide > 1 else "") + (
                f" rowspan='{high}'" if high > 1 else ""
            )
            tag = "th" if not r else "td"
            cells.append(f"<{tag}{spans}>{source}" + rng.choice((f"</{tag}>", "")))
        lines.append("<tr>" + "".join(cells) + rng.choice(("</tr>", "")))
    made.tables.append([[text or "" for text in row] for row in grid])
    return "<table>" + "\n".join(lines) + "</table>"


def _code(rng: random.Random, made: Made) -> str:
    lines = [rng.choice(CODE_LINES) for _ in range(rng.randint(3, 9))]
    lines = ["x = 1", *lines, "end"]
    language = rng.choice(("", "python", "c++"))
    made.code.append(("\n".join(lines), language))
    shown = [html.escape(line, quote=rng.random() < 0.5) for line in lines]
    tokens = [" ".join(f"<span class='k{rng.randint(0, 9)}'>{token}</span>" if token else ""
                       for token in line.split(" ")) for line in shown]  # fmt: skip
    named = f" class='language-{language}'" if language else ""
    numbers = "\n".join(str(n + 1) for n in range(len(lines)))
    code = "\n".join(tokens)
    numbered = [f"<span class=lineno>{n + 1}</span>{line}" for n, line in enumerate(tokens)]
    forms = ("<span class=line>{}</span>\n", "<div class=line>{}</div>", "<span>{}<br></span>")
    wrapped = ["".join(form.format(line) for line in tokens) for form in forms]
    beside = "<table><tr><td{}><pre>{}</pre></td><td class=code><pre>{}</pre></td></tr></table>"
    return rng.choice((
        f"<pre><code{named}>" + "\n".join(shown) + "\n</code></pre>",
        f"<pre{named}>\n{code}</pre>",
        *(f"<pre><code{named}>{lines}</code></pre>" for lines in wrapped),
        f"<pre{named}>" + "\n".join(numbered) + "</pre>",
        f"<div{named}>{beside.format(' class=linenos', numbers, code)}</div>",
        f"<pre{named}><code>{beside.format('', numbers + chr(10), code + chr(10))}</code></pre>",
    ))  # fmt: skip


def _formula(rng: random.Random, made: Made) -> str:
    tex, display = rng.choice(FORMULAS), rng.random() < 0.4
    made.formulas.append((tex, display))
    shown = html.escape(tex)
    source = f"<annotation encoding='application/x-tex'>{shown}</annotation>"
    annotation = f"<semantics><mrow><mi>x</mi></mrow>{source}</semantics>"
    block, mode = (" display='block'", "; mode=display") if display else ("", "")
    image = "mwe-math-fallback-image-display" if display else "mwe-math-fallback-image-inline"
    styled = f"{{\\displaystyle {shown}}}"
    katex = (f"<span class=katex><span class=katex-mathml><math>{annotation}</math></span>"
             "<span class=katex-html aria-hidden=true>xx</span></span>")  # fmt: skip
    form = rng.choice((
        f"<math{block}>{annotation}</math>",
        f"<span class=katex-display>{katex}</span>" if display else katex,
        f"<script type='math/tex{mode}'>{tex}</script>",
        "<span class=mwe-math-element><span class=mwe-math-mathml style='display: none;'>"
        f"<math{block} alttext='{styled}'>{annotation}</math></span>"
        f"<img src=x class='{image}' alt='{styled}'></span>",
        f"<img class='tex{' a-display' if display else ''}' alt='{shown}'>",
    ))  # fmt: skip
    if display and rng.random() < 0.5:
        return f"<p>{rng.choice(SENTENCES)}</p><div>{form}</div><p>{rng.choice(SENTENCES)}</p>"
    return f"<p>{rng.choice(SENTENCES)} Here {form} is the value. {rng.choice(SENTENCES)}</p>"


def _list(rng: random.Random, made: Made) -> str:
    del made
    items = "".join(f"<li>{rng.choice(SENTENCES)}" for _ in range(rng.randint(2, 4)))
    return f"<ol start=4>{items}</ol>"


def parsed(markdown: str) -> tuple[list[list[list[str]]], list[tuple[str, str]]]:
    """(tables, code) of a Markdown document, as markdown-it-py reads it."""
    tables: list[list[list[str]]] = []
    code = []
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    inside = False
    for token in tokens:
        if token.type == "fence":
            code.append((token.content.removesuffix("\n"), token.info))
        elif token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("th_open", "td_open", "th_close", "td_close"):
            inside = token.type.endswith("open")
        elif token.type == "inline" and inside:
            tables[-1][-1].append("".join(map(_shown, token.children or ())))
    return tables, code


def _shown(token: Any) -> str:
    if token.type == "html_inline":
        return "\n" if token.content == "<br>" else token.content
    return str(token.content)
