"""Words of a document by instructions on 64 bytes at a time: the compiled tokeniser.

Three steps, each a tight loop over arrays. `normalised` writes the folded text (ASCII 64 bytes at a
time, other code points through the tables of text.folding). `find_tokens` turns each 64 bytes of it
into bit masks of letters and marks, whose changes are the starts and ends of tokens. `hash_tokens`
hashes a token by its eight-byte chunks. Definition of the hashes: sabia.kernels.minhash.
"""

import numpy as np

from sabia.kernels.minhash.definitions import CHUNK_BASE, EXACT_STEP, TOKEN_BASE
from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.folding import MARK, SKIP, SOLO, SOLO_END, SPACE, TABLE_SIZE
from sabia.kernels.text.memory_numba import (
    bytes_between,
    copy_lower,
    set_bits,
    trailing_zeros,
    word_at,
)
from sabia.kernels.text.utf8_numba import decode, mix

U = np.uint64
BLOCK = 64
PADDING = 2 * BLOCK
AHEAD = 16  # tokens in a block of most texts, at most
_ALL = U(0xFFFFFFFFFFFFFFFF)
_P, _Q = U(CHUNK_BASE), U(TOKEN_BASE)
_C0, _C1, _C2 = (U(step) for step in EXACT_STEP)
jit = njit(nogil=True, boundscheck=False)


@jit
def _encode(text, n, code):
    """Append the UTF-8 bytes of a code point; returns the new length."""
    if code < 0x80:
        text[n] = code
        return n + 1
    if code < 0x800:
        text[n] = 0xC0 | (code >> 6)
        text[n + 1] = 0x80 | (code & 0x3F)
        return n + 2
    if code < 0x10000:
        text[n] = 0xE0 | (code >> 12)
        text[n + 1] = 0x80 | ((code >> 6) & 0x3F)
        text[n + 2] = 0x80 | (code & 0x3F)
        return n + 3
    text[n] = 0xF0 | (code >> 18)
    text[n + 1] = 0x80 | ((code >> 12) & 0x3F)
    text[n + 2] = 0x80 | ((code >> 6) & 0x3F)
    text[n + 3] = 0x80 | (code & 0x3F)
    return n + 4


@jit
def _append(text, n, code, folds, kinds, marks):
    """Append a folded code point >= 0x80; solos are put between spaces, marks set bits."""
    if code < TABLE_SIZE:
        kind, code = np.int64(kinds[code]), np.int64(folds[code])
    else:
        kind = SOLO if code < SOLO_END else MARK
    if kind == SKIP:
        return n
    if kind == SPACE:
        text[n] = 0x20
        return n + 1
    if kind == SOLO:
        text[n] = 0x20
        n = _encode(text, n + 1, code)
        text[n] = 0x20
        return n + 1
    end = _encode(text, n, code)
    if kind == MARK and code >= 0x80:
        for i in range(n, end):
            marks[i >> 6] |= U(1) << U(i & 63)
    return end


