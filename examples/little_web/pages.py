"""One page of the little web: its text, its links, and whether a crawler should keep it.

`render` gives HTML with the usual elements around the article (navigation, sidebar, footer), so
that text extraction has something to remove.
"""

import html
from dataclasses import dataclass, field

HOME_LINKS = (
    ("/offers/", "Offers"),
    ("/news/", "News links"),
    ("/calendar/2031/01", "Calendar"),
    ("/about.html", "About"),
    ("/learn/", "Learn"),
    ("/library/", "Library"),
    ("/", "Home"),
)
_FOOTER = "Little web. Every page here was made by a program. All rights and lefts reserved."


@dataclass(frozen=True)
class Page:
    """`kind` is exercise, prose, copy, near-duplicate, spam, navigation, private or broken."""

    path: str
    kind: str
    language: str
    title: str
    body: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    relevant: bool = False
    duplicate_of: str | None = None
    fault: str = ""  # how the server misbehaves for this page; see server.FAULTS
    encoding: str = "utf-8"
    head: str = field(default="", repr=False)

    @property
    def text(self) -> str:
        """What a perfect extraction gives: title and paragraphs."""
        return "\n".join((self.title, *self.body))


def render(page: Page) -> bytes:
    """The page as HTML in its encoding."""
    declared = f'<meta charset="{page.encoding}">' if page.encoding != "windows-1252" else ""
    paragraphs = "\n".join(f"<p>{html.escape(part)}</p>" for part in page.body)
    text = f"""<!DOCTYPE html>
<html lang="{page.language}">
<head>{declared}<title>{html.escape(page.title)}</title>{page.head}
<style>body {{ font-family: serif }} nav li {{ display: inline }}</style></head>
<body>
<header><nav><ul>{_items(HOME_LINKS)}</ul></nav></header>
<main><article><h1>{html.escape(page.title)}</h1>
{paragraphs}
</article></main>
<aside class="sidebar"><ul>{_items(page.links)}</ul></aside>
<footer>{_FOOTER}</footer>
<script>var visits = {len(page.body)};</script>
</body></html>
"""
    return text.encode(page.encoding, "xmlcharrefreplace")


def _items(links: tuple[tuple[str, str], ...]) -> str:
    return "".join(
        f'<li><a href="{html.escape(target)}">{html.escape(anchor)}</a></li>'
        for target, anchor in links
    )
