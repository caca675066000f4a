"""The plain engine of sabia.kernels.fasttext: its definition, token by token, in plain Python."""

import math
from collections.abc import Iterator

import numpy as np

from sabia.kernels.fasttext.definitions import (
    BLANKS,
    EOS,
    HIERARCHICAL,
    LABEL,
    NGRAM_BASE,
    SIGMOID_LIMIT,
    SIGMOID_STEPS,
    SOFTMAX,
    TINY,
    Classifier,
    Grams,
    Head,
    Rows,
    fnv,
)

_TO_SPACE = bytes(32 if byte in BLANKS else byte for byte in range(256))


def score(data: np.ndarray, offsets: np.ndarray, model: Classifier) -> np.ndarray:
    """See sabia.kernels.fasttext.interface.score."""
    entries = _entries(model)
    result = np.full((len(offsets) - 1, model.head.labels), np.nan, np.float32)
    for d in range(len(result)):
        text = data[offsets[d] : offsets[d + 1]].tobytes()
        ids = np.array(list(_ids(text, model, entries)), np.int64)
        if len(ids):
            vectors, weight = _vectors(ids, model.rows)  # [n, dim]
            hidden = vectors.sum(axis=0, dtype=np.float64) / weight  # [dim]
            result[d] = _scores(hidden, model.head)
    return result


def _entries(model: Classifier) -> dict[bytes, int]:
    text, starts = model.vocabulary.text.tobytes(), model.vocabulary.starts
    return {text[starts[i] : starts[i + 1]]: i for i in range(len(starts) - 1)}


def _ids(text: bytes, model: Classifier, entries: dict[bytes, int]) -> Iterator[int]:
    """Rows of a document, words first."""
    words, hashes = model.vocabulary.words, []
    for token in [*text.translate(_TO_SPACE).split(b" "), EOS]:
        entry = entries.get(token, -1)
        if not token or entry >= words or (entry < 0 and token.startswith(LABEL)):
            continue
        if entry >= 0:
            yield entry
        if token != EOS and model.grams.maxn > 0 and (entry < 0 or model.rows.weight[entry] == 1):
            yield from _subwords(token, words, model.grams)
        hashes.append(fnv(token))
        if token == EOS:
            break
    yield from _word_ngrams(hashes, words, model.grams)


def _subwords(token: bytes, words: int, grams: Grams) -> Iterator[int]:
    marked = b"<" + token + b">"
    # first bytes of the code points
    starts = [i for i, byte in enumerate(marked) if byte & 0xC0 != 0x80] + [len(marked)]
    letters = len(starts) - 1
    for i in range(letters):
        for length in range(grams.minn, min(grams.maxn, letters - i) + 1):
            edge = length == 1 and (i == 0 or i + length == letters)
            if length and not edge:
                part = marked[starts[i] : starts[i + length]]
                yield from _row(fnv(part), words, grams)


def _word_ngrams(hashes: list[int], words: int, grams: Grams) -> Iterator[int]:
    signed = [h - (1 << 32) if h >> 31 else h for h in hashes]  # int32, as in the library
    for i in range(len(signed)):
        joined = signed[i]
        for j in range(i + 1, min(len(signed), i + grams.words)):
            # g = g * 116049371 + h, in 64 bits
            joined = (joined * NGRAM_BASE + signed[j]) & 0xFFFFFFFFFFFFFFFF
            yield from _row(joined, words, grams)


def _row(value: int, words: int, grams: Grams) -> Iterator[int]:
    if grams.dropped:
        return
    bucket = value % grams.bucket  # h mod bucket
    if len(grams.pruned):
        bucket = int(grams.pruned[bucket])
    if bucket >= 0:
        yield words + bucket


def _vectors(ids: np.ndarray, rows: Rows) -> tuple[np.ndarray, int]:
    """(vectors float32[n, dim], number of rows that they represent)."""
    folded = ids[ids < len(rows.weight)]
    weight = len(ids) - len(folded) + int(rows.weight[folded].sum())
    if len(rows.dense):
        return rows.dense[ids], weight
    codes = rows.codes[ids]  # [n, parts]
    parts = [rows.centroids[q][codes[:, q]] for q in range(codes.shape[1])]
    wide = np.concatenate(parts, axis=1)[:, : rows.dense.shape[1]]  # [n, dim]
    return wide * rows.norms[ids][:, None], weight


def _scores(hidden: np.ndarray, head: Head) -> np.ndarray:
    logits = hidden @ head.weights  # [nodes]
    if head.loss == HIERARCHICAL:
        return _tree(logits, head)
    if head.loss == SOFTMAX:
        raised = np.exp(logits - logits.max())  # softmax
        probabilities = raised / raised.sum()
    else:
        step = (logits.astype(np.float32) + SIGMOID_LIMIT) * SIGMOID_STEPS / (2 * SIGMOID_LIMIT)
        probabilities = head.sigmoid[np.clip(step, 0, SIGMOID_STEPS).astype(int)]
        probabilities = np.where(np.abs(logits) > SIGMOID_LIMIT, logits > 0, probabilities)
    return np.minimum(probabilities + TINY, 1)


def _tree(logits: np.ndarray, head: Head) -> np.ndarray:
    """Products of decisions from the root down; a branch below TINY counts as 0."""
    last = 2 * head.labels - 2
    total = np.full(last + 1, -np.inf)
    total[last] = 0.0  # the root; log 1
    for node in range(last, head.labels - 1, -1):
        if total[node] < math.log(TINY):
            continue
        right = 1 / (1 + math.exp(-logits[node - head.labels]))
        total[head.left[node - head.labels]] = total[node] + math.log(1 - right + TINY)
        total[head.right[node - head.labels]] = total[node] + math.log(right + TINY)
    leaves = total[: head.labels]
    return np.where(leaves < math.log(TINY), 0, np.minimum(np.exp(leaves), 1))
