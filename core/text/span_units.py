"""The units that repeated spans are made of, and how spans of units become cuts of bytes.

Bytes: the UTF-8 text itself. Tokens: ids of a tokenizer, special tokens read as ordinary text; the
bytes of a token are those of the characters that it covers alone. A cut never parts a character.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sabia.core.text.cuts import CUT
from sabia.core.text.sketching import Spool, text_buffers
from sabia.core.text.tokenizer import Tokenizer, load_tokenizer
from sabia.kernels.substring import Repeats


class Read(NamedTuple):
    """Units of some texts: values[offsets[i]:offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray
    bounds: np.ndarray | None = None  # uint32[units, 2]: the bytes of its text that each covers


class Units(Protocol):
    """How texts become units, and units bytes."""

    name: str
    fingerprint: str

    def read(self, texts: pa.Array) -> Read:
        """The units of texts; safe to call from several threads."""

    def keep(self, read: Read) -> None:
        """Add units to those on disk, in order."""

    def values(self, count: int) -> np.ndarray:
        """All units kept."""

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes [low, high) of spans of units [first, last), within their documents.

        starts: of the spans' documents; joined[i]: span i + 1 begins where span i ends, and so
        must their bytes.
        """


class Bytes:
    """Units are bytes."""

    name, fingerprint = "bytes", ""

    def __init__(self) -> None:
        self.spool, self.array = Spool(), np.empty(0, np.uint8)

    def read(self, texts: pa.Array) -> Read:
        """See Units."""
        return Read(*text_buffers(texts))

    def keep(self, read: Read) -> None:
        """See Units."""
        self.spool.append(read.values[read.offsets[0] : read.offsets[-1]])

    def values(self, count: int) -> np.ndarray:
        """See Units."""
        self.array = self.spool.array(np.uint8, (count,))
        return self.array

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See Units: spans shrink to whole characters."""
        low, high = self._moved(first, 1), self._moved(last, -1)
        high[:-1][joined] = low[1:][joined]
        return low - starts, np.maximum(high, low) - starts

    def _moved(self, places: np.ndarray, step: int) -> np.ndarray:
        """Positions moved to the next boundary of characters, forwards or backwards."""
        places = places.copy()
        for _ in range(3):
            inside = places < len(self.array)
            inside[inside] = (self.array[places[inside]] & 0xC0) == 0x80
            places[inside] += step
        return places


@dataclass
class Tokens:
    """Units are tokens; the bytes of each are kept beside it."""

    tokenizer: Tokenizer
    name: str = "tokens"

    @classmethod
    def load(cls, path: str) -> "Tokens":
        """With the tokenizer of a file or directory."""
        return cls(load_tokenizer(path))

    def __post_init__(self) -> None:
        self.fingerprint = self.tokenizer.fingerprint
        self.spool, self.bound_spool, self.count = Spool(), Spool(), 0

    def read(self, texts: pa.Array) -> Read:
        """See Units."""
        listed = texts.to_pylist()
        ids, spans = self.tokenizer.encode_ordinary_with_offsets(listed)
        bounds = [_own_bytes(text, pairs) for text, pairs in zip(listed, spans, strict=True)]
        values = [np.asarray(each, np.int32) for each in ids]
        offsets = np.cumsum([0, *map(len, values)])
        return Read(
            np.concatenate([np.empty(0, np.int32), *values]),
            offsets,
            np.concatenate([np.empty((0, 2), np.uint32), *bounds]),
        )

    def keep(self, read: Read) -> None:
        """See Units."""
        self.spool.append(read.values)
        if read.bounds is not None:
            self.bound_spool.append(read.bounds)

    def values(self, count: int) -> np.ndarray:
        """See Units."""
        self.count = count
        return self.spool.array(np.int32, (count,))

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See Units."""
        del starts
        bounds = self.bound_spool.array(np.uint32, (self.count, 2))
        low, high = bounds[first, 0].astype(np.int64), bounds[last - 1, 1].astype(np.int64)
        high[:-1][joined] = low[1:][joined]
        return low, np.maximum(high, low)


def _own_bytes(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """uint32[t, 2]: the bytes of characters that no other token shares, for spans of characters."""
    own = np.array(spans, np.int64).reshape(-1, 2)
    low, high = own[:, 0].copy(), own[:, 1].copy()
    low[1:] = np.maximum(low[1:], own[:-1, 1])
    high[:-1] = np.minimum(high[:-1], own[1:, 0])
    own = np.stack((low, np.maximum(high, low)), axis=1)
    return (own if text.isascii() else byte_positions(text)[own]).astype(np.uint32)


def byte_positions(text: str) -> np.ndarray:
    """int64[len(text) + 1]: the byte of UTF-8 at which each character begins, and the end."""
    data = np.frombuffer(text.encode(), np.uint8)
    return np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))


def as_cuts(runs: Repeats, starts: np.ndarray, units: Units, span: int) -> np.ndarray:
    """CUT[c] of runs of repeats by rising start: disjoint, each with the copy that is kept.

    Where runs overlap, the earlier has the bytes they share. starts int64[n + 1]: of documents.
    """
    ends = runs.start + runs.count - 1 + span
    before = np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))
    low = np.maximum(runs.start, before)
    new = low < ends
    low, high, kept = low[new], ends[new], (runs.first + low - runs.start)[new]
    row, kept_row = (np.searchsorted(starts, at, side="right") - 1 for at in (low, kept))
    joined = high[:-1] == low[1:]
    joined &= row[:-1] == row[1:]
    cuts = np.empty(len(low), CUT)
    cuts["row"], cuts["kept"] = row, kept_row
    cuts["start"], cuts["stop"] = units.bytes_of(starts[row], low, high, joined)
    cuts["from"] = units.bytes_of(starts[kept_row], kept, kept + 1, np.zeros(len(joined), bool))[0]
    return cuts[cuts["start"] < cuts["stop"]]
