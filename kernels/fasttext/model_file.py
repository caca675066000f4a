"""Read the files that fastText writes: `.bin` (dense) and `.ftz` (product-quantized).

Layout, little-endian (fastText's own source: fasttext.cc, args.cc, dictionary.cc, densematrix.cc,
quantmatrix.cc, productquantizer.cc): magic, version; 12 int32 of arguments and a double; the
dictionary (sizes, entries of name NUL count type, pairs of pruned buckets); a byte: is the input
quantized?; the input matrix; a byte: is the output quantized?; the output matrix.
"""

import struct
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sabia.kernels.fasttext.definitions import (
    FNV_BASIS,
    FNV_PRIME,
    HIERARCHICAL,
    LABEL,
    WIDE_BASIS,
    WIDE_PRIME,
    Classifier,
    Grams,
    Head,
    Rows,
    Vocabulary,
    sigmoid_table,
)

MAGIC, VERSION = 793712314, 12
SUPERVISED = 3
UNPACK_BELOW_BYTES = 256 << 20  # quantized rows of a smaller table are written out once, for speed
_CODES = 256


class NotFastText(ValueError):
    """The file is no fastText classifier that can be read; the message says why."""


class Arguments(NamedTuple):
    """The training arguments that a model file records."""

    dim: int
    window: int
    epochs: int
    min_count: int
    negatives: int
    word_ngrams: int
    loss: int
    model: int
    bucket: int
    minn: int
    maxn: int
    update_rate: int
    sampling: float


class _Dictionary(NamedTuple):
    names: list[bytes]
    counts: list[int]
    words: int
    labels: int
    pruned_size: int
    pruned: np.ndarray  # int32[pairs, 2]


class _Packed(NamedTuple):
    """A product-quantized matrix."""

    codes: np.ndarray
    centroids: np.ndarray
    norms: np.ndarray
    dim: int


