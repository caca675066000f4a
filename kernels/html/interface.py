"""HTML to a flat table of text blocks in one linear pass: definition and entry points.

No object tree is built. A scanner (numba_impl) follows the tokens of the HTML
standard (section 13.2.5: tags, attributes, comments, raw text) over UTF-8 bytes and keeps the stack
of open elements with the rules that matter for text: implied ends of p, li, dt, dd, tr, td and
headings (13.2.6), scopes of table cells, elements without an end. The output:

- blocks: runs of text between two block-level tags, blanks folded, `br` as a line feed, `pre` kept,
  character references left as they are; with counts of bytes, words, link bytes, punctuation, small
  words, words of furniture; the tags and class hints of the ancestors; the element they stand in;
- elements: block-level ones, with the parent and the text, link and prose bytes below them;
- marks: spans of `a`, `meta`, `base`, `html`, `title` and `time` in the source, for callers that
  need their attributes.

Every loop is bounded by the input or by a constant: at most DEPTH open elements (deeper ones count
as one), MAX_BLOCKS blocks (the last takes the rest), MAX_MARKS marks; so time and memory are linear
whatever the page holds.
"""

import numpy as np

from sabia.kernels.html.definitions import Page
from sabia.kernels.html.tables import tables


def scan(data: np.ndarray) -> Page:
    """The blocks, elements and marks of a page of UTF-8 bytes, uint8[n]."""
    from sabia.kernels.html import numba_impl

    return Page(*numba_impl.scan(np.ascontiguousarray(data), tables()))


def gathered(values: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Each element's values, float32[elements, k], with those of all elements below it added."""
    from sabia.kernels.html import numba_impl

    return numba_impl.gathered(values, np.ascontiguousarray(up))


def warm_up() -> None:
    """Compile the scanner or load it from its cache, before the first page."""
    page = scan(np.frombuffer(b"<p>a</p>", np.uint8))
    gathered(np.zeros((len(page.elements), 2), np.float32), page.elements[:, 0])
