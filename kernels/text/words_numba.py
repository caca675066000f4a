"""The compiled form of sabia.kernels.text.words: bytes to code points, code points to words.

Words are (start, end) indices of code points of one document. The listed chunks are found by
a filter on their length, first and last code point, then by hash. Equal to text.words on all texts.
Functions take arrays one by one and are compiled without reference counts (numba's `_nrt`): they
would take more time than all the rest.
"""

import functools

import numpy as np

from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text import words
from sabia.kernels.text.character_flags import (
    AFFIX,
    ALPHA,
    CURRENCY,
    DIGIT,
    HAN,
    ICON,
    LOWER,
    QUOTE,
    SOLO,
    SPACE,
    SYMBOL,
    UPPER,
)
from sabia.kernels.text.folding import SOLO_END, TABLE_SIZE
from sabia.kernels.text.memory_numba import byte_at, flagged, trailing_zeros, word_at
from sabia.kernels.text.utf8_numba import mix
from sabia.kernels.text.words import BLOCK_BASE, LONGEST_SPECIAL, LONGEST_UNIT, WORD_BASE

U = np.uint64
_P, _B = U(WORD_BASE), U(BLOCK_BASE)
_ALL, _HIGH = ~U(0), U(0x8080808080808080)
_LETTER_OR_DIGIT = ALPHA | DIGIT
_OPENERS, _CLOSERS = AFFIX | CURRENCY | ICON, AFFIX | ICON
_SLOTS = 4096
_DOT, _PLUS, _DASH, _EM, _EN, _PERCENT = 0x2E, 0x2B, 0x2D, 0x2014, 0x2013, 0x25
_jit = njit(nogil=True, boundscheck=False, _nrt=False)
_inline = njit(nogil=True, boundscheck=False, _nrt=False, forceinline=True)


