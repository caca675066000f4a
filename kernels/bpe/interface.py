"""BPE over Arrow buffers: a tokenizer as arrays, and an encoder with a bounded cache.

A document is cut at added tokens, then into parts (`digits`, `cjk`), then into pre-tokens by the
splitting pattern, or where no merge reaches across (split_numba). A pre-token's ids come from a
cache of the pre-tokens encoded before. It compares all bytes of a pre-token, so a hash collision
costs time but never gives a wrong id. A miss runs the merges: the pair of least rank first,
leftmost among equals, by scanning for short pre-tokens and by a heap for long ones, so that n bytes
cost O(n log n) at most. The cache has a fixed size (CACHE_BYTES): a new entry replaces an old one.

Sennrich et al. 2016 (arXiv 1508.07909). The reference is the library `tokenizers`, whose ids the
encoder must reproduce for every text; there is only one engine here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sabia.kernels.bpe.definitions import (
    BLANK,
    EMPTY,
    FRONT,
    MAX_TRIE_NODES,
    METASPACE,
    PADDING,
    PREPEND_NEVER,
    Cache,
    Tables,
    Trie,
)


def pair_table(merges: np.ndarray, new_ids: np.ndarray) -> np.ndarray:
    """uint64[2 * slots] of merges[n, 2] (ids) in the order of their ranks; of two equal pairs the
    later one counts, as in tokenizers."""
    from sabia.kernels.bpe.merge_numba import fill_pairs

    slots = 1 << max(4, (2 * len(merges)).bit_length())
    table = np.full(2 * slots, EMPTY, np.uint64)
    fill_pairs(table, merges.astype(np.uint64), new_ids.astype(np.uint64))
    return table


def word_table(words: Mapping[bytes, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(bytes, spans int64[n, 2], ids int32[n], slots int32[s]) of tokens that are found whole."""
    from sabia.kernels.bpe.numba_impl import fill_words

    data = np.frombuffer(b"".join(words) + bytes(PADDING), np.uint8)
    ends = np.cumsum([0, *map(len, words)])
    spans = np.stack([ends[:-1], ends[1:]], axis=1).astype(np.int64)
    slots = np.full(1 << max(4, (2 * len(words)).bit_length()), -1, np.int32)
    if words:
        fill_words(slots, data, spans)
    return data, spans, np.array(list(words.values()), np.int32), slots


def make_trie(tokens: Sequence[tuple[bytes, int]], metaspace: bool = False) -> Trie:
    """The trie of (bytes, id), id -2 for tokens that stay ordinary text where they are found.

    metaspace: a METASPACE in a token is also found as a blank. Raises ValueError where there are
    too many of them.
    """
    nodes: list[dict[int, int]] = [{}]
    ids = [-1]
    for token, number in tokens:
        node = 0
        for byte in token:
            if byte not in nodes[node]:
                nodes[node][byte] = len(nodes)
                nodes.append({})
                ids.append(-1)
            node = nodes[node][byte]
        ids[node] = number
    if len(nodes) > MAX_TRIE_NODES:
        raise ValueError(f"{len(tokens):,} added tokens")
    children = np.zeros((len(nodes), 256), np.int32)
    for node, places in enumerate(nodes):
        for byte, child in places.items():
            children[node, byte] = child
    if metaspace:
        first, second, third = chr(METASPACE).encode()
        children[:, BLANK] = children[children[children[:, first], second], third]
    return Trie(children, np.array(ids, np.int32))


def join_bits(pairs: np.ndarray) -> np.ndarray:
    """`Alphabet.joins` of pairs int32[n, 2] of ids: 16 bits or more a pair."""
    from sabia.kernels.bpe.split_numba import fill_joins

    joins = np.zeros(1 << max(4, (len(pairs) // 4).bit_length()), np.uint64)
    fill_joins(joins, pairs.astype(np.int32))
    return joins


def padded(data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy of the texts data[offsets[i]:offsets[i+1]] with FRONT zeros before and PADDING behind,
    and its offsets."""
    start, end = int(offsets[0]), int(offsets[-1])
    copy = np.zeros(FRONT + end - start + PADDING, np.uint8)
    copy[FRONT : FRONT + end - start] = data[start:end]
    return copy, offsets - start + FRONT


def document_flags(data: np.ndarray, offsets: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """uint8[n]: the flags (unicode_classes) of all code points of each document, or-ed; data is
    `padded`."""
    from sabia.kernels.bpe.numba_impl import flags_of

    flags = np.zeros(len(offsets) - 1, np.uint8)
    flags_of(data, offsets, classes, flags)
    return flags


def encode(
    data: np.ndarray,
    offsets: np.ndarray,
    tables: Tables,
    cache: Cache,
    end_id: int = -1,
    skip: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32[Σ n], lengths int64[documents]) of documents data[offsets[i]:offsets[i+1]].

    `data` is valid UTF-8 and `padded`, and is overwritten. `end_id` >= 0 ends every document;
    documents marked in `skip` bool[n] get no ids. Holds no GIL; one cache must not be shared by
    threads.
    """
    from sabia.kernels.bpe.numba_impl import encode_all

    n, s, a = len(offsets) - 1, tables.splitting, tables.alphabet
    lengths = np.zeros(n, np.int64)
    # every character may become an id, and every text between added tokens gets one more
    size = int(offsets[-1] - offsets[0]) * (1 if s.prepend == PREPEND_NEVER else 2)
    out = cache.id_buffer(size + 2 * n + 16)
    skipped = np.zeros(n, np.bool_) if skip is None else skip
    total = encode_all(
        *(data, offsets, skipped, end_id, tables.classes),
        *(s.family, s.cap, s.letters, s.digits, s.cjk, s.prepend),
        (a.by_byte, a.by_character, a.unknown, a.fuse, a.joins, a.metaspace),
        *(tables.pairs, tables.words),
        *(tables.tries[0].children, tables.tries[0].ids),
        *(tables.tries[1].children, tables.tries[1].ids),
        *(cache.small, cache.large, out, lengths),
    )
    return out[:total].copy(), lengths
