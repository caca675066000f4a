"""Parts as one HTML page without scripts, images or links to the network."""

from collections.abc import Iterable, Iterator

from sabia.core import page
from sabia.core.recipes.show import parts
from sabia.core.recipes.show.parts import Part, visible

STYLE = """<style>
del, .removed { color: var(--bad); } ins, .added { color: var(--good); }
ins { text-decoration: none; font-weight: 600; }
.quiet, .masked { color: var(--quiet); } .name { font-weight: 600; }
.trained, .masked { display: block; padding-left: .6rem; border-left: 3px solid transparent; }
.trained { border-color: var(--series-1); }
h2 small { font-weight: 400; color: var(--quiet); } h3 { font-size: 1rem; }
</style>"""
TAGS = {parts.REMOVED: "del", parts.ADDED: "ins"}


def page_of(shown: Iterable[Part], name: str, note: str) -> str:
    """The page; a section for each title. note: what the page has."""
    sections, fields = [page.paragraph(note, quiet=True)], list[Part]()
    is_open = False
    for part in shown:
        if fields and part.role != parts.FIELD:
            sections += _table(fields)
            fields = []
        if part.role == parts.FIELD:
            fields.append(part)
            continue
        if part.role == parts.TITLE:
            sections += ["</section>"] * is_open + ["<section>", _title(part)]
            is_open = True
            continue
        if part.role == parts.HEADING:
            sections += (f'<h3 class="{style}">{_text(words)}</h3>' for style, words in part.spans)
        else:
            sections.append(f"<pre>{_spans(part)}</pre>")
    sections += [*_table(fields)] + ["</section>"] * is_open
    return page.page(name, sections).replace("</head>", f"{STYLE}</head>", 1)


def _title(part: Part) -> str:
    note = "".join(words for _, words in part.spans)
    small = f" <small>{_text(note)}</small>" if note else ""
    return f"<h2>{_text(part.label)}{small}</h2>"


def _table(fields: Iterable[Part]) -> Iterator[str]:
    rows = "".join(f"<tr><th>{_text(one.label)}</th><td>{_spans(one)}</td></tr>" for one in fields)
    if rows:
        yield f"<table>{rows}</table>"


def _spans(part: Part) -> str:
    return "".join(_span(style, _text(words)) for style, words in part.spans)


def _span(style: str, words: str) -> str:
    if style == parts.PLAIN:
        return words
    tag = TAGS.get(style)
    return f"<{tag}>{words}</{tag}>" if tag else f'<span class="{style}">{words}</span>'


def _text(words: str) -> str:
    return page.text(visible(words))
