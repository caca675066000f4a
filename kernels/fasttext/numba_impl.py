"""The compiled engine of sabia.kernels.fasttext: no Python object is created for a document.

One pass reads tokens with two hashes and finds words in a table by one cache line; row numbers go
through a buffer of fixed size, so that the gather, which costs most, runs as a loop of its own over
many rows (four at a time, in the library's order of summation, so that scores differ by rounding
of exp only). `fold_subwords` adds the rows of a known word's character n-grams to its own row once,
where that is what every occurrence would do.
"""

import numpy as np

from sabia.kernels.fasttext.definitions import (
    EOS,
    FNV_BASIS,
    FNV_PRIME,
    HIERARCHICAL,
    LABEL,
    NGRAM_BASE,
    SIGMOID_LIMIT,
    SIGMOID_STEPS,
    SOFTMAX,
    TINY,
    WIDE_BASIS,
    WIDE_PRIME,
    Classifier,
    fnv,
    wide_fnv,
)
from sabia.kernels.runtime.numba_jit import njit, read_only

U = np.uint64
F = np.float32
_BASIS, _PRIME, _LOW = U(FNV_BASIS), U(FNV_PRIME), U(0xFFFFFFFF)
_WIDE, _WIDE_PRIME = U(WIDE_BASIS), U(WIDE_PRIME)
_BASE, _SIGN, _HIGH = U(NGRAM_BASE), U(0x80000000), U(0xFFFFFFFF00000000)
_BLANKS = U((1 << 0) | (1 << 9) | (1 << 10) | (1 << 11) | (1 << 12) | (1 << 13) | (1 << 32))
_EOS = np.frombuffer(EOS, np.uint8)
_EOS_HASH, _EOS_WIDE = U(fnv(EOS)), U(wide_fnv(EOS))
_LABEL = np.frombuffer(LABEL, np.uint8)
_BUFFER = 4096
_TINY, _LIMIT, _STEPS = F(TINY), F(SIGMOID_LIMIT), SIGMOID_STEPS
_LOWEST = F(np.log(F(TINY)))
_LEAST_GAIN = 2  # rows that a folded word must represent
_jit = njit(nogil=True, boundscheck=False, error_model="numpy")


@_jit
def _is_blank(byte):
    return byte <= 32 and (_BLANKS >> U(byte)) & U(1) == U(1)


@_jit
def _step(h, byte):
    """One byte of FNV-1a, the byte taken as a signed number."""
    # sign-extended to 32 bits, as in the library
    letter = U(byte) | (U(0xFFFFFF00) if byte > 127 else U(0))
    return ((h ^ letter) * _PRIME) & _LOW


@_jit
def _begins(data, start, end, word):
    if end - start < word.shape[0]:
        return False
    same = True
    for i in range(word.shape[0]):
        same &= data[start + i] == word[i]
    return same


@_jit
def _entry(h, wide, slots):
    """The vocabulary entry with these two hashes, or -1."""
    mask = U(slots.shape[0] - 1)
    slot = h & mask
    # linear probing; 0 in the second column is an empty slot
    while slots[slot, 1] != U(0):
        if slots[slot, 0] == wide:
            return np.int64(slots[slot, 1]) - 1
        slot = (slot + U(1)) & mask
    return np.int64(-1)


@_jit
def _gather(rows, ids, count, hidden):
    """hidden += the rows of ids[:count], in their order."""
    dense, dim = rows.dense, hidden.shape[0]
    if dense.shape[0] == 0:
        _gather_packed(rows, ids, count, hidden)
        return
    k = 0
    while k + 4 <= count:  # by index: a view of a row would cost an atomic count
        a, b, c, d = U(ids[k]), U(ids[k + 1]), U(ids[k + 2]), U(ids[k + 3])
        for j in range(dim):
            # the order of summation is the library's
            hidden[j] = (((hidden[j] + dense[a, j]) + dense[b, j]) + dense[c, j]) + dense[d, j]
        k += 4
    while k < count:
        a = U(ids[k])
        for j in range(dim):
            hidden[j] += dense[a, j]
        k += 1


