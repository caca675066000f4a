"""The compiled encoder of sabia.kernels.bpe: added tokens, pre-tokens, cache, merges, in one loop.

Cache rows are uint64 words: key bytes (zero-padded), then length | count << 8 | first id << 32,
then the other ids two a word; a row of length 0 is free. Four neighbouring rows make a bucket; a
new entry takes a free row of its bucket, else one chosen by its hash. Most pre-tokens fit a row of
32 bytes; longer ones, and those of more ids, have rows of 128.
"""

import numpy as np

from sabia.kernels.bpe.definitions import (
    BLANK,
    EMPTY,
    HASH_FACTOR,
    LARGE_KEY,
    LARGE_WORDS,
    METASPACE,
    PADDING,
    PREPEND_ALWAYS,
    PREPEND_FIRST,
    PREPEND_NORMALIZER,
    SMALL_KEY,
    SMALL_WORDS,
)
from sabia.kernels.bpe.merge_numba import SHORT, fill_symbols, merge_long, merge_short
from sabia.kernels.bpe.split_numba import (
    CHARACTERS,
    characters_end,
    code_at,
    entry_at,
    part_end,
    split_end,
)
from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.memory_numba import byte_at, word_at
from sabia.kernels.text.unicode_classes import CLASS_BITS

U = np.uint64
_FACTOR = U(HASH_FACTOR)
_FACTORS = (U(0xBF58476D1CE4E5B9), U(0x94D049BB133111EB), U(0xD6E8FEB86659FD93))
_F0, _F1, _F2 = _FACTORS
_MISSING = U(EMPTY)
_LOW = U(0xFFFFFFFF)
_jit = njit(nogil=True, boundscheck=False)
_inline = njit(nogil=True, forceinline=True)


@_inline
def _key_word(data, i, left):
    """The bytes data[i:i+left] as a word, zeros behind them."""
    if left <= 0:
        return U(0)
    word = word_at(data, i)
    return word if left >= 8 else word & ((U(1) << U(8 * left)) - U(1))


@_inline
def _hash_of_two(one, two, size):
    # multiply and xor-shift, with the multipliers of splitmix64
    h = (one ^ (size * _FACTOR)) * _F0
    h = (h ^ (h >> U(29)) ^ two) * _F1
    return h ^ (h >> U(32))


@_jit
def _hash_of(data, i, size):
    """The hash of data[i:i+size]; that of two words where they hold it."""
    one, two = _key_word(data, i, size), _key_word(data, i + 8, size - 8)
    h, j = _hash_of_two(one, two, U(size)), np.int64(16)  # the first 16 bytes
    while j < size:
        h = (h ^ _key_word(data, i + j, size - j)) * _F2
        h ^= h >> U(29)
        j += 8
    return h


@_jit
def fill_words(slots, data, spans):
    """Enter whole tokens by the hash of their bytes."""
    mask = U(len(slots) - 1)
    for n in range(len(spans)):
        slot = _hash_of(data.ctypes.data, spans[n, 0], spans[n, 1] - spans[n, 0]) & mask
        while slots[slot] >= 0:
            slot = (slot + U(1)) & mask
        slots[slot] = n


@_jit
def _whole(data, i, size, h, word_bytes, spans, ids, slots):
    """The id of the token that data[i:i+size] is, or -1."""
    mask = U(len(slots) - 1)
    slot = h & mask
    while slots[slot] >= 0:
        n = slots[slot]
        start = spans[n, 0]
        if spans[n, 1] - start == size:
            j = 0
            while j < size and word_bytes[start + j] == byte_at(data, i + j):
                j += 1
            if j == size:
                return ids[n]
        slot = (slot + U(1)) & mask
    return np.int32(-1)


@_inline
def _find_small(rows, base, first, second, size):
    """The offset of the row of a bucket whose key is (first, second), or _MISSING."""
    for row in range(base, base + U(4 * SMALL_WORDS), U(SMALL_WORDS)):
        head = rows[row + U(2)]  # length | count << 8 | first id << 32
        if rows[row] == first and rows[row + U(1)] == second and head & U(0xFF) == size:
            return row
    return _MISSING


@_jit
def _find_large(rows, base, data, i, size):
    """The offset of the row of a bucket whose key is data[i:i+size], or _MISSING."""
    for row in range(base, base + U(4 * LARGE_WORDS), U(LARGE_WORDS)):
        if rows[row + U(LARGE_KEY)] & U(0xFF) != U(size):
            continue
        word = 0
        while word < LARGE_KEY and rows[row + U(word)] == _key_word(
            data, i + 8 * word, size - 8 * word
        ):
            word += 1
        if word == LARGE_KEY:
            return row
    return _MISSING


