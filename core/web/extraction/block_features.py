"""The features of each text block of a page, as one row of numbers; and the text of chosen blocks.

The input is the flat table of `sabia.kernels.html`. The features follow Kohlschütter et al. 2010
(density of text and links, also of the neighbours) and Vogels et al. 2018 (position in the tree).
They are counts: sizes; shares of links, marks, short words and words typical of navigation; tags
and class hints of the element, its parent and all ancestors; the share of the page's prose in the
element and in the elements around it. A second row of features adds the probabilities that the
first network gives to the neighbours, the elements around, and the page before and after.
"""

import html
import re

import numpy as np

from sabia.kernels.html import definitions
from sabia.kernels.html.definitions import FLAG_NAMES, HINT_NAMES, Page
from sabia.kernels.html.interface import gathered

TAGS = ("p", "div", "li", "td", "h1", "h2", "h3", "h4", "pre", "span", "section", "article",
        "blockquote", "a", "figcaption", "button", "body")  # fmt: skip
LEVELS = 4  # how many elements around a block are looked at
AROUND = (-2, -1, 1, 2)
_COLUMN = {name: i for i, name in enumerate(definitions.COLUMNS)}
_ELEMENT = {name: i for i, name in enumerate(definitions.ELEMENT_COLUMNS)}
_TAG_NUMBERS = np.array([definitions.TAG_NAMES.index(name) + 1 for name in TAGS])
_LEVEL_NAMES = ("bytes", "prose_share", "links", "prose", "blocks")
_NEAR_NAMES = ("bytes", "links", "stop_words", "sentences")
_PRE = 1 << FLAG_NAMES.index("pre")
_WORD = re.compile(r"\w+")
_SENTENCE_ENDS = np.isin(np.arange(256), np.frombuffer(b".!?:\"';)", np.uint8))
SIZES = (
    "bytes", "words", "links", "link_count", "commas", "sentences", "digits", "capitals",
    "stop_words", "furniture", "letters", "breaks", "ended", "begins_small", "place", "place_bytes",
    "depth", "after_h1", "page_prose", "page_links", "long", "short",
)  # fmt: skip
NAMES = (
    *SIZES,
    *(f"tag_{name}" for name in TAGS),
    *(f"in_{name}" for name in FLAG_NAMES),
    *(f"{element}_{name}" for element in ("own", "parent", "above") for name in HINT_NAMES),
    *(f"level{level}_{name}" for level in range(LEVELS) for name in _LEVEL_NAMES),
    *(f"near{step:+d}_{name}" for step in AROUND for name in _NEAR_NAMES),
)


def features(page: Page) -> np.ndarray:
    """One row a block: float32[blocks, len(NAMES)], all within about -1 and 2."""
    blocks, elements = page.blocks, page.elements
    count = len(blocks)
    sizes = _sizes(page)
    tags = elements[blocks[:, _COLUMN["element"]], _ELEMENT["tag"]]
    parts = [
        sizes,
        tags[:, None] == _TAG_NUMBERS,
        _bits(blocks[:, _COLUMN["flags"]], len(FLAG_NAMES)),
        *(_bits(blocks[:, _COLUMN[name]], len(HINT_NAMES))
          for name in ("own", "parent", "ancestors")),
        _levels(blocks, elements),
        *(_shifted(sizes[:, [0, 2, 8, 5]], step) for step in AROUND),
    ]  # fmt: skip
    return np.concatenate([part.astype(np.float32) for part in parts], axis=1).reshape(count, -1)


SECOND_STEPS = (-3, -2, -1, 1, 2, 3)
SECOND_LEVELS = 5
SECOND_NAMES = (
    *NAMES, "guess",
    *(f"guess{step:+d}" for step in SECOND_STEPS),
    "guess_element", "guess_parent",
    *(f"guess_{part}_level{level}" for level in range(SECOND_LEVELS) for part in ("mean", "share")),
    "guess_before", "guess_after", "guess_around",
)  # fmt: skip
_WINDOW, _WINDOW_BYTES = 4, 200


