"""HTML to text, title, date and links: a fast block classifier, and trafilatura for unclear pages.

The fast extractor scans the page once (`sabia.kernels.html`), and two small networks choose the
blocks of text. If the choice is too uncertain, or hardly any text is left, trafilatura is used,
which takes about ten times as long. `extractor` of the result names the one that was used. These
are pure functions of bytes; run them inside `sandbox` for bytes from the web.
"""

from dataclasses import dataclass

import numpy as np

from sabia.core.web.extraction import block_classifier, block_features
from sabia.core.web.extraction.decoding import decode
from sabia.core.web.extraction.page_metadata import MetadataReader
from sabia.kernels.html.definitions import COLUMNS, FLAG_NAMES, Page
from sabia.kernels.html.interface import scan
from sabia.kernels.html.interface import warm_up as warm_up_scanner

FAST, CAREFUL, PLAIN = "blocks", "trafilatura", "plain"
FEW_WORDS = 25  # fewer words are uncertain, if the page has more
_FURNITURE = sum(1 << FLAG_NAMES.index(name)
                 for name in ("nav", "header", "footer", "aside", "button", "form"))  # fmt: skip
_FLAGS, _WORDS = COLUMNS.index("flags"), COLUMNS.index("words")


@dataclass(frozen=True)
class Extracted:
    """`links` are (canonical URL, anchor text); `extractor` is FAST, CAREFUL or PLAIN."""

    text: str
    title: str
    language: str
    date: str
    links: tuple[tuple[str, str], ...]
    index: bool  # False: the page must not be stored (robots meta noindex)
    extractor: str


def warm_up() -> None:
    """Load everything that the first page needs."""
    warm_up_scanner()
    block_classifier.nets()


def extract(
    body: bytes, content_type: str, url: str, want_links: bool = True, markdown: bool = False
) -> Extracted:
    """Text, of HTML as Markdown on request, and links of a page."""
    decoded = decode(body, content_type)
    if content_type.lower().startswith("text/plain"):
        return Extracted(tidy(decoded), "", "", "", (), True, PLAIN)
    data = decoded.encode("utf-8", "replace")
    page = scan(np.frombuffer(data, np.uint8))
    marks = MetadataReader(page, data)
    facts = marks.facts()
    text, extractor, chosen = main_text(page, decoded)
    if markdown:
        from sabia.core.web.extraction.markdown.render import markdown_of

        if chosen is None:
            chosen = block_features.blocks_in(page, text)
        text = markdown_of(page, data, chosen) if chosen.any() else text
    links = tuple(marks.links(url, facts.base)) if want_links and facts.follow else ()
    return Extracted(text, facts.title, facts.language, facts.date, links, facts.index, extractor)


def main_text(page: Page, decoded: str) -> tuple[str, str, np.ndarray | None]:
    """The page's text, the extractor that was used, and the blocks that hold it, bool[blocks]; None
    if trafilatura chose the text."""
    if not len(page.blocks):
        return "", FAST, np.zeros(0, bool)
    p = block_classifier.probabilities(page)
    chosen = p > block_classifier.THRESHOLD
    words = page.blocks[:, _WORDS]
    enough = int(words[chosen].sum()) >= min(FEW_WORDS, int(words.sum()))
    if enough and block_classifier.doubt(page, p) <= block_classifier.DOUBT:
        return block_features.text_of(page, chosen), FAST, chosen
    import trafilatura

    text = trafilatura.extract(decoded, fast=True, include_comments=False, include_tables=True)
    careful = tidy(text or "")
    if careful:
        return careful, CAREFUL, None
    if not chosen.any():
        chosen = page.blocks[:, _FLAGS] & _FURNITURE == 0
    return block_features.text_of(page, chosen), FAST, chosen


def tidy(text: str) -> str:
    """Without repeated blanks, empty lines and invalid characters."""
    clean = text.encode("utf-8", "replace").decode().replace("\0", "")
    lines = (" ".join(line.split()) for line in clean.split("\n"))
    return "\n".join(line for line in lines if line)
