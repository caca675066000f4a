"""Texts of a batch as code points, words and lines: the common ground of the text measures.

No Python object per document. A word is a run of letters, digits, marks and `_` (or one character
of a script written without spaces), lower-cased, accents kept; an apostrophe ends a word.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sabia.kernels import minhash_reference as reference
from sabia.kernels.text_table import LETTER, SKIP, SOLO, SOLO_END, TABLE_SIZE, folding_tables

CHUNK_BYTES = 1 << 20
_NEWLINE = 0x0A


@functools.lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lower case uint32, kind without folding uint8, is alphabetic bool), each [TABLE_SIZE]."""
    folds, kinds = folding_tables()
    lower = np.arange(TABLE_SIZE, dtype=np.uint32)
    for code in np.flatnonzero(folds != lower).tolist():
        small = chr(code).lower()
        lower[code] = ord(small) if len(small) == 1 else code
    words = (kinds == LETTER) | (kinds == SOLO)
    alphabetic = np.zeros(TABLE_SIZE, bool)
    places = np.flatnonzero(words)
    alphabetic[places] = [chr(code).isalpha() for code in places.tolist()]
    return lower, kinds, alphabetic


def code_points(data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(code points int64[c], bounds int64[n + 1]) of UTF-8 documents."""
    raw = data[offsets[0] : offsets[-1]]
    try:
        codes = np.frombuffer(raw.tobytes().decode().encode("utf-32-le"), np.uint32)
    except UnicodeDecodeError:
        codes, document, _ = reference.decode(data, offsets)
        counts = np.bincount(document, minlength=len(offsets) - 1)
        return codes, np.concatenate(([0], np.cumsum(counts)))
    heads = np.concatenate(([0], np.cumsum((raw & 0xC0) != 0x80)))
    return codes.astype(np.int64), heads[offsets - offsets[0]]


def chunks(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of documents of about CHUNK_BYTES together."""
    low, n = 0, len(offsets) - 1
    while low < n:
        limit = offsets[low] + CHUNK_BYTES
        high = max(int(np.searchsorted(offsets, limit, side="right")) - 1, low + 1)
        yield low, high
        low = high


def sums(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Sum of values[bounds[i]:bounds[i+1]] for each i; float64[n]."""
    if values.dtype == bool:
        return np.diff(np.searchsorted(np.flatnonzero(values), bounds)).astype(float)
    running = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    return running[bounds[1:]] - running[bounds[:-1]]


@dataclass(frozen=True)
class Texts:
    """n documents: code points int64[c], and where each document's begin (bounds int64[n + 1])."""

    codes: np.ndarray
    bounds: np.ndarray

    @property
    def count(self) -> int:
        """Number of documents."""
        return len(self.bounds) - 1

    @cached_property
    def document(self) -> np.ndarray:
        """The document of each code point, int64[c]."""
        return np.repeat(np.arange(self.count), np.diff(self.bounds))

    def _look_up(self, table: np.ndarray) -> np.ndarray:
        return table[np.minimum(self.codes, TABLE_SIZE - 1)]

    @cached_property
    def lower(self) -> np.ndarray:
        """Code points in lower case, int64[c]."""
        beyond = self.codes >= TABLE_SIZE
        return np.where(beyond, self.codes, self._look_up(_tables()[0])).astype(np.int64)

    @cached_property
    def kind(self) -> np.ndarray:
        """Kind of each code point (text_table), uint8[c]."""
        kinds = self._look_up(_tables()[1])
        solo = (self.codes >= TABLE_SIZE) & (self.codes < SOLO_END)
        return np.where(solo, SOLO, kinds)

    @cached_property
    def alphabetic(self) -> np.ndarray:
        """True for letters, bool[c]."""
        return self._look_up(_tables()[2]) | (self.codes >= TABLE_SIZE)

    @cached_property
    def word_spans(self) -> tuple[np.ndarray, np.ndarray]:
        """(first code point int64[w], one past the last int64[w]) of each word."""
        letter, document = self.kind == LETTER, self.document
        joined = letter[1:] & letter[:-1] & (document[1:] == document[:-1])
        first, last = letter | (self.kind == SOLO), letter | (self.kind == SOLO)
        first[1:] &= ~joined
        last[:-1] &= ~joined
        return np.flatnonzero(first), np.flatnonzero(last) + 1

    @cached_property
    def word_bounds(self) -> np.ndarray:
        """Where each document's words begin, int64[n + 1]."""
        return np.searchsorted(self.word_spans[0], self.bounds)

    @cached_property
    def word_hash(self) -> np.ndarray:
        """uint64[w] of each word in lower case."""
        return reference.mix(reference.run_hashes(self.lower, *self.word_spans))

    @cached_property
    def line_spans(self) -> tuple[np.ndarray, np.ndarray]:
        """(start, end) int64[l] of lines that are not blank, without space at their ends."""
        ink = np.flatnonzero(self.kind != 0)
        if not len(ink):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        line = np.cumsum(self.codes == _NEWLINE) + self.document  # grows at each line and document
        owner = line[ink]
        first = np.concatenate(([True], owner[1:] != owner[:-1]))
        last = np.concatenate((first[1:], [True]))
        return ink[first], ink[last] + 1

    @cached_property
    def line_bounds(self) -> np.ndarray:
        """Where each document's lines begin, int64[n + 1]."""
        return np.searchsorted(self.line_spans[0], self.bounds)


def texts_of(data: np.ndarray, offsets: np.ndarray, low: int, high: int) -> Texts:
    """Documents low to high of a batch, without invisible and combining code points."""
    texts = Texts(*code_points(data, offsets[low : high + 1]))
    skip = texts.kind == SKIP
    if not skip.any():
        return texts
    gone = np.concatenate(([0], np.cumsum(skip)))
    return Texts(texts.codes[~skip], texts.bounds - gone[texts.bounds])


def text_of(text: str) -> Texts:
    """One document."""
    raw = np.frombuffer(text.encode(), np.uint8)
    return texts_of(raw, np.array([0, len(raw)], np.int64), 0, 1)
