"""The units of repeated spans, and the conversion of spans of units to byte ranges.

Bytes: the UTF-8 text itself. Tokens: ids of a tokenizer, special tokens encoded as ordinary text;
the bytes of a token are those of the characters that no other token covers. A cut never splits a
character.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.spools import Spool
from sabia.core.text.dedup.piece_bounds import byte_positions
from sabia.core.text.dedup.repeated_spans import UnitBounds
from sabia.core.text.tokenize.tokenizer import Tokenizer


class UnitsOfTexts(NamedTuple):
    """Units of some texts: values[offsets[i]:offsets[i + 1]], where offsets[0] is 0."""

    values: np.ndarray
    offsets: np.ndarray
    bounds: np.ndarray  # uint32[units, 2]: byte range of each token in its text; none of bytes


class ByteUnits:
    """Units are bytes."""

    name, fingerprint = "bytes", ""

    def __init__(self) -> None:
        self.spool, self.array = Spool(), np.empty(0, np.uint8)

    def read(self, texts: pa.Array) -> UnitsOfTexts:
        """The units of texts; safe to call from several threads."""
        data, offsets = text_buffers(texts)
        none = np.empty((0, 2), np.uint32)
        return UnitsOfTexts(data[offsets[0] : offsets[-1]], offsets - offsets[0], none)

    def keep(self, values: np.ndarray, bounds: np.ndarray) -> None:
        """Append units to those on disk."""
        self.spool.append(values)

    def values(self, count: int) -> np.ndarray:
        """All `count` units on disk."""
        self.array = self.spool.array(np.uint8, (count,))
        return self.array

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See repeated_spans.Units: spans shrink to whole characters."""
        low, high = self._moved(first, 1), self._moved(last, -1)
        high[:-1][joined] = low[1:][joined]
        return low - starts, np.maximum(high, low) - starts

    def _moved(self, positions: np.ndarray, step: int) -> np.ndarray:
        """Positions moved to the next boundary of characters, forwards or backwards."""
        positions = positions.copy()
        for _ in range(3):
            inside = positions < len(self.array)
            inside[inside] = (self.array[positions[inside]] & 0xC0) == 0x80
            positions[inside] += step
        return positions


class TokenUnits(UnitBounds):
    """Units are tokens, stored with the byte range of each."""

    name = "tokens"

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer, self.fingerprint, self.spool = tokenizer, tokenizer.fingerprint, Spool()

    def read(self, texts: pa.Array) -> UnitsOfTexts:
        """See ByteUnits."""
        listed = texts.to_pylist()
        ids, spans = self.tokenizer.encode_ordinary_with_offsets(listed)
        bounds = [_own_bytes(text, pairs) for text, pairs in zip(listed, spans, strict=True)]
        all_bounds = np.concatenate([np.empty((0, 2), np.uint32), *bounds])
        values = [np.asarray(each, np.int32) for each in ids]
        offsets = np.cumsum([0, *map(len, values)])
        return UnitsOfTexts(np.concatenate([np.empty(0, np.int32), *values]), offsets, all_bounds)

    def keep(self, values: np.ndarray, bounds: np.ndarray) -> None:
        """See ByteUnits."""
        self.spool.append(values)
        self.add(bounds)

    def values(self, count: int) -> np.ndarray:
        """See ByteUnits."""
        return self.spool.array(np.int32, (count,))


SpanUnits = ByteUnits | TokenUnits


def _own_bytes(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """uint32[t, 2]: the bytes of characters that no other token shares, for spans of characters."""
    own = np.array(spans, np.int64).reshape(-1, 2)
    low, high = own[:, 0].copy(), own[:, 1].copy()
    low[1:] = np.maximum(low[1:], own[:-1, 1])
    high[:-1] = np.minimum(high[:-1], own[1:, 0])
    own = np.stack((low, np.maximum(high, low)), axis=1)
    return (own if text.isascii() else byte_positions(text)[own]).astype(np.uint32)