def read_classifier(path: str) -> tuple[Classifier, list[str], Arguments]:
    """(arrays, labels without `__label__`, arguments) of a model file.

    Raises NotFastText for anything else, also for word vectors, and OSError.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        try:
            return _read(_Reader(file, size))
        except (struct.error, EOFError, OverflowError, MemoryError) as error:
            raise NotFastText("the file is cut short or damaged") from error


class _Reader:
    """Typed reads that check the size against the remaining bytes of the file."""

    def __init__(self, file: BufferedReader, size: int) -> None:
        self.file, self.size = file, size

    def values(self, form: str) -> tuple[Any, ...]:
        length = struct.calcsize("<" + form)
        return struct.unpack("<" + form, self.file.read(length))

    def array(self, kind: str, *shape: int) -> np.ndarray:
        """An array aligned to cache lines, so that a row spans as few of them as possible."""
        count, dtype = int(np.prod(shape, dtype=object)), np.dtype(kind)
        if min(shape) < 0 or count * dtype.itemsize > self.size - self.file.tell():
            raise EOFError
        buffer = np.empty(count * dtype.itemsize + 64, np.uint8)
        first = -buffer.ctypes.data % 64  # to the next cache line
        body = buffer[first : first + count * dtype.itemsize]
        if self.file.readinto(body.data) != len(body):
            raise EOFError
        return body.view(dtype).reshape(shape)


def _read(reader: _Reader) -> tuple[Classifier, list[str], Arguments]:
    magic, version = reader.values("ii")
    if magic != MAGIC:
        raise NotFastText("it does not begin like a fastText model file")
    if version not in (11, VERSION):
        raise NotFastText(f"format version {version} (expected 11 or {VERSION})")
    arguments = Arguments(*reader.values("12id"))
    if version == 11:  # before subwords of classifiers
        arguments = arguments._replace(maxn=0)
    if arguments.model != SUPERVISED:
        raise NotFastText("it holds word vectors (expected a classifier: train_supervised)")
    words = _dictionary(reader)
    (packed,) = reader.values("?")
    if not packed and words.pruned_size >= 0:
        raise NotFastText("a pruned dictionary with dense rows")
    rows = _rows(_packed(reader) if packed else _dense(reader), words.words)
    (packed_head,) = reader.values("?")
    head = _unpacked(_packed(reader)) if packed and packed_head else _dense(reader)
    labels = [n.removeprefix(LABEL).decode("utf-8", "replace") for n in words.names[words.words :]]
    model = Classifier(
        _vocabulary(words), _grams(arguments, words), rows, _head(arguments, words, head)
    )
    _check(model, arguments)
    return model, labels, arguments


def _dictionary(reader: _Reader) -> _Dictionary:
    size, words, labels, _, pruned_size = reader.values("iiiqq")
    if min(size, words, labels) < 0 or size != words + labels or not labels:
        raise NotFastText("the file is damaged: its dictionary is inconsistent")
    start = reader.file.tell()
    block = reader.file.read()
    names, counts, at = [], [], 0
    for _ in range(size):
        end = block.find(b"\0", at)
        if end < 0 or end + 10 > len(block):
            raise EOFError
        names.append(block[at:end])
        counts.append(struct.unpack_from("<q", block, end + 1)[0])
        at = end + 10
    reader.file.seek(start + at)
    pairs = reader.array("<i4", max(pruned_size, 0), 2)
    return _Dictionary(names, counts, words, labels, pruned_size, pairs)


def _dense(reader: _Reader) -> np.ndarray:
    rows, dim = reader.values("qq")
    return reader.array("<f4", rows, dim)


def _packed(reader: _Reader) -> _Packed:
    (with_norms,) = reader.values("?")
    count, dim, size = reader.values("qqi")
    codes = reader.array("u1", size)
    whole, parts, width, last, centroids = _quantizer(reader)
    if whole != dim or parts * count != size or (parts - 1) * width + last != dim:
        raise NotFastText("the file is damaged: its codebook is inconsistent")
    # [parts, 256, width]; the last part may be narrower
    table = np.zeros((parts, _CODES, width), np.float32)
    full = (parts - 1) * _CODES * width
    table[:-1] = centroids[:full].reshape(parts - 1, _CODES, width)
    table[-1, :, :last] = centroids[full:].reshape(_CODES, last)
    norms = np.ones(count, np.float32)
    if with_norms:
        norm_codes = reader.array("u1", count)
        norms = np.ascontiguousarray(_quantizer(reader)[4][norm_codes])
    return _Packed(codes.reshape(count, parts), table, norms, dim)


def _quantizer(reader: _Reader) -> tuple[int, int, int, int, np.ndarray]:
    dim, parts, width, last = reader.values("4i")
    return dim, parts, width, last, reader.array("<f4", dim * _CODES)


def _unpacked(packed: _Packed) -> np.ndarray:
    """The dense matrix of a quantized one, float32[rows, dim]."""
    codes, parts = packed.codes, packed.codes.shape[1]
    # [rows, parts * width]
    wide = np.concatenate([packed.centroids[q][codes[:, q]] for q in range(parts)], axis=1)
    return np.ascontiguousarray(wide[:, : packed.dim] * packed.norms[:, None])


def _rows(matrix: np.ndarray | _Packed, words: int) -> Rows:
    weight = np.ones(words, np.int32)
    if isinstance(matrix, _Packed):
        count, dim = len(matrix.codes), matrix.dim
        if count * dim * 4 > UNPACK_BELOW_BYTES:
            none = np.empty((0, dim), np.float32)
            return Rows(none, weight, matrix.codes, matrix.centroids, matrix.norms)
        matrix = _unpacked(matrix)
    empty = np.empty((0, 1), np.uint8)
    return Rows(matrix, weight, empty, np.empty((1, _CODES, 1), np.float32),
                np.empty(0, np.float32))  # fmt: skip


def _vocabulary(words: _Dictionary) -> Vocabulary:
    lengths = np.fromiter(map(len, words.names), np.int64, len(words.names))  # [entries]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    text = np.frombuffer(b"".join(words.names), np.uint8)
    hashes, wide = _hashes(text, starts)  # uint32[entries], uint64[entries]
    entries = _slots(hashes, 1 << max(4, int(2 * len(words.names)).bit_length()))
    slots = np.zeros((len(entries), 2), np.uint64)
    used = entries >= 0
    slots[used, 0], slots[used, 1] = wide[entries[used]], entries[used] + 1
    return Vocabulary(text, starts, words.words, slots)


def _hashes(text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(FNV uint32[n], wide FNV uint64[n]) of all entries: one step per letter position, over all
    entries at once."""
    hashes = np.full(len(starts) - 1, FNV_BASIS, np.uint32)
    wide = np.full(len(starts) - 1, WIDE_BASIS, np.uint64)
    at, live = starts[:-1].copy(), np.arange(len(hashes))
    while True:
        live = live[at[live] < starts[1:][live]]
        if not len(live):
            return hashes, wide
        letters = text[at[live]]
        # sign-extended, as in the library
        signed = letters.view(np.int8).astype(np.int32).view(np.uint32)
        hashes[live] = (hashes[live] ^ signed) * np.uint32(FNV_PRIME)
        wide[live] = (wide[live] ^ letters) * np.uint64(WIDE_PRIME)
        at[live] += 1


