"""The scanner's reading of text: bytes into the current block, with its counts.

Blanks are folded as in a browser (`pre` apart); a word continues across inline tags; a word is
looked up by its hash when it ends.
"""

import numpy as np

from sabia.kernels.html import layout
from sabia.kernels.html.definitions import (
    COMMA,
    DIGIT,
    FURNITURE_WORD,
    HIGH,
    LOWER,
    OTHER,
    REFERENCE,
    SPACE,
    STOP,
    STOP_WORD,
    UPPER,
    WORD_PRIME,
    WORD_SEED,
)
from sabia.kernels.html.markup_numba import find, is_markup
from sabia.kernels.runtime.numba_jit import njit

U = np.uint64
_SEED, _PRIME = U(WORD_SEED), U(WORD_PRIME)
_jit = njit(nogil=True, boundscheck=False)


@_jit
def read_text(data, i, n, text, blocks, state, stack, kinds, word_keys, word_values):
    """Read text up to markup into the current block; returns the position of the markup."""
    top = stack[state[layout.DEEP] - 1]
    if top[layout.S_FLAGS] & layout.UNSEEN_FLAG:
        return find(data, i + 1, n, layout.LT)
    block, out = blocks[state[layout.BLOCKS]], state[layout.OUT]
    if block[layout.BYTES] == 0:
        block[layout.START], block[layout.SOURCE] = out, state[layout.SINCE]
    inside, gap, start = state[layout.INSIDE], state[layout.GAP], out
    value = U(state[layout.HASH])
    pre = top[layout.S_FLAGS] & layout.PRE_FLAG
    while i < n:
        c = data[i]
        if c == layout.LT and is_markup(data, i, n):
            break
        kind = kinds[c]
        used = 1
        if kind == REFERENCE:
            used, kind = _reference(data, i, n)
        elif c == 0xC2 and i + 1 < n and data[i + 1] == 0xA0:  # U+00A0, no-break space
            used, kind = 2, SPACE
        if kind == SPACE:
            if inside:
                _end_word(value, block, word_keys, word_values)
                inside = 0
            if pre and block[layout.BYTES] + out - start > 0:
                text[out] = 10 if c == 10 else 32  # `pre` keeps each blank
                out += 1
            gap = 1
            i += used
            continue
        # a run of blanks becomes one space, none at the start of a block or line
        if gap and not pre and block[layout.BYTES] + out - start > 0 and text[out - 1] != 10:
            text[out] = 32
            out += 1
        gap = 0
        if kind in (LOWER, UPPER, DIGIT, HIGH, REFERENCE):
            if not inside:
                inside, value = 1, _SEED
                block[layout.WORDS] += 1
                block[layout.CAPITALS] += kind == UPPER
            block[layout.DIGITS] += kind == DIGIT
            # FNV-1a of the lower-case word
            value = (value ^ U(c | 32 if kind == UPPER else c)) * _PRIME
            if c == 0xE3 or c == 0xEF:
                _wide_mark(data, i, n, block)
        else:
            if inside:
                _end_word(value, block, word_keys, word_values)
                inside = 0
            block[layout.COMMAS] += kind == COMMA
            after = data[i + 1] if i + 1 < n else layout.LT
            if kind == STOP and (
                kinds[after] == SPACE or after == layout.LT or after == layout.QUOTE
            ):
                block[layout.SENTENCES] += 1
        for k in range(used):  # copy the bytes as they are
            text[out] = data[i + k]
            out += 1
        i += used
    block[layout.BYTES] += out - start
    block[layout.SOURCE_END] = i
    if state[layout.LINK] >= 0:
        block[layout.LINK_BYTES] += out - start
    state[layout.HASH] = np.int64(value)
    state[layout.INSIDE], state[layout.GAP], state[layout.OUT] = inside, gap, out
    return i


@_jit
def _reference(data, i, n):
    """(length, kind) of the character reference at i; a bare & is a mark of one byte."""
    k = i + 1
    while k < n and k < i + 32 and (48 <= data[k] <= 57 or 97 <= (data[k] | 32) <= 122
                                    or data[k] == 35):  # fmt: skip
        k += 1
    if k >= n or data[k] != 59 or k == i + 1:
        return 1, OTHER
    if k == i + 5 and (data[i + 1] == 110 and data[i + 2] == 98 and data[i + 3] == 115):
        return 6, SPACE  # &nbsp;
    if k == i + 5 and data[i + 1] == 35 and data[i + 2] == 49 and data[i + 3] == 54:
        return 6, SPACE  # &#160;
    if data[i + 1] == 35 or k - i > 7 or k - i < 6:
        return k + 1 - i, OTHER  # quotation marks and dashes, mostly
    return k + 1 - i, REFERENCE


@_jit
def _wide_mark(data, i, n, block):
    """Count full-width commas and stops, which are three bytes."""
    if i + 2 >= n:
        return
    b, c = data[i + 1], data[i + 2]
    if data[i] == 0xE3 and b == 0x80:
        block[layout.SENTENCES] += c == 0x82  # U+3002
        block[layout.COMMAS] += c == 0x81  # U+3001
    elif data[i] == 0xEF and b == 0xBC:
        block[layout.SENTENCES] += c == 0x81 or c == 0x9F  # U+FF01, U+FF1F
        block[layout.COMMAS] += c == 0x8C or c == 0x9A or c == 0x9B  # U+FF0C, U+FF1A, U+FF1B


@_jit
def _end_word(value, block, word_keys, word_values):
    size = U(len(word_keys))
    slot = ((value * _SEED) >> U(40)) % size  # the slot that `_hashed` in tables gives
    while word_keys[slot] != 0 and word_keys[slot] != value:
        slot = (slot + U(1)) % size
    if word_keys[slot] == value:
        block[layout.STOP_WORDS] += word_values[slot] == STOP_WORD
        block[layout.FURNITURE] += word_values[slot] == FURNITURE_WORD
