"""Boundaries of the lines, paragraphs and sentences of a batch of texts, in bytes.

Pieces of a text are adjacent: a line includes its line break, a paragraph the blank lines after it,
a sentence the white space before the next. So cutting pieces leaves well-formed text.
"""

from collections.abc import Callable, Iterator
from itertools import zip_longest

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.text.sentences import split_lines

_SPACES = np.zeros(256, bool)
_SPACES[list(b" \t\n\r\f\v")] = True


def line_bounds(texts: pa.Array) -> np.ndarray:
    """int64[m + 1], ascending: where lines start in the texts' buffer, and the end of the last."""
    data, bounds = text_buffers(texts)
    breaks = np.flatnonzero(data[bounds[0] : bounds[-1]] == ord("\n")) + 1 + bounds[0]
    return np.unique(np.concatenate((bounds, breaks)))


def paragraph_bounds(texts: pa.Array) -> np.ndarray:
    """As `line_bounds`, of paragraphs: lines up to and including the blank lines after them."""
    data, bounds = text_buffers(texts)
    lines = line_bounds(texts)
    marks = np.cumsum(~_SPACES[data[lines[0] : lines[-1]]], dtype=np.int64)
    written = np.concatenate(([0], marks))[lines - lines[0]]
    blank = np.diff(written) == 0
    opens = np.ones(len(lines), bool)
    opens[1:-1] = blank[:-1] & ~blank[1:]
    return lines[opens | np.isin(lines, bounds)]


def sentence_bounds(texts: pa.Array) -> np.ndarray:
    """As `line_bounds`, of sentences as defined in sabia.core.text.sentences."""
    _, bounds = text_buffers(texts)
    parts = [bounds]
    for text, start in zip(texts.to_pylist(), bounds[:-1].tolist(), strict=True):
        starts = np.fromiter(_sentence_starts(text), np.int64)[1:]
        parts.append(start + (starts if text.isascii() else byte_positions(text)[starts]))
    return np.unique(np.concatenate(parts))


def _sentence_starts(text: str) -> Iterator[int]:
    lines, breaks = split_lines(text)
    line_start = 0
    for line, gap in zip(lines, [*breaks, ""], strict=True):
        position = line_start + len(line.lead)
        for sentence, space in zip_longest(line.sentences, line.gaps, fillvalue=""):
            yield position
            position += len(sentence) + len(space)
        line_start += len(str(line)) + len(gap)


def byte_positions(text: str) -> np.ndarray:
    """int64[len(text) + 1]: the byte of UTF-8 at which each character begins, and the end."""
    data = np.frombuffer(text.encode(), np.uint8)
    return np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))


BOUNDS: dict[str, Callable[[pa.Array], np.ndarray]] = {
    "line": line_bounds, "paragraph": paragraph_bounds, "sentences": sentence_bounds,
}  # fmt: skip
