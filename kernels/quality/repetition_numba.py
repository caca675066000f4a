"""What a text repeats: its paragraphs, lines and n-grams of words.

Lines and words are hashed as bytes. Sets and counts are open-addressed tables that are kept for the
batch: entries carry the stamp of their set, so that a new set needs no clearing. A repeated
(k+1)-gram holds two repeated k-grams, so that only those are counted; pairs of words are first
counted in a bitmap of their hashes.
"""

import numpy as np

from sabia.kernels.quality.definitions import SHORT_LINE
from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.character_flags import SPACE, TERMINAL
from sabia.kernels.text.words_numba import next_clear, word_hash

U = np.uint64
_M = U(0xA0761D6478BD642F)
_FEED, _SHORT, _NAN = 0x0A, SHORT_LINE, np.nan
_jit = njit(nogil=True, boundscheck=False, _nrt=False)
_inline = njit(nogil=True, boundscheck=False, _nrt=False, forceinline=True)


@_inline
def share(part, whole):
    """part / whole; NaN of nothing."""
    return part / whole if whole else _NAN


@_inline
def _seen(table, last, stamp, key):
    """Slot of a key in the set `stamp` of slots 0 to last, and whether it was in the set; the key
    is added."""
    slot = np.int64(key & U(last))  # linear probing; slots of other stamps are free
    while table[slot, 1] == stamp:
        if table[slot, 0] == key:
            return slot, True
        slot = (slot + 1) & last
    table[slot, 0], table[slot, 1] = key, stamp
    return slot, False


@_inline
def last_slot(count):
    """The last slot of a table for `count` keys: 2**b - 1, at least twice as many."""
    last = 63
    while last < 2 * count:
        last = 2 * last + 1
    return last


