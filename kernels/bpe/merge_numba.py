"""Merges of byte pair encoding: the table of pairs, and the symbols of one pre-token.

A pre-token starts as the ids of its single characters (bytes, if the tokenizer is byte-level).
Then the pair of least rank merges first, the leftmost among equals: short pre-tokens are scanned
for it, long ones have a heap, so that n symbols cost O(n log n).
"""

import numpy as np

from sabia.kernels.bpe.definitions import EMPTY, HASH_FACTOR
from sabia.kernels.bpe.split_numba import code_at
from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.memory_numba import byte_at

U = np.uint64
SHORT = 64  # bytes of a pre-token that is merged by scanning
_FREE, _FACTOR = U(EMPTY), U(HASH_FACTOR)
_NONE = np.int64(1) << 62  # the "rank and id" of a pair that does not merge
_jit = njit(nogil=True, boundscheck=False)


@_jit
def fill_pairs(table, merges, new_ids):
    """Enter merges in order; of equal pairs the later one is kept."""
    mask = U(len(table) // 2 - 1)
    for rank in range(len(merges)):
        key = (merges[rank, 0] << U(32)) | merges[rank, 1]
        slot = ((key * _FACTOR) >> U(20)) & mask  # Fibonacci hashing, then linear probing
        while table[U(2) * slot] != _FREE and table[U(2) * slot] != key:
            slot = (slot + U(1)) & mask
        table[U(2) * slot] = key
        table[U(2) * slot + U(1)] = (U(rank) << U(32)) | new_ids[rank]  # the value: rank << 32 | id


@_jit
def _merge_of(pairs, left, right):
    """rank << 32 | id of a pair, or _NONE."""
    mask = U(len(pairs) // 2 - 1)
    key = (U(left) << U(32)) | U(right)
    slot = ((key * _FACTOR) >> U(20)) & mask  # Fibonacci hashing, then linear probing
    while True:
        stored = pairs[U(2) * slot]
        if stored == key:
            return np.int64(pairs[U(2) * slot + U(1)])
        if stored == _FREE:
            return _NONE
        slot = (slot + U(1)) & mask


@_jit
def fill_symbols(data, i, size, alphabet, symbols):
    """Write the ids of the single characters of data[i:i+size]; returns how many there are. `data`
    is an address.

    A character without a token becomes its bytes, if all of them have tokens, else the unknown
    token, if there is one, else nothing. As in tokenizers, an unknown token is written only when
    the next known character comes, behind bytes that follow it.
    """
    by_byte, by_character, unknown, fuse = alphabet[:4]
    n, k, pending = np.int64(0), i, False
    while k < i + size:
        if len(by_character):
            code, step = code_at(data, k)
            number = by_character[code]
        else:
            step = 1
            number = by_byte[byte_at(data, k)]
        bytes_known = number < 0 and len(by_character) > 0
        for j in range(k, k + step if bytes_known else k):
            bytes_known = bytes_known and by_byte[byte_at(data, j)] >= 0
        if bytes_known:
            for j in range(k, k + step):
                symbols[n] = by_byte[byte_at(data, j)]
                n += 1
        elif number >= 0 or unknown >= 0:
            if pending and (number >= 0 or not fuse):
                symbols[n] = unknown
                n += 1
            pending = number < 0
            if number >= 0:
                symbols[n] = number
                n += 1
        k += step
    if pending:
        symbols[n] = unknown
        n += 1
    return n


@_jit
def merge_short(n, pairs, symbols, merges, out, o):
    """Merge symbols[:n], scanning for the least rank until no pair merges."""
    for k in range(n - 1):
        merges[k] = _merge_of(pairs, symbols[k], symbols[k + 1])  # merge of symbols k and k + 1
    while n > 1:
        # rank << 32 | id: the least entry has the least rank, and the first of them is leftmost
        best, least = 0, merges[0]
        for k in range(1, n - 1):
            if merges[k] < least:
                best, least = k, merges[k]
        if least == _NONE:
            break
        symbols[best] = least & np.int64(0xFFFFFFFF)  # the id of the merged pair
        n -= 1
        # close the gap, then look up the two pairs that changed
        for k in range(best + 1, n):
            symbols[k] = symbols[k + 1]
            merges[k - 1] = merges[k]
        if best > 0:
            merges[best - 1] = _merge_of(pairs, symbols[best - 1], symbols[best])
        if best < n - 1:
            merges[best] = _merge_of(pairs, symbols[best], symbols[best + 1])
    for k in range(n):
        out[o + k] = symbols[k]
    return o + n


@_jit
def _sift_down(heap, count, k):
    item = heap[k]
    while 2 * k + 1 < count:
        child = 2 * k + 1
        if child + 1 < count and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= item:
            break
        heap[k] = heap[child]
        k = child
    heap[k] = item


@_jit
def _push(heap, count, item):
    k = count
    while k > 0 and heap[(k - 1) // 2] > item:
        heap[k] = heap[(k - 1) // 2]
        k = (k - 1) // 2
    heap[k] = item
    return count + 1


@_jit
def merge_long(data, i, size, alphabet, pairs, out, o):
    """Merge the symbols of data[i:i+size] with a heap of rank << 32 | position; an entry whose pair
    has changed since is skipped."""
    symbols = np.empty(size, np.int32)
    size = fill_symbols(data, i, size, alphabet, symbols)
    merges = np.full(size, _NONE)
    # a doubly linked list of the remaining symbols
    before = np.arange(-1, size - 1).astype(np.int32)
    after = np.arange(1, size + 1).astype(np.int32)
    heap = np.empty(3 * size, np.int64)
    count = np.int64(0)
    for k in range(size - 1):
        merges[k] = _merge_of(pairs, symbols[k], symbols[k + 1])  # merge of symbols k and k + 1
        if merges[k] != _NONE:
            heap[count] = (merges[k] >> 32 << 32) | k  # order: rank, then position
            count += 1
    for k in range(count // 2 - 1, -1, -1):
        _sift_down(heap, count, k)
    while count:
        top = heap[0]
        count -= 1
        heap[0] = heap[count]
        _sift_down(heap, count, np.int64(0))
        k = top & np.int64(0xFFFFFFFF)
        if merges[k] >> 32 != top >> 32:  # outdated: the pair has changed or is gone
            continue
        symbols[k] = merges[k] & np.int64(0xFFFFFFFF)
        absorbed = after[k]
        after[k] = after[absorbed]  # unlink the right symbol
        symbols[absorbed], merges[absorbed], merges[k] = -1, _NONE, _NONE
        if after[k] < size:
            before[after[k]] = k
            merges[k] = _merge_of(pairs, symbols[k], symbols[after[k]])
            if merges[k] != _NONE:
                count = _push(heap, count, (merges[k] >> 32 << 32) | k)
        left = np.int64(before[k])
        if left >= 0:
            merges[left] = _merge_of(pairs, symbols[left], symbols[k])
            if merges[left] != _NONE:
                count = _push(heap, count, (merges[left] >> 32 << 32) | left)
    k = np.int64(0)
    while k < size:
        out[o] = symbols[k]
        o += 1
        k = np.int64(after[k])
    return o