@jit
def normalised(data, i, end, folds, kinds, text, marks):
    """Write the folded text of data[i:end], and a bit for each byte of a non-ASCII mark.

    Returns its length; PADDING zero bytes follow it.
    """
    n = 0
    marks[: ((end - i) * 2 + PADDING) // BLOCK + 1] = U(0)
    while i < end:
        left = min(end - i, BLOCK)
        if i + BLOCK <= data.shape[0]:
            other = copy_lower(data, i, text, n)
        else:  # the end of the last document
            other = U(0)
            for k in range(left):
                byte = data[i + k]
                text[n + k] = byte | (0x20 if 0x41 <= byte <= 0x5A else 0)
                other |= U(byte >> 7) << U(k)
        ascii_bytes = min(trailing_zeros(other), left)  # before the first other one
        n += ascii_bytes
        i += ascii_bytes
        if ascii_bytes == left:
            continue
        code, used = decode(data, i, end)
        i += used
        if code == 0x20:
            text[n] = 0x20
            n += 1
        else:
            n = _append(text, n, code, folds, kinds, marks)
    text[n : n + PADDING] = 0
    return n


@jit
def _append_positions(bits, base, positions, count):
    """Append base + the position of each set bit; returns their number in all. AHEAD entries are
    written without a branch (the end of a loop over the bits is hard to predict)."""
    n = count + U(set_bits(bits))
    for k in range(U(AHEAD)):
        positions[count + k] = base + trailing_zeros(bits)
        bits &= bits - U(1)
    for k in range(count + U(AHEAD), n):
        positions[k] = base + trailing_zeros(bits)
        bits &= bits - U(1)
    return n


@jit
def find_tokens(text, n, marks, starts, ends):
    """Fill starts and ends of tokens, and the bits of all marks; returns the number of tokens and
    that of their code points.

    Letters in a row are one token, each byte of a mark is one. marks: bits of non-ASCII ones.
    """
    first, last, characters = U(0), U(0), 0
    letter_before, mark_before = U(0), U(0)
    for base in range(0, n + 1, BLOCK):
        beyond = bytes_between(text, base, 0x80, 0xFF)  # of non-ASCII code points
        letters = bytes_between(text, base, 0x61, 0x7A) | bytes_between(text, base, 0x30, 0x39)
        letters |= bytes_between(text, base, 0x5F, 0x5F) | beyond
        points = bytes_between(text, base, 0x21, 0x7E) & ~letters  # other printable ASCII
        if beyond:
            # bytes 10xxxxxx continue a code point
            characters -= set_bits(bytes_between(text, base, 0x80, 0xBF))
        other = marks[base >> 6]  # bytes of non-ASCII marks
        letters &= ~other
        points |= other
        marks[base >> 6] = points
        characters += set_bits(letters | points)
        shifted = (letters << U(1)) | letter_before
        start = (letters & ~shifted) | points  # a letter after no letter, or a mark
        # no letter after a letter, or the byte after a mark
        end = (~letters & shifted) | (points << U(1)) | mark_before
        letter_before, mark_before = letters >> U(63), points >> U(63)
        first = _append_positions(start, base, starts, first)
        last = _append_positions(end, base, ends, last)
    return np.int64(first), characters


@jit
def hash_tokens(text, count, marks, starts, ends, words, exact):
    """Fill the hashes of words, and exact[2] over all tokens; returns the number of words."""
    for j in range(count):
        position = starts[j]
        length = ends[j] - position
        token = U(length)
        while length > 16:
            token = (token ^ word_at(text, position)) * _P  # h = (h ^ c) * P
            token ^= token >> U(32)
            position += 8
            length -= 8
        # the last one or two chunks: both computed, for a branch here is often mispredicted
        token = (token ^ (word_at(text, position) & (_ALL >> U(64 - 8 * min(length, 8))))) * _P
        token ^= token >> U(32)
        rest = _ALL >> U(64 - 8 * max(length - 8, 1))
        longer = (token ^ (word_at(text, position + 8) & rest)) * _P
        longer ^= longer >> U(32)
        token = (longer if length > 8 else token) * _Q
        words[j] = token ^ (token >> U(29))
    exact0, exact1 = U(0), U(0)
    for j in range(count):  # apart from the other loops, so that it becomes vector instructions
        exact0 += mix(words[j] + U(j) * _C0)  # mix(t_j + j * C0)
        exact1 += mix(words[j] ^ (U(j) * _C1 + _C2))  # mix(t_j ^ (j * C1 + C2))
    exact[0] = mix(exact0 + U(count))
    exact[1] = mix(exact1 + U(count))
    word_count = 0
    for j in range(count):
        words[word_count] = words[j]
        is_mark = (marks[starts[j] >> 6] >> U(starts[j] & 63)) & U(1)
        word_count += 1 - np.int64(is_mark)
    return word_count