def second_features(page: Page, first: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """`features` and what the guess (float32[blocks], 0 to 1) says: float32[blocks, …]."""
    size = page.blocks[:, _COLUMN["bytes"]].astype(np.float32)
    element, up = page.blocks[:, _COLUMN["element"]], page.elements[:, _ELEMENT["up"]]
    own = np.zeros((len(up), 2), np.float32)
    own[:, 0] = np.bincount(element, size * guess, len(up))
    own[:, 1] = np.bincount(element, size, len(up))
    whole = gathered(own, up)
    total = max(float(whole[0, 0]), 1.0)
    before = np.cumsum(size * guess)
    parts = [guess, *(_shifted(guess, step) for step in SECOND_STEPS),
             *(_mean(own[index]) for index in (element, up[element]))]  # fmt: skip
    index = element
    for _ in range(SECOND_LEVELS):
        parts += [_mean(whole[index]), whole[index, 0] / total]
        index = up[index]
    parts += [(before - size * guess) / total, 1 - before / total,
              _moving_mean(guess, np.minimum(size, _WINDOW_BYTES))]  # fmt: skip
    return np.concatenate([first, np.stack(parts, axis=1).astype(np.float32)], axis=1)


def _mean(sums: np.ndarray) -> np.ndarray:
    return sums[:, 0] / np.maximum(sums[:, 1], 1)


def _moving_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted mean over _WINDOW rows to both sides."""
    totals = np.cumsum(np.stack([values * weights, weights], 1), 0)
    sums = np.concatenate([np.zeros((1, 2)), totals])
    rows = np.arange(len(values))
    low, high = np.maximum(rows - _WINDOW, 0), np.minimum(rows + _WINDOW + 1, len(values))
    return _mean(sums[high] - sums[low])


def _bits(values: np.ndarray, count: int) -> np.ndarray:
    return values[:, None] >> np.arange(count, dtype=np.int32) & 1


def _shifted(rows: np.ndarray, step: int) -> np.ndarray:
    """Row i + step at row i, zeros beyond the ends."""
    out = np.zeros_like(rows)
    if step > 0:
        out[:-step] = rows[step:]
    else:
        out[-step:] = rows[:step]
    return out


def _sizes(page: Page) -> np.ndarray:
    blocks = page.blocks.astype(np.float32)
    column = {name: blocks[:, i] for name, i in _COLUMN.items()}
    size, words = column["bytes"], np.maximum(column["words"], 1)
    total = np.maximum(size.sum(), 1)
    first, last = page.text[page.blocks[:, 0]], page.text[page.blocks[:, 1] - 1]
    count = max(len(blocks), 1)
    h1 = page.blocks[:, _COLUMN["flags"]] >> FLAG_NAMES.index("h1") & 1
    root = page.elements[0].astype(np.float32)
    ones = np.ones(len(blocks), np.float32)
    share = np.minimum(
        np.stack([column[name] for name in ("commas", "sentences", "digits", "capitals",
                                            "stop_words", "furniture")]) / words, 2)  # fmt: skip
    return np.stack(
        [np.log1p(size) / 6, np.log1p(column["words"]) / 5,
         column["link_bytes"] / np.maximum(size, 1), np.log1p(column["links"]), *share,
         np.minimum(size / words / 8, 2), np.log1p(column["breaks"]) / 3, _SENTENCE_ENDS[last],
         (first >= 97) & (first <= 122), np.arange(len(blocks)) / count,
         (np.cumsum(size) - size / 2) / total, column["depth"] / 30,
         np.minimum(np.cumsum(h1), 1), ones * np.log1p(root[_ELEMENT["prose"]]) / 10,
         ones * root[_ELEMENT["link_bytes"]] / total, size > 200, column["words"] < 5]
    ).T  # fmt: skip


def _levels(blocks: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Of the block's element and those above it: what they hold."""
    table = elements.astype(np.float32)
    size = np.maximum(table[:, _ELEMENT["bytes"]], 1)
    prose = table[:, _ELEMENT["prose"]]
    facts = np.stack(
        [np.log1p(size) / 10, prose / np.maximum(prose[0], 1),
         table[:, _ELEMENT["link_bytes"]] / size, prose / size,
         np.log1p(table[:, _ELEMENT["blocks"]]) / 6], axis=1
    )  # fmt: skip
    index, rows = blocks[:, _COLUMN["element"]], []
    for _ in range(LEVELS):
        rows.append(facts[index])
        index = elements[index, _ELEMENT["up"]]
    return np.concatenate(rows, axis=1)


def text_of(page: Page, chosen: np.ndarray) -> str:
    """The chosen blocks (bool[blocks]), a line each; cells of one table row share a line.

    Blanks are folded, except in `pre`; empty lines and null bytes are left out.
    """
    raw = page.text.tobytes()
    lines: list[str] = []
    row_before = 0
    starts, ends, rows, flags = (page.blocks[:, _COLUMN[name]].tolist()
                                 for name in ("start", "end", "row", "flags"))  # fmt: skip
    for i in np.flatnonzero(chosen).tolist():
        line = raw[starts[i] : ends[i]].decode("utf-8", "replace")
        if "&" in line:
            line = html.unescape(line)
        pre, parts = flags[i] & _PRE, line.replace("\0", "").split("\n")
        parts = [part.rstrip() if pre else " ".join(part.split()) for part in parts]
        line = "\n".join(part for part in parts if part)
        if not line:
            continue
        if rows[i] and rows[i] == row_before:
            lines[-1] += " | " + line
        else:
            lines.append(line)
        row_before = rows[i]
    return "\n".join(lines)


def blocks_in(page: Page, text: str) -> np.ndarray:
    """The blocks whose text is in a text that another extractor chose, bool[blocks]: half of their
    runs of three words are in it, or for shorter blocks all their words are a line or cell."""
    words = _WORD.findall(text)
    runs = set(zip(words, words[1:], words[2:], strict=False))
    short = {tuple(_WORD.findall(cell)) for line in text.split("\n") for cell in line.split("|")}
    raw, inside = page.text.tobytes(), np.zeros(len(page.blocks), bool)
    for i, (start, end) in enumerate(page.blocks[:, :2].tolist()):
        own = _WORD.findall(html.unescape(raw[start:end].decode("utf-8", "replace")))
        known = [run in runs for run in zip(own, own[1:], own[2:], strict=False)]
        inside[i] = 2 * sum(known) >= len(known) if known else bool(own) and tuple(own) in short
    return inside