def _slots(hashes: np.ndarray, size: int) -> np.ndarray:
    """Open addressing, linear probing: where several meet, they move on together, round by round;
    the earliest entry of those that want a slot gets it."""
    slots = np.full(size, -1, np.int32)
    waiting = np.arange(len(hashes))
    slot = hashes.astype(np.int64) & (size - 1)
    while len(waiting):
        free = waiting[slots[slot[waiting]] < 0]  # entries whose slot is free
        slots[slot[free][::-1]] = free[::-1]  # reversed: the earliest entry is written last
        waiting = waiting[slots[slot[waiting]] != waiting]
        slot[waiting] = (slot[waiting] + 1) & (size - 1)
    return slots


def _grams(arguments: Arguments, words: _Dictionary) -> Grams:
    pruned = np.empty(0, np.int32)
    if words.pruned_size > 0:
        if words.pruned[:, 0].min() < 0 or words.pruned[:, 0].max() >= arguments.bucket:
            raise NotFastText("the file is damaged: a pruned bucket beyond the last one")
        pruned = np.full(arguments.bucket, -1, np.int32)
        pruned[words.pruned[:, 0]] = words.pruned[:, 1]
    used = arguments.bucket > 0
    return Grams(arguments.word_ngrams if used else 1, arguments.minn,
                 arguments.maxn if used else 0, arguments.bucket, words.pruned_size == 0, pruned,
                 )  # fmt: skip


def _head(arguments: Arguments, words: _Dictionary, matrix: np.ndarray) -> Head:
    left, right = np.empty(0, np.int32), np.empty(0, np.int32)
    nodes = words.labels
    if arguments.loss == HIERARCHICAL:
        left, right = huffman(words.counts[words.words :])
    if len(matrix) < nodes - (arguments.loss == HIERARCHICAL):
        raise NotFastText("the file is damaged: fewer output rows than labels")
    weights = np.ascontiguousarray(matrix[:nodes].T)
    return Head(arguments.loss, words.labels, weights, left, right, sigmoid_table())


def huffman(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Children (left, right) of the inner nodes of the library's tree; counts fall."""
    labels = len(counts)
    # inner nodes are heavier than any label until they are made
    weight = [*counts, *[10**15] * (labels - 1)]
    leaf, node = labels - 1, labels
    children = []
    for inner in range(labels, 2 * labels - 1):
        pair = []
        for _ in range(2):
            take_leaf = leaf >= 0 and weight[leaf] < weight[node]
            pair.append(leaf if take_leaf else node)
            leaf, node = (leaf - 1, node) if take_leaf else (leaf, node + 1)
        weight[inner] = weight[pair[0]] + weight[pair[1]]
        children.append(pair)
    table = np.array(children, np.int32).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


def _check(model: Classifier, arguments: Arguments) -> None:
    """Check that every row that can be looked up exists."""
    rows = max(len(model.rows.dense), len(model.rows.codes))
    grams, words = model.grams, model.vocabulary.words
    asks = grams.words > 1 or grams.maxn > 0
    needed = words + (grams.bucket if asks and not grams.dropped else 0)
    if len(grams.pruned):
        needed = words + int(grams.pruned.max()) + 1
    if rows < needed or model.rows.dense.shape[1] != arguments.dim:
        raise NotFastText("the file is damaged: fewer rows than its dictionary needs")
    if model.head.weights.shape[0] != arguments.dim or not 1 <= arguments.loss <= 4:
        raise NotFastText("the file is damaged: its output layer is inconsistent")