@_jit
def _paragraphs(codes, raw, first_bytes, low, high, breaks, count, table, stamp):
    """(paragraphs of the stripped text from low to high, those seen before, their characters)."""
    parts, again, characters, first, j = 0, 0, 0, low, 0
    last = last_slot(count // 2 + 1)
    while j <= count:
        end, run = high, 0
        if j < count and low <= breaks[j] < high:
            end = breaks[j]
            while j + run < count and breaks[j + run] == end + run and codes[end + run] == _FEED:
                run += 1
        elif j < count:
            j += 1
            continue
        if end == high or run >= 2:
            if parts == 0 and end == high:
                return 1, 0, 0  # the only one
            parts += 1
            key = word_hash(raw, first_bytes[first], first_bytes[end])
            if _seen(table, last, stamp, key)[1]:
                again += 1
                characters += end - first
            first = end + run
        j += max(run, 1)
    return parts, again, characters


@_jit
def paragraph_figures(
    codes, flags, raw, first_bytes, size, spaces, breaks, count, table, stamp, out
):
    """The statistics of paragraphs: out[8:10]."""
    low, high = min(next_clear(spaces, 0), size), size
    while high > low and flags[high - 1] & SPACE:  # strip
        high -= 1
    parts, again, characters = _paragraphs(
        codes, raw, first_bytes, low, high, breaks, count, table, stamp
    )
    # gopher_dup_paragraphs, gopher_dup_paragraph_chars
    out[8], out[9] = share(again, parts) if size else _NAN, share(characters, size)


@_jit
def fed_lines(codes, flags, raw, first_bytes, size, spaces, breaks, count, table, stamp, n, out):
    """The statistics of lines between line feeds: out[10:12] and out[25:29]."""
    parts, again, characters, feeds, start = 0, 0, 0, 0, 0
    lines, ends, short, repeated = 0, 0, 0, 0
    last = last_slot(count + 1)
    for j in range(count + 1):
        end = breaks[j] if j < count else size
        if j < count and codes[end] != _FEED:
            continue
        feeds += j < count
        if end > start:
            key = word_hash(raw, first_bytes[start], first_bytes[end])
            there = _seen(table, last, stamp, key)[1]
            parts += 1
            if there:
                again += 1
                characters += end - start
            if next_clear(spaces, start) < end:
                lines += 1
                ends += flags[end - 1] & TERMINAL != 0
                short += end - start <= _SHORT
                repeated += end - start if there else 0
        start = end + 1
    if size and codes[0] == _FEED:  # before the first line feeds and after the last: empty parts
        parts += 1
        again += codes[size - 1] == _FEED
    if size and codes[size - 1] == _FEED:
        parts += 1
    # gopher_dup_lines, gopher_dup_line_chars
    out[10], out[11] = share(again, parts), share(characters, size)
    # fineweb_punctuated_lines, fineweb_short_lines
    out[25], out[26] = share(ends, lines), share(short, lines)
    # fineweb_dup_chars, fineweb_newline_ratio
    out[27], out[28] = share(repeated, size - feeds), share(feeds, n)


@_jit
def repetition(hashes, lengths, n, size, grams, where, slots, once, twice, table, stamp, out):
    """The statistics of n-grams: out[12:21]; return the last stamp used."""
    count = _pairs_twice(hashes, n, grams, where, once, twice)
    for k in range(2, 11):
        stamp += U(1)
        if k > 2:  # a repeated k-gram holds two repeated (k-1)-grams (from k = 6 on: 4-grams)
            count = _adjacent(where, count)
            for j in range(count):
                i = where[j]
                grams[i] = grams[i] * _M + hashes[i + k - 1]  # hash of the k-gram from word i
        if k <= 4:
            characters, count = _top(grams, where, count, slots, lengths, n, k, table, stamp)
            out[10 + k] = share(characters, size)
            continue
        repeated = _repeated(grams, where, count, lengths, k, table, stamp)
        for later in range(k, 11):
            out[10 + later] = share(repeated, size)
        if repeated == 0:
            break
    return stamp


@_jit
def _pairs_twice(hashes, n, grams, where, once, twice):
    """Fill grams with the hashes of pairs of words, `where` with the places of those whose bit of
    the bitmaps is set twice; return how many."""
    last = min(64 * once.shape[0], 8 * (last_slot(n) + 1)) - 1
    once[: last // 64 + 1], twice[: last // 64 + 1] = U(0), U(0)
    for i in range(n - 1):
        grams[i] = hashes[i] * _M + hashes[i + 1]
        position = np.int64(grams[i] & U(last))
        bit = U(1) << U(position & 63)
        twice[position >> 6] |= once[position >> 6] & bit
        once[position >> 6] |= bit
    count = 0
    for i in range(n - 1):
        position = np.int64(grams[i] & U(last))
        where[count] = i
        count += np.int64(twice[position >> 6] >> U(position & 63)) & 1
    return count


@_jit
def _adjacent(where, count):
    """Keep those of the ascending places that the next place follows; return how many."""
    kept = 0
    for j in range(count - 1):
        i = where[j]
        where[kept] = i
        kept += where[j + 1] == i + 1
    return kept


@_jit
def _top(grams, where, count, slots, lengths, n, k, table, stamp):
    """(times × length of the most frequent k-gram, the earliest of them; the number of repeated
    k-grams, whose places remain in `where`). Only k-grams of `where` can be repeated."""
    if n < k:
        return 0, 0
    best, earliest, last = 1, 0, last_slot(count)
    for j in range(count):
        i = where[j]
        slot, there = _seen(table, last, stamp, grams[i])
        if not there:
            table[slot, 2], table[slot, 3] = 0, i
        slots[j] = slot
        table[slot, 2] += U(1)
        times, first = np.int64(table[slot, 2]), np.int64(table[slot, 3])
        if times > best or (times == best and first < earliest):
            best, earliest = times, first
    kept = 0
    for j in range(count):
        where[kept] = where[j]
        kept += table[slots[j], 2] > 1
    length = k - 1  # the spaces between the words
    for i in range(earliest, earliest + k):
        length += lengths[i]
    return best * length, kept


@_jit
def _repeated(grams, where, count, lengths, k, table, stamp):
    """Characters in k-grams that came before; such a k-gram is skipped as a whole."""
    characters, behind, last = 0, 0, last_slot(count)
    for j in range(count):
        i = where[j]
        if i >= behind and _seen(table, last, stamp, grams[i])[1]:
            behind = i + k
            for w in range(i, behind):
                characters += lengths[w]
    return characters
