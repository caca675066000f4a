"""UTF-8 decoding, folding and the 64-bit finaliser in plain Python and NumPy."""

import functools

import numpy as np

from sabia.kernels.text.folding import MARK, SKIP, SOLO, SOLO_END, SPACE, TABLE_SIZE, folding_tables

MASK64 = (1 << 64) - 1
_U = np.uint64


def mix_int(value: int) -> int:
    """The splitmix64 finaliser on a Python integer."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix(value: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, elementwise on uint64."""
    value = (value ^ (value >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> _U(27))) * _U(0x94D049BB133111EB)
    return value ^ (value >> _U(31))


def decode(data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(code points int64[c], their documents int64[c], their first bytes int64[c]) of UTF-8 bytes.

    A byte outside a well-formed sequence gives a space; sequences do not cross documents.
    """
    data = data[offsets[0] : offsets[-1]]
    bounds = offsets - offsets[0]
    document = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    left = bounds[1:][document] - np.arange(len(data))  # bytes to the document's end
    padded = np.concatenate((data, np.zeros(3, np.uint8))).astype(np.int64)
    tail = [(padded[i : i + len(data)] & 0xC0) == 0x80 for i in range(4)]
    low = [padded[i : i + len(data)] & 0x3F for i in range(4)]
    first = padded[: len(data)]
    # lead bytes of well-formed sequences of two bytes
    two = (first >= 0xC2) & (first < 0xE0) & tail[1] & (left >= 2)
    three = (first >= 0xE0) & (first < 0xF0) & tail[1] & tail[2] & (left >= 3)
    four = (first >= 0xF0) & (first < 0xF5) & tail[1] & tail[2] & tail[3] & (left >= 4)
    code = np.where(first < 0x80, first, 0x20)
    code = np.where(two, (first & 0x1F) << 6 | low[1], code)
    code = np.where(three, (first & 0x0F) << 12 | low[1] << 6 | low[2], code)
    wide = (first & 0x07) << 18 | low[1] << 12 | low[2] << 6 | low[3]
    code = np.where(four, wide, code)
    inside = np.zeros(len(data) + 3, bool)  # bytes that belong to an earlier lead byte
    for leads, length in ((two, 2), (three, 3), (four, 4)):
        for step in range(1, length):
            inside[np.flatnonzero(leads) + step] = True
    starts = np.flatnonzero(~inside[: len(data)])
    return code[starts], document[starts], starts


def folded(code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(folded code points, kinds) by the tables and the rules above them."""
    folds, kinds = folding_tables()
    small = np.minimum(code, TABLE_SIZE - 1)
    beyond = code >= TABLE_SIZE
    kind = np.where(beyond, np.where(code < SOLO_END, SOLO, MARK), kinds[small])
    return np.where(beyond, code, folds[small]), kind


def compared_characters(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64[n]: code points of each document, of well-formed UTF-8, that words and marks consist
    of: without white space, combining diacritics and format characters (SPACE and SKIP)."""
    weights, first_bytes, ignored = _ignored_characters()
    data = data[offsets[0] : offsets[-1]]
    bounds = offsets - offsets[0]
    result = np.zeros(len(bounds) - 1, np.int64)
    some = np.flatnonzero(np.diff(bounds))
    if len(some):
        result[some] = np.add.reduceat(weights[data], bounds[some], dtype=np.int64)
    at = np.flatnonzero(first_bytes[data])
    first = data[at].astype(np.int64)
    length = 2 + (first >= 0xE0) + (first >= 0xF0)
    code = first & (0x7F >> length)
    for step in range(1, 4):
        longer = np.flatnonzero(length > step)
        code[longer] = code[longer] << 6 | (data[at[longer] + step] & 0x3F)
    at = at[ignored[np.minimum(code, TABLE_SIZE)]]
    document = np.searchsorted(bounds, at, side="right") - 1
    return result - np.bincount(document, minlength=len(result))


@functools.lru_cache(maxsize=1)
def _ignored_characters() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(uint8[256]: 1 for the first bytes of characters, 0 for those of ASCII that are ignored;
    bool[256]: first bytes of other ignored characters; bool[TABLE_SIZE + 1]: ignored ones)."""
    kinds = folding_tables()[1]
    ignored = np.append((kinds == SPACE) | (kinds == SKIP), False)
    ignored[0xD800:0xE000] = False  # surrogates have no UTF-8
    weights, first_bytes = np.ones(256, np.uint8), np.zeros(256, bool)
    weights[:0x80], weights[0x80:0xC0] = ~ignored[:0x80], 0
    others = np.flatnonzero(ignored[0x80:]) + 0x80
    first_bytes[[chr(code).encode()[0] for code in others.tolist()]] = True
    return weights, first_bytes, ignored