@_jit
def _gather_packed(rows, ids, count, hidden):
    dim, width = hidden.shape[0], rows.centroids.shape[2]
    for k in range(count):
        row, norm = U(ids[k]), rows.norms[ids[k]]
        for part in range(rows.codes.shape[1]):
            code, first = rows.codes[row, part], part * width
            for j in range(min(width, dim - first)):
                # norm * centroid of the part
                hidden[first + j] += norm * rows.centroids[part, code, j]


@_jit
def _row(value, grams):
    """The bucket of a hash after pruning, or -1."""
    bucket = np.int64(value % U(grams.bucket))  # h mod bucket
    return np.int64(grams.pruned[bucket]) if grams.pruned.shape[0] else bucket


@_jit
def _subwords(data, start, end, words, grams, rows, ids, count, hidden):
    """Push the rows of the character n-grams of `<token>`; (ids in the buffer, rows found)."""
    added = 0
    if grams.dropped:
        return count, added
    size = end - start + 2  # with < and >
    for i in range(size):
        first = _marked(data, start, size, i)
        if first & 0xC0 == 0x80:  # n-grams begin at code points
            continue
        h, j, n = _BASIS, i, 1  # n: code points in the n-gram
        while j < size and n <= grams.maxn:
            h = _step(h, _marked(data, start, size, j))
            j += 1
            while j < size and _marked(data, start, size, j) & 0xC0 == 0x80:
                h = _step(h, _marked(data, start, size, j))
                j += 1
            # the single characters < and > are no n-grams
            if n >= grams.minn and not (n == 1 and (i == 0 or j == size)):
                bucket = _row(h, grams)
                if bucket >= 0:
                    if count == _BUFFER:
                        _gather(rows, ids, count, hidden)
                        count = 0
                    ids[count] = words.words + bucket  # rows of n-grams follow those of words
                    count += 1
                    added += 1
            n += 1
    return count, added


@_jit
def _marked(data, start, size, i):
    """Byte i of `<token>`, whose token begins at data[start]."""
    if i == 0:
        return np.uint8(60)  # <
    return np.uint8(62) if i == size - 1 else data[start + i - 1]


@_jit
def _document(data, start, end, words, grams, rows, ids, hashes, hidden):
    """Add up the rows of a document in hidden; returns their number."""
    hidden[:] = F(0)
    count, total, tokens = 0, 0, 0
    i, ended = start, False
    while not ended:
        # one token: FNV-1a in 32 and in 64 bits
        while i < end and _is_blank(data[i]):
            i += 1
        first, h, wide = i, _BASIS, _WIDE
        while i < end:
            byte = data[i]
            if _is_blank(byte):
                break
            h = _step(h, byte)
            wide = (wide ^ U(byte)) * _WIDE_PRIME  # FNV-1a in 64 bits
            i += 1
        if i == first:  # nothing is left: the closing newline
            h, wide = _EOS_HASH, _EOS_WIDE
        ended = h == _EOS_HASH and wide == _EOS_WIDE
        entry = _entry(h, wide, words.slots)
        if entry >= words.words or (entry < 0 and not ended and _begins(data, first, i, _LABEL)):
            continue
        if entry >= 0:
            if count == _BUFFER:
                _gather(rows, ids, count, hidden)
                count = 0
            ids[count] = entry  # the row of a known word
            count += 1
            total += rows.weight[entry]
        if grams.maxn > 0 and not ended and (entry < 0 or rows.weight[entry] == 1):
            count, added = _subwords(data, first, i, words, grams, rows, ids, count, hidden)
            total += added
        hashes[tokens] = h | (_HIGH if h & _SIGN else U(0))  # sign-extended to 64 bits
        tokens += 1
    if grams.words > 1 and not grams.dropped:
        count, added = _word_ngrams(tokens, words, grams, rows, ids, count, hashes, hidden)
        total += added
    _gather(rows, ids, count, hidden)
    return total


@_jit
def _word_ngrams(tokens, words, grams, rows, ids, count, hashes, hidden):
    added = 0
    for i in range(tokens):
        joined = hashes[i]
        for j in range(i + 1, min(tokens, i + grams.words)):
            joined = joined * _BASE + hashes[j]  # g = g * 116049371 + h
            bucket = _row(joined, grams)
            if bucket >= 0:
                if count == _BUFFER:
                    _gather(rows, ids, count, hidden)
                    count = 0
                ids[count] = words.words + bucket  # rows of n-grams follow those of words
                count += 1
                added += 1
    return count, added