@_jit
def _keep(rows, words, key, base, h, data, i, size, out, start, stop):
    """Enter out[start:stop] as the ids of data[i:i+size]; False where they do not fit."""
    count = stop - start
    # the head holds one id, every word behind it two
    if size > 8 * key or count > 1 + 2 * (words - key - 1):
        return False
    row = base + U(words) * ((h >> U(60)) & U(3))  # replaced if no row of the bucket is free
    for free in range(base, base + U(4 * words), U(words)):
        if rows[free + U(key)] == U(0):
            row = free
            break
    for word in range(key):
        rows[row + U(word)] = _key_word(data, i + 8 * word, size - 8 * word)
    rows[row + U(key)] = U(size) | U(count) << U(8) | U(out[start]) << U(32)
    for k in range(1, count):
        word, value = row + U(key + 1 + (k - 1) // 2), U(out[start + k])
        if (k - 1) % 2:
            rows[word] |= value << U(32)
        else:
            rows[word] = value
    return True


@_inline
def _copy(rows, head, out, o):
    """Write the ids of the row whose head is rows[head]; returns where they end."""
    word = rows[head]
    out[U(o)] = word >> U(32)  # the first id is in the head
    count = (word >> U(8)) & U(0xFF)
    k = U(1)
    while k < count:
        pair = rows[head + U(1) + ((k - U(1)) >> U(1))]
        out[U(o) + k] = pair & _LOW if k & U(1) else pair >> U(32)
        k += U(1)
    return o + np.int64(count)


@_jit
def _next_added(data, i, end, children, ids):
    """(start, stop, node) of the first added token from i, the longest there; (end, end, 0)."""
    while i < end:
        node, j, stop, last_node = children[0, byte_at(data, i)], i + 1, i, np.int32(0)
        while node:
            if ids[node] != -1:
                stop, last_node = j, node
            node = children[node, byte_at(data, j)] if j < end else np.int32(0)
            j += 1
        if last_node:
            return i, stop, last_node
        i += 1
    return end, end, np.int32(0)


@_jit
def _added_token(data, i, end, children, ids):
    """(start, stop, id) of the next added token that is taken; others are skipped as a whole."""
    at = i
    while len(children) > 1:
        start, stop, node = _next_added(data, at, end, children, ids)
        if node == 0:
            break
        if ids[node] >= 0:
            return start, stop, ids[node]
        at = stop
    return end, end, np.int32(-1)


@_jit
def flags_of(data, offsets, classes, result):
    """Combine the flags of all code points beyond ASCII by `or` into result[document]."""
    data, classes = data.ctypes.data, classes.ctypes.data
    for d in range(len(result)):
        i, end, flags = offsets[d], offsets[d + 1], np.int64(0)
        while i < end:
            # eight ASCII bytes at a time: they have no flags to collect
            if end - i >= 8 and word_at(data, i) & U(0x8080808080808080) == U(0):
                i += 8
                continue
            entry, size = entry_at(data, i, classes)
            flags |= entry & ~CLASS_BITS
            i += size
        result[d] = flags


@_jit
def _longest(spans):
    """Bytes of the longest token."""
    longest = np.int64(0)
    for n in range(len(spans)):
        longest = max(longest, spans[n, 1] - spans[n, 0])
    return longest


@_jit
def _spell_blanks(data, i, size, spelled):
    """Copy data[i:i+size] with METASPACE for each blank; returns the length, or -1 where the copy
    would be longer than every token."""
    n, longest = np.int64(0), len(spelled) - PADDING
    for k in range(i, i + size):
        byte = byte_at(data, k)
        if n + 3 > longest:
            return np.int64(-1)
        if byte == BLANK:
            spelled[n], spelled[n + 1] = 0xE2, 0x96
            n, byte = n + 2, 0x81
        spelled[n] = byte
        n += 1
    return n


@_jit
def _is_blank(data, i):
    return byte_at(data, i) == BLANK or code_at(data, i)[0] == METASPACE


@_inline
def _prepend(data, i, wanted):
    """Put a blank before i if wanted; returns where the text starts then. What is there has been
    encoded."""
    if wanted:
        i -= 1
        data[i] = BLANK
    return i


@_jit
def _encode_new(data, i, size, h, alphabet, pairs, words, symbols, merges, spelled, out, o):
    """Ids of a pre-token that is not in the cache; returns where they end."""
    word_bytes, spans, ids, slots = words
    if len(ids):
        whole = np.int32(-1)
        if alphabet[5]:  # a blank stands for METASPACE
            n = _spell_blanks(data, i, size, spelled)
            if n >= 0:
                address = spelled.ctypes.data
                h = _hash_of(address, np.int64(0), n)
                whole = _whole(address, np.int64(0), n, h, word_bytes, spans, ids, slots)
        else:
            whole = _whole(data, i, size, h, word_bytes, spans, ids, slots)
        if whole >= 0:
            out[o] = whole
            return o + 1
    if size <= SHORT:
        n = fill_symbols(data, i, size, alphabet, symbols)
        return merge_short(n, pairs, symbols, merges, out, o)
    return merge_long(data, i, size, alphabet, pairs, out, o)


@_jit
def encode_all(
    data, offsets, skipped, end_id, classes, family, cap, letters, digits, cjk, prepend,
    alphabet, pairs, words, children, added_ids, late_children, late_ids,
    small, large, out, lengths,
):  # fmt: skip
    """Encode every document; returns how many ids were written."""
    text, classes = data.ctypes.data, classes.ctypes.data
    by_character, joins = alphabet[1].ctypes.data, alphabet[4].ctypes.data
    joins_mask = U(len(alphabet[4]) - 1)
    spelled = np.zeros(_longest(words[1]) + 3 + PADDING, np.uint8)
    symbols, merges = np.empty(SHORT, np.int64), np.empty(SHORT, np.int64)
    small_mask = U(len(small) - 4 * SMALL_WORDS)  # offset of a bucket of 4 rows
    large_mask = U(len(large) - 4 * LARGE_WORDS)
    o = np.int64(0)
    for d in range(len(lengths)):
        if skipped[d]:
            continue
        first, i, end = o, offsets[d], offsets[d + 1]  # i: next byte; o: next id
        added_at, added_stop, added = _added_token(text, i, end, children, added_ids)
        i = _prepend(data, i, prepend == PREPEND_NORMALIZER and i < added_at)
        late_at, late_stop, late = _added_token(text, i, added_at, late_children, late_ids)
        while True:
            every = prepend == PREPEND_ALWAYS or (prepend == PREPEND_FIRST and i == offsets[d])
            i = _prepend(data, i, every and i < late_at and not _is_blank(text, i))
            # pre-tokens up to the next added token; parts are cut out first
            part = i
            while i < late_at:
                if i == part:
                    part = late_at
                    if digits > 0 or cjk:
                        part = part_end(text, i, late_at, classes, digits, cjk)
                if family == CHARACTERS:
                    stop = characters_end(text, i, part, cap, by_character, joins, joins_mask)
                else:
                    stop = split_end(text, i, part, classes, family, cap, letters)
                size = stop - i
                base, h, row = U(0), U(0), _MISSING
                if size <= 8 * SMALL_KEY:  # the key fits a small row
                    one, two = _key_word(text, i, size), _key_word(text, i + 8, size - 8)
                    h = _hash_of_two(one, two, U(size))
                    base = (h * U(SMALL_WORDS)) & small_mask
                    row = _find_small(small, base, one, two, U(size))
                    if row != _MISSING:
                        o = _copy(small, row + U(SMALL_KEY), out, o)
                        i = stop
                        continue
                else:
                    h = _hash_of(text, i, size)
                wide = (h * U(LARGE_WORDS)) & large_mask  # bucket among the large rows
                if size <= 8 * LARGE_KEY:
                    row = _find_large(large, wide, text, i, size)
                if row != _MISSING:
                    o = _copy(large, row + U(LARGE_KEY), out, o)
                    i = stop
                    continue
                # not in the cache: encode the pre-token and enter it
                start = o
                o = _encode_new(
                    text, i, size, h, alphabet, pairs, words, symbols, merges, spelled, out, o
                )
                if not _keep(small, SMALL_WORDS, SMALL_KEY, base, h, text, i, size, out, start, o):
                    _keep(large, LARGE_WORDS, LARGE_KEY, wide, h, text, i, size, out, start, o)
                i = stop
            if late >= 0:
                out[o] = late
                o += 1
                i = late_stop
            elif added >= 0:
                out[o] = added
                o += 1
                i = added_stop
                added_at, added_stop, added = _added_token(text, i, end, children, added_ids)
                i = _prepend(data, i, prepend == PREPEND_NORMALIZER and i < added_at)
            else:
                break
            late_at, late_stop, late = _added_token(text, i, added_at, late_children, late_ids)
        if end_id >= 0:
            out[o] = end_id
            o += 1
        lengths[d] = o - first
    return o
