"""HTML to text, title, date and links: a fast block classifier, and trafilatura for unclear pages.

The fast extractor scans the page once (`sabia.kernels.html`), and two small networks choose the
blocks of text. If the choice is too uncertain, or hardly any text is left, trafilatura is used,
which takes about ten times as long. `extractor` of the result names the one that was used. These
are pure functions of bytes; run them inside `sandbox` for bytes from the web.

The networks read the rows of `block_features`. The first one scores each block alone; the second
also uses the first one's scores of the neighbouring blocks and of the elements around. Each is h =
max(0, x W1 + b1), p = sigmoid(h W2 + b2). The weights are in block_weights.tsv, one line per
feature, fitted by tests/bench/fit_extract.py on 1,438 pages of seven kinds (WCXB 1.0, dev split,
CC-BY-4.0, commit c039d5e) and on the 92 of the 181 news pages of article-extraction-benchmark (MIT,
commit 4a3bc97) whose id begins with an even digit. The threshold was chosen on the same pages, each
page scored by weights that were fitted without it, and the limit of doubt on the 990 pages of
trafilatura's evaluation (tests/bench/RESULTS.md): below it trafilatura does no better.

The encoding of a page: byte order mark, HTTP header, declaration in the page, UTF-8, detection. The
order is that of the HTML standard (13.2.3.1, encoding sniffing), with three deviations for real
pages: if a declared UTF-8 is not valid UTF-8, the encoding is detected; a page without a
declaration is read as UTF-8 if it decodes; and so is one that declares another encoding, where it
is not ASCII alone, since text of other encodings is hardly ever valid UTF-8. Labels have the
meaning of the WHATWG encoding standard (latin-1 is windows-1252).
"""

import codecs
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from sabia.core.web.extraction import block_features
from sabia.core.web.extraction.block_features import NAMES, SECOND_NAMES, features, second_features
from sabia.core.web.extraction.page_metadata import MetadataReader
from sabia.kernels.html.definitions import COLUMNS, FLAG_NAMES, Page
from sabia.kernels.html.interface import scan
from sabia.kernels.html.interface import warm_up as warm_up_scanner

FAST, CAREFUL, PLAIN = "blocks", "trafilatura", "plain"
FEW_WORDS = 25  # fewer words are uncertain, if the page has more
_FURNITURE = sum(1 << FLAG_NAMES.index(name)
                 for name in ("nav", "header", "footer", "aside", "button", "form"))  # fmt: skip
_FLAGS, _WORDS = COLUMNS.index("flags"), COLUMNS.index("words")
THRESHOLD = 0.7
DOUBT = 0.35  # largest uncertain share of the bytes of text
WEIGHTS = "block_weights.tsv"
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_DECLARED_WITHIN = 2048  # bytes
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"),
          (codecs.BOM_UTF16_BE, "utf-16-be"))  # fmt: skip


def decode(body: bytes, content_type: str) -> str:
    """The page's text; bytes that are invalid in its encoding become U+FFFD."""
    for mark, encoding in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(encoding, "replace")
    header = _CHARSET.search(content_type.encode("ascii", "replace"))
    if header:
        encoding = _label(header)
    else:
        inside = _CHARSET.search(body[:_DECLARED_WITHIN])
        encoding = _label(inside) if inside else ""
        if encoding.startswith("utf-16"):
            encoding = "utf-8"  # or the declaration could not have been read
    if encoding in ("", "utf-8", "utf8"):
        return _utf8(body, bool(encoding))
    return _mislabelled(body) or _as(body, encoding)


def _label(match: re.Match[bytes]) -> str:
    return match[1].decode("ascii", "replace").lower()


def _utf8(body: bytes, declared: bool) -> str:
    """UTF-8, unless many bytes are invalid; a character cut off at the end is ignored."""
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        text = body.decode("utf-8", "replace")
        few = text.count("\ufffd") <= (len(body) // 500 if declared else 0)
        if few or error.start >= len(body) - 3:
            return text
    return _as(body, "")


def _mislabelled(body: bytes) -> str:
    """The text if it is UTF-8, up to a character cut off at the end, and not ASCII alone."""
    try:
        text = codecs.utf_8_decode(body, "strict", False)[0]
    except UnicodeDecodeError:
        return ""
    return "" if text.isascii() else text


def _as(body: bytes, encoding: str) -> str:
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    known = map_encoding_to_html5(encoding, fallback_utf8=False) if encoding else None
    html5_encoding: Any = known or detect_encoding(body)
    return str(bytes_to_str(body, html5_encoding))


class Net(NamedTuple):
    """W1[features, hidden], b1[hidden], W2[hidden], b2."""

    inner: np.ndarray
    bias: np.ndarray
    outer: np.ndarray
    shift: np.float32

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Probabilities, float32[rows]."""
        hidden = np.maximum(rows @ self.inner + self.bias, 0)
        logits = np.clip(hidden @ self.outer + self.shift, -30, 30)
        return np.asarray(1 / (1 + np.exp(-logits)), np.float32)


@cache
def nets() -> tuple[Net, Net]:
    """Both networks, read once per process."""
    text = files("sabia.core.web.extraction").joinpath(WEIGHTS).read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return _net(rows, "1", NAMES), _net(rows, "2", SECOND_NAMES)


def _net(rows: list[list[str]], stage: str, names: tuple[str, ...]) -> Net:
    table = {row[1]: np.array(row[2:], np.float32) for row in rows if row[0] == stage}
    if set(table) != {*names, "(bias)", "(output)"}:
        raise ValueError(f"{WEIGHTS} does not fit the features of stage {stage}: fit it again")
    output = table["(output)"]
    inner = np.stack([table[name] for name in names])
    return Net(inner, table["(bias)"], output[:-1], np.float32(output[-1]))


def probabilities(page: Page) -> np.ndarray:
    """The probability that each block belongs to the main text, float32[blocks]."""
    first, second = nets()
    rows = features(page)
    return second(second_features(page, rows, first(rows)))


def doubt(page: Page, p: np.ndarray) -> float:
    """Expected bytes of misclassified blocks over expected bytes of text."""
    size = page.blocks[:, 2]
    return float((size * np.minimum(p, 1 - p)).sum() / max(float((size * p).sum()), 1.0))


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
    nets()


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
    p = probabilities(page)
    chosen = p > THRESHOLD
    words = page.blocks[:, _WORDS]
    enough = int(words[chosen].sum()) >= min(FEW_WORDS, int(words.sum()))
    if enough and doubt(page, p) <= DOUBT:
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