@_jit
def _finish(hidden, head, logits, totals, result):
    """Scores of one hidden vector."""
    logits[:] = F(0)
    for j in range(hidden.shape[0]):
        value = hidden[j]
        for k in range(logits.shape[0]):
            logits[k] += value * head.weights[j, k]  # logits = hidden @ weights: [nodes]
    if head.loss == HIERARCHICAL:
        _tree(logits, head, totals, result)
    elif head.loss == SOFTMAX:
        top, total = np.max(logits), F(0)  # softmax, shifted by the largest logit
        for k in range(logits.shape[0]):
            logits[k] = np.exp(logits[k] - top)
            total += logits[k]
        for k in range(logits.shape[0]):
            result[k] = min(logits[k] / total + _TINY, F(1))
    else:
        for k in range(logits.shape[0]):
            x = logits[k]
            if x < -_LIMIT:
                result[k] = _TINY
            elif x > _LIMIT:
                result[k] = F(1)
            else:
                step = np.int64((x + _LIMIT) * F(_STEPS) / _LIMIT / F(2))
                result[k] = min(head.sigmoid[step] + _TINY, F(1))


@_jit
def _tree(logits, head, totals, result):
    """Log-products of decisions from the root down."""
    labels = head.labels
    totals[:] = -np.inf
    totals[2 * labels - 2] = F(0)  # the root; log 1
    for node in range(2 * labels - 2, labels - 1, -1):
        here = totals[node]
        if here < _LOWEST:
            continue
        # f = sigmoid(logit) of the inner node
        right = F(1) / (F(1) + np.exp(-logits[node - labels]))
        totals[head.left[node - labels]] = here + np.log(F(1) - right + _TINY)
        totals[head.right[node - labels]] = here + np.log(right + _TINY)
    for k in range(labels):
        result[k] = F(0) if totals[k] < _LOWEST else min(np.exp(totals[k]), F(1))


@_jit
def _score(data, offsets, model, longest, result):
    words, grams, rows, head = model.vocabulary, model.grams, model.rows, model.head
    ids = np.empty(_BUFFER, np.int64)
    hashes = np.empty(longest // 2 + 2, np.uint64)
    hidden = np.empty(rows.dense.shape[1], np.float32)
    logits = np.empty(head.weights.shape[1], np.float32)
    totals = np.empty(2 * head.labels, np.float32)
    for d in range(offsets.shape[0] - 1):
        total = _document(data, offsets[d], offsets[d + 1], words, grams, rows, ids, hashes, hidden)
        if total == 0:
            result[d] = np.nan
            continue
        share = F(1.0 / total)  # hidden = mean of the rows
        for j in range(hidden.shape[0]):
            hidden[j] *= share
        _finish(hidden, head, logits, totals, result[d])


@_jit
def _fold(model, dense, weight):
    words, grams = model.vocabulary, model.grams
    ids = np.empty(_BUFFER, np.int64)
    hidden = np.empty(dense.shape[1], np.float32)
    for entry in range(words.words):
        first, last = words.starts[entry], words.starts[entry + 1]
        if last - first == 4 and _begins(words.text, first, last, _EOS):
            continue
        hidden[:] = dense[entry]
        count, added = _subwords(words.text, first, last, words, grams, model.rows, ids, 0, hidden)
        _gather(model.rows, ids, count, hidden)
        if added + 1 >= _LEAST_GAIN:
            dense[entry] = hidden
            weight[entry] = added + 1


def fold_subwords(model: Classifier) -> None:
    """Add the rows of known words' character n-grams to their own rows, in place."""
    _fold(model, model.rows.dense, model.rows.weight)


def score(data: np.ndarray, offsets: np.ndarray, model: Classifier) -> np.ndarray:
    """See sabia.kernels.fasttext.interface.score."""
    result = np.empty((len(offsets) - 1, model.head.labels), np.float32)
    longest = int(np.max(np.diff(offsets), initial=0))
    _score(read_only(data), offsets, model, longest, result)
    return result