@functools.lru_cache(maxsize=1)
def tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(hash slots uint64, parting points int64, lengths as bits by first and last code point
    uint16[128, 128], hashes of units uint64)."""
    slots, points = np.zeros(_SLOTS, np.uint64), np.zeros(_SLOTS, np.int64)
    entries = sorted((words.chunk_hash(word), at) for word, at in words.specials().items())
    for key, point in entries:
        at = key % _SLOTS
        while slots[at]:
            at = (at + 1) % _SLOTS
        slots[at], points[at] = key, point
    pairs = np.zeros((128, 128), np.uint16)
    for word in words.specials():
        # bit `length`: a listed chunk of this length may match
        pairs[ord(word[0]) & 127, ord(word[-1]) & 127] |= 1 << len(word)
    return slots, points, pairs, np.array(sorted(map(words.chunk_hash, words.UNITS)), np.uint64)


@_jit
def wide(data, i):
    """(code point, bytes used) of well-formed UTF-8 with a lead byte of 0x80 or more at i."""
    first = np.int64(data[i])
    code, used = first & 0x1F, 2  # payload of a two-byte lead
    if first >= 0xF0:
        code, used = first & 0x07, 4
    elif first >= 0xE0:
        code, used = first & 0x0F, 3
    for j in range(1, used):
        code = (code << 6) | np.int64(data[i + j] & 0x3F)
    return code, used


@_jit
def decode(data, start, end, flag_table, codes, flags, first_bytes):
    """Fill codes int32, flags uint16 and first_bytes int32 (from `start`, and the length after the
    last) of one document; return how many. Needs space for end - start + 8 entries."""
    i, count = start, 0
    while i < end:
        if i + 8 <= end:
            ascii = trailing_zeros(word_at(data, i) & _HIGH) >> 3
            for j in range(8):  # those behind the ASCII characters are overwritten
                target, code = U(count) + U(j), data[U(i) + U(j)]  # unsigned: see memory_numba
                codes[target], first_bytes[target] = code, i - start + j
                flags[target] = flag_table[code]
            i, count = i + ascii, count + ascii
            if ascii == 8:
                continue
        code, used = byte_at(data, i), 1
        if code >= 0x80:
            code, used = wide(data, i)
        codes[count], first_bytes[count] = code, i - start
        if code < TABLE_SIZE:
            flags[count] = flag_table[code]
        else:
            flags[count] = HAN if code < SOLO_END else SYMBOL
        i, count = i + used, count + 1
    first_bytes[count] = end - start
    return count


@_jit
def mark_words(codes, flags, start, end, letters, spaces):
    """Put a space after the code points from `start`, a multiple of 64, to `end`; set their bits in
    `letters` (those of words of several) and `spaces`, uint64 for 64 code points each; return the
    number of the block behind them. Needs space for 64 code points and 2 blocks after `end`."""
    behind = end // 64 + 1
    codes[end] = 0x20
    flags[end : 64 * behind] = SPACE
    for block in range(start // 64, behind):
        letters[block] = flagged(flags, 64 * block, ALPHA) & ~flagged(flags, 64 * block, SOLO)
        spaces[block] = flagged(flags, 64 * block, SPACE)
    letters[behind], spaces[behind] = U(0), U(0)
    return behind


@_inline
def next_clear(bits, i):
    """The first place from i on whose bit is 0."""
    block = i >> 6
    rest = ~bits[block] >> U(i & 63)
    if rest:
        return i + trailing_zeros(rest)
    block += 1
    while bits[block] == _ALL:
        block += 1
    return (block << 6) + trailing_zeros(~bits[block])


@_inline
def next_set(bits, i):
    """The first place from i on whose bit is 1; there must be one."""
    block = i >> 6
    rest = bits[block] >> U(i & 63)
    if rest:
        return i + trailing_zeros(rest)
    block += 1
    while not bits[block]:
        block += 1
    return (block << 6) + trailing_zeros(bits[block])


@_inline
def chunk_hash(codes, start, end):
    """The hash of a listed chunk; as text.words.chunk_hash."""
    total = U(0)
    for i in range(start, end):
        total = total * _P + U(codes[i] + 1)  # sum of (code + 1) * P**(length-1-i)
    return mix(total)


@_inline
def word_hash(data, start, end):
    """The hash of data[start:end], behind which 7 bytes can be read; as text.words.word_hash."""
    total, i = U(end - start) * _P, start
    while i + 8 < end:
        total = (total ^ word_at(data, i)) * _B
        total ^= total >> U(32)
        i += 8
    if i < end:
        total = (total ^ (word_at(data, i) & (_ALL >> U(8 * (i + 8 - end))))) * _B
        total ^= total >> U(32)
    return mix(total)


@_jit
def split(
    codes, flags, letters, spaces, start, end, slots, points, pairs, units, starts, ends, count
):
    """Append the words of codes[start:end], where a space follows; return the new count. Needs
    space for end - start words. letters, spaces: see `mark_words`."""
    first = next_clear(spaces, start)
    while first < end:
        low, high = first, first + 1
        if not flags[first] & SOLO:
            while flags[low] & AFFIX:
                low += 1
            high = next_clear(letters, low)
        # the common case: letters with punctuation around them
        last = high if high > low else -1
        while last >= 0 and not flags[last] & (SPACE | SOLO):
            if not flags[last] & AFFIX:
                stops = codes[last] == _DOT and flags[last - 1] & (LOWER | AFFIX)
                if not stops or codes[last + 1] == _DOT:
                    last = -2
            last += 1
        if flags[first] & SOLO:
            last = high
        elif last < 0 or _listed(codes, first, low, high, last, slots, points, pairs):
            last = high
            while not flags[last] & (SPACE | SOLO):
                last += 1
            count = _chunk(
                codes, flags, first, last, slots, points, pairs, units, starts, ends, count
            )
            first = next_clear(spaces, last)
            continue
        for j in range(first, low):
            starts[count], ends[count] = j, j + 1
            count += 1
        starts[count], ends[count] = low, high
        count += 1
        for j in range(high, last):
            starts[count], ends[count] = j, j + 1
            count += 1
        first = next_clear(spaces, last)
    return count


@_inline
def _listed(codes, start, low, high, end, slots, points, pairs):
    """Whether a chunk from start to end with letters from low to high is listed without some of
    the marks around the letters."""
    for first in range(max(start, high - LONGEST_SPECIAL), low + 1):
        for last in range(high, min(end, low + LONGEST_SPECIAL) + 1):
            if _special(codes, first, last, slots, points, pairs) >= 0:
                return True
    return False


@_inline
def _filtered(codes, low, high, pairs):
    return (pairs[codes[low] & 127, codes[high - 1] & 127] >> (high - low)) & 1


@_jit
def _special(codes, low, high, slots, points, pairs):
    """Where a listed chunk parts (0: nowhere); -1 if it is not listed."""
    if high - low > LONGEST_SPECIAL or high <= low or not _filtered(codes, low, high, pairs):
        return -1
    key = chunk_hash(codes, low, high)
    slot = np.int64(key & U(_SLOTS - 1))
    while slots[slot]:
        if slots[slot] == key:
            return points[slot]
        slot = (slot + 1) & (_SLOTS - 1)
    return -1


@_jit
def _chunk(codes, flags, low, high, slots, points, pairs, units, starts, ends, count):
    """Append the words of a chunk: prefixes, the middle, suffixes (stacked at the arrays' end)."""
    top = starts.shape[0]
    point = _special(codes, low, high, slots, points, pairs)
    while low < high and point < 0:
        cut = _prefix(codes, flags, low, high)
        if cut:
            starts[count], ends[count] = low, low + cut
            count += 1
            low += cut
            point = _special(codes, low, high, slots, points, pairs)
            if point >= 0:
                break
        tail = _suffix(codes, flags, low, high, units)
        if tail:
            top -= 1
            starts[top], ends[top] = high - tail, high
            high -= tail
        if cut == 0 and tail == 0:
            break
        point = _special(codes, low, high, slots, points, pairs)
    if low < high:
        if point > 0:
            starts[count], ends[count] = low, low + point
            starts[count + 1], ends[count + 1] = low + point, high
            count += 2
        elif point == 0 or _is_address(codes, flags, low, high):
            starts[count], ends[count] = low, high
            count += 1
        else:
            count = _middle(codes, flags, low, high, starts, ends, count)
    for j in range(top, starts.shape[0]):
        starts[count], ends[count] = starts[j], ends[j]
        count += 1
    return count


@_jit
def _dots(codes, low, high):
    count = 0
    while low + count < high and codes[low + count] == _DOT:
        count += 1
    return count


@_jit
def _prefix(codes, flags, low, high):
    code = codes[low]
    if code == _DOT:
        dots = _dots(codes, low, high)
        return dots if dots > 1 else 0
    if code == _PLUS:
        return 0 if low + 1 < high and flags[low + 1] & DIGIT else 1
    if flags[low] & _OPENERS or code in (0xA7, _PERCENT, 0x3D, _EM, _EN):
        return 1
    return 0


@_jit
def _suffix(codes, flags, low, high, units):
    if high <= low:
        return 0
    code, last = codes[high - 1], flags[high - 1]
    before = flags[high - 2] if high - low > 1 else np.uint16(0)
    if code == _DOT:
        dots = 1
        while high - dots > low and codes[high - dots - 1] == _DOT:
            dots += 1
        if dots > 1:
            return dots
        if high - low < 2:
            return 0
        if before & (LOWER | DIGIT | AFFIX) or codes[high - 2] in (_PERCENT, 0xB2, _DASH, _PLUS):
            return 1
        return 1 if before & UPPER and high - low > 2 and flags[high - 3] & UPPER else 0
    if code in (0x73, 0x53) and high - low > 1 and codes[high - 2] in (0x27, 0x2019):
        return 2
    if last & _CLOSERS or code in (_EM, _EN):
        return 1
    if before & DIGIT and (last & CURRENCY or code == _PLUS):
        return 1
    for size in range(LONGEST_UNIT, 0, -1):
        before_unit = high - size - 1
        if before_unit >= low and flags[before_unit] & DIGIT and not last & DIGIT:
            key = chunk_hash(codes, high - size, high)
            slot = np.searchsorted(units, key)
            if slot < units.shape[0] and units[slot] == key:
                return size
    return 0


@_jit
def _host_code(code):
    letter = (code | 0x20 >= 0x61) and (code | 0x20) <= 0x7A
    return code >= 0x80 or letter or 0x30 <= code <= 0x39 or code in (_DASH, 0x5F)


@_jit
def _is_address(codes, flags, low, high):
    dotted = False
    for i in range(low, high):
        if codes[i] == _DOT:
            dotted = True
            break
    if not dotted:
        return False
    if _is_host(codes, flags, _after_user(codes, low, high), high):
        return True
    for i in range(low + 2, high - 2):
        if codes[i] == 0x3A and codes[i + 1] == 0x2F and codes[i + 2] == 0x2F:
            if _scheme(codes, flags, low, i):
                user = _after_user(codes, i + 3, high)
                return _is_host(codes, flags, user, high) or _is_host(codes, flags, i + 3, high)
            break
    return _is_host(codes, flags, low, high)


@_jit
def _scheme(codes, flags, low, high):
    for i in range(low, high):
        there = codes[i] in (_PLUS, _DOT, _DASH, 0x5F)
        if not (there or flags[i] & _LETTER_OR_DIGIT):
            return False
    return True


@_jit
def _after_user(codes, low, high):
    """Behind the first @ with something before it, else `low`."""
    for i in range(low, high):
        if codes[i] == 0x40:
            return i + 1 if i > low else low
    return low


@_jit
def _is_host(codes, flags, low, high):
    """host, port and path from low to high: the pattern of text.words.is_address."""
    end = low
    while end < high and codes[end] not in (0x2F, 0x3F, 0x23, 0x3A, 0x40):
        end += 1
    top, i = end, low
    while top > low and codes[top - 1] != _DOT:
        top -= 1
    if top == low or end - top < 2:
        return False
    for i in range(top, end):
        if not flags[i] & LOWER:
            return False
    label = low
    for i in range(low, top):
        if codes[i] == _DOT:
            if i == label or codes[label] in (_DASH, 0x5F):
                return False
            label = i + 1
        elif not _host_code(codes[i]):
            return False
    if end < high and codes[end] == 0x3A:
        digits = 0
        end += 1
        while end < high and flags[end] & DIGIT:
            digits += 1
            end += 1
        if digits < 2 or digits > 5:
            return False
    return end == high or codes[end] in (0x2F, 0x3F, 0x23)


@_jit
def _middle(codes, flags, low, high, starts, ends, count):
    start, i = low, low
    while i < high:
        size = 0 if flags[i] & _LETTER_OR_DIGIT else _infix(codes, flags, low, i, high)
        if size:
            if i > start:
                starts[count], ends[count] = start, i
                count += 1
            starts[count], ends[count] = i, i + size
            count += 1
            start = i + size
        i += max(size, 1)
    if high > start:
        starts[count], ends[count] = start, high
        count += 1
    return count


@_jit
def _infix(codes, flags, low, i, high):
    code = codes[i]
    dots = _dots(codes, i, high)
    if dots > 1:
        return dots
    if code == 0x2026 or flags[i] & ICON:
        return 1
    before = flags[i - 1] if i > low else np.uint16(0)
    after = flags[i + 1] if i + 1 < high else np.uint16(0)
    figures = after & DIGIT or (i + 1 < high and codes[i + 1] == _DASH)
    if code in (_PLUS, _DASH, 0x2A, 0x5E) and before & DIGIT and figures:
        return 1
    if code == _DOT:
        return 1 if before & (LOWER | QUOTE) and after & (UPPER | QUOTE) else 0
    if code == 0x2C:
        return 1 if before & ALPHA and after & ALPHA else 0
    if not before & _LETTER_OR_DIGIT:
        return 0
    if code in (0x3A, 0x3C, 0x3E, 0x3D, 0x2F):
        return 1 if after & ALPHA else 0
    most = 3 if code == _DASH else 2 if code == _EM else 1 if code in (_EN, 0x7E) else 0
    size = 0
    while size < most and i + size < high and codes[i + size] == code:
        size += 1
    return size if size and i + size < high and flags[i + size] & ALPHA else 0
