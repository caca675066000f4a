"""Types and constants of the BPE encoder."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SMALL_ROWS, SMALL_WORDS, SMALL_KEY = 1 << 18, 4, 2  # keys up to 16 bytes and 3 ids
LARGE_ROWS, LARGE_WORDS, LARGE_KEY = 1 << 15, 16, 9  # keys up to 72 bytes and 13 ids
CACHE_BYTES = 8 * (SMALL_ROWS * SMALL_WORDS + LARGE_ROWS * LARGE_WORDS)
PADDING = 80  # readable bytes behind a text: a key is read in words
FRONT = 8  # bytes before the first text, for a blank before it
BLANK, METASPACE = 0x20, 0x2581  # ▁, which stands for a blank in vocabularies of characters
MAX_KEPT_IDS = 1 << 25
MAX_TRIE_NODES = 1 << 16
EMPTY = (1 << 64) - 1
HASH_FACTOR = 0x9E3779B97F4A7C15
# What gets a blank before it: no text; text between added tokens that are matched before
# normalisation; the start of a document, or text between all added tokens, without a blank there
PREPEND_NEVER, PREPEND_NORMALIZER, PREPEND_FIRST, PREPEND_ALWAYS = range(4)


@dataclass(frozen=True)
class Splitting:
    """How text becomes pre-tokens: first runs of at most `digits` numbers (0: none) and runs of
    kana and Han (`cjk`) are cut out, then a pattern of split_numba splits the rest. `prepend`: what
    gets a blank before it."""

    family: int
    cap: int = 0
    letters: int = 0
    digits: int = 0
    cjk: bool = False
    prepend: int = PREPEND_NEVER


@dataclass(frozen=True)
class Trie:
    """Added tokens by their bytes: children int32[nodes, 256] (0: none; the root is 0), and for
    each node the id of the token that ends there: -1 none, -2 one that stays ordinary text."""

    children: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Alphabet:
    """Ids of single characters, -1 without a token: by_byte int32[256] if characters are bytes;
    else by_character int32[code points], and by_byte for characters without a token. What has
    neither becomes the token `unknown` (-1: nothing), a run of them one token if `fuse`.

    joins: bits by the hash of two ids of characters; a merge may join them only where it is set."""

    by_byte: np.ndarray
    by_character: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    unknown: int = -1
    fuse: bool = False
    joins: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint64))

    @property
    def metaspace(self) -> bool:
        """Whether a blank is METASPACE."""
        ids = self.by_character
        return len(ids) > 0 and ids[BLANK] == ids[METASPACE] >= 0


@dataclass(frozen=True)
class Tables:
    """A tokenizer as arrays: pairs uint64[2 * slots] (key, rank << 32 | id), whole tokens for
    `ignore_merges` (words: bytes, spans int64[n, 2], ids, slots), tries."""

    alphabet: Alphabet
    pairs: np.ndarray
    splitting: Splitting
    classes: np.ndarray
    words: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    tries: tuple[Trie, Trie]


@dataclass
class Cache:
    """Pre-tokens encoded before, of one thread, and memory for the ids of a batch."""

    small: np.ndarray = field(default_factory=lambda: _rows(SMALL_ROWS, SMALL_WORDS))
    large: np.ndarray = field(default_factory=lambda: _rows(LARGE_ROWS, LARGE_WORDS))
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def id_buffer(self, size: int) -> np.ndarray:
        """int32[>= size], undefined; the same memory each time, unless it would be very much."""
        if size > MAX_KEPT_IDS:
            return np.empty(size, np.int32)
        if size > len(self.ids):
            self.ids = np.empty(size, np.int32)
        return self.ids


def _rows(rows: int, words: int) -> np.ndarray:
    """uint64[rows * words] of zeros, at the start of a cache line."""
    memory = np.zeros(rows * words + 8, np.uint64)
    return memory[-memory.ctypes.data % 64 // 8 :][: rows * words]
