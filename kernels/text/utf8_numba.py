"""UTF-8 decoding and the 64-bit finaliser, compiled inline into the kernels that read text."""

import numpy as np

from sabia.kernels.runtime.numba_jit import njit

U = np.uint64
inline = njit(nogil=True, inline="always")


@inline
def mix(x):
    """The splitmix64 finaliser of a uint64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return x ^ (x >> U(31))


@inline
def decode(data, i, end):
    """(code point, bytes used) of a lead byte >= 0x80 at i; (space, 1) if it is malformed."""
    first = np.int64(data[i])
    if 0xC2 <= first < 0xE0 and i + 2 <= end and (data[i + 1] & 0xC0) == 0x80:
        return ((first & 0x1F) << 6) | np.int64(data[i + 1] & 0x3F), 2
    if 0xE0 <= first < 0xF0 and i + 3 <= end:
        if (data[i + 1] & 0xC0) == 0x80 and (data[i + 2] & 0xC0) == 0x80:
            low = (np.int64(data[i + 1] & 0x3F) << 6) | np.int64(data[i + 2] & 0x3F)
            return ((first & 0x0F) << 12) | low, 3
    elif 0xF0 <= first < 0xF5 and i + 4 <= end:
        a, b, c = data[i + 1], data[i + 2], data[i + 3]
        if (a & 0xC0) == 0x80 and (b & 0xC0) == 0x80 and (c & 0xC0) == 0x80:
            low = (np.int64(b & 0x3F) << 6) | np.int64(c & 0x3F)
            return ((first & 0x07) << 18) | (np.int64(a & 0x3F) << 12) | low, 4
    return np.int64(0x20), 1
