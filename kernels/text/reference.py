"""UTF-8 decoding, folding and the 64-bit finaliser in plain Python and NumPy."""

import numpy as np

from sabia.kernels.text.folding import MARK, SOLO, SOLO_END, TABLE_SIZE, folding_tables

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
