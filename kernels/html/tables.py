"""Look-up tables of the HTML scanner, made once a process from the lexicon."""

from functools import cache

import numpy as np

from sabia.kernels.html import lexicon
from sabia.kernels.html.definitions import (
    BLOCK_KIND,
    COMMA,
    DIGIT,
    FLAG_NAMES,
    FURNITURE_WORD,
    HIGH,
    LOWER,
    MASK64,
    OTHER,
    RAW_KIND,
    REFERENCE,
    SPACE,
    STOP,
    STOP_WORD,
    TAG_NAMES,
    UNSEEN_KIND,
    UPPER,
    VOID_KIND,
    WORD_PRIME,
    WORD_SEED,
    Tables,
)


@cache
def tables() -> Tables:
    """The tables, made once a process."""
    closes, stops, walls = _closing()
    return Tables(
        _byte_kinds(), *_hashed({_packed(name): i + 1 for i, name in enumerate(TAG_NAMES)}
                                | {_packed(name): -1 for name in lexicon.FORMATTING.split()}, 512),
        _tag_kinds(), _tag_flags(), closes, stops, walls, *_automaton(), *_word_table(),
    )  # fmt: skip


def _packed(name: str) -> int:
    """A tag name of at most ten letters or digits in one number, six bits each."""
    key = 0
    for letter in name[:10]:
        key = key << 6 | (ord(letter) & 31 if letter.isalpha() else ord(letter) - 16)
    return key


def _hashed(entries: dict[int, int], size: int) -> tuple[np.ndarray, np.ndarray]:
    keys, values = np.zeros(size, np.uint64), np.zeros(size, np.int64)
    for key, value in entries.items():
        slot = ((key * WORD_SEED & MASK64) >> 40) % size
        while keys[slot]:
            slot = (slot + 1) % size
        keys[slot], values[slot] = key, value
    return keys, values


def _byte_kinds() -> np.ndarray:
    kinds = np.full(256, OTHER, np.uint8)
    kinds[[9, 10, 12, 13, 32]] = SPACE
    kinds[97:123], kinds[65:91], kinds[48:58], kinds[128:] = LOWER, UPPER, DIGIT, HIGH
    kinds[[44, 58, 59]] = COMMA
    kinds[[33, 46, 63]] = STOP
    kinds[38] = REFERENCE
    return kinds


def _number(name: str) -> int:
    return TAG_NAMES.index(name) + 1


def _bits(names: str) -> int:
    numbers = (_number(name) for name in names.split())
    return sum(1 << number for number in numbers if number < 63)


def _tag_kinds() -> np.ndarray:
    kinds = np.zeros(len(TAG_NAMES) + 1, np.int64)
    groups = {BLOCK_KIND: f"{lexicon.BLOCK} {lexicon.CELLS} hr dialog", VOID_KIND: lexicon.VOID,
              RAW_KIND: lexicon.RAW, UNSEEN_KIND: f"{lexicon.UNSEEN} option"}  # fmt: skip
    for bit, names in groups.items():
        for name in names.split():
            kinds[_number(name)] |= bit
    return kinds


def _tag_flags() -> np.ndarray:
    flags = np.zeros(len(TAG_NAMES) + 1, np.int64)
    for tag, name in lexicon.FLAGS.items():
        if name:
            flags[_number(tag)] = 1 << FLAG_NAMES.index(name)
    return flags


def _closing() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which open elements a start tag ends, and what stops the search (HTML standard, 13.2.6.4)."""
    count = len(TAG_NAMES) + 1
    closes, stops, walls = (np.zeros(count, np.int64) for _ in range(3))
    block = _bits(f"{lexicon.BLOCK} {lexicon.CELLS} {lexicon.UNSEEN}")
    table = "table thead tbody tfoot tr td th caption"
    for name in lexicon.BLOCK.split():
        if name not in ("html", "head", "body", *table.split()[1:]):
            closes[_number(name)], stops[_number(name)] = _bits("p"), block & ~_bits("p")
    headings = "h1 h2 h3 h4 h5 h6"
    for name in headings.split():
        closes[_number(name)] |= _bits(headings)
    for names, through in (("li", "li p div address"), ("dt dd", "dt dd p div address"),
                           ("option", "option")):  # fmt: skip
        for name in names.split():
            closes[_number(name)], stops[_number(name)] = _bits(names), block & ~_bits(through)
    for name in table.split()[1:]:
        ends = {"tr": "tr", "td": "td th", "th": "td th"}.get(name, "thead tbody tfoot tr caption")
        closes[_number(name)], stops[_number(name)] = _bits(ends), _bits("table html")
    walls[:] = _bits("table td th caption")
    for name in table.split():
        walls[_number(name)] = _bits("table") & ~(1 << _number(name))
    for name in lexicon.INLINE.split():
        walls[_number(name)] = block
    walls[_number("body")] = walls[_number("html")] = 0
    return closes, stops, walls


def _automaton() -> tuple[np.ndarray, np.ndarray]:
    """Aho and Corasick 1975, over 26 letters and one boundary (letter 0)."""
    children: list[dict[int, int]] = [{}]
    bits = [0]
    for number, names in enumerate(lexicon.HINTS.values()):
        for name in names.split():
            state = 0
            for letter in name:
                code = 0 if letter == "_" else ord(letter) - 96
                if code not in children[state]:
                    children.append({})
                    bits.append(0)
                    children[state][code] = len(bits) - 1
                state = children[state][code]
            bits[state] |= 1 << number
    moves = np.zeros((len(bits), 27), np.int32)
    _fill(moves, children, bits)
    return moves, np.array(bits, np.int64)


def _fill(moves: np.ndarray, children: list[dict[int, int]], bits: list[int]) -> None:
    """Breadth first: a missing move is that of the longest proper suffix."""
    suffix = [0] * len(bits)
    queue = [0]
    for state in queue:
        bits[state] |= bits[suffix[state]]
        for code in range(27):
            below = moves[suffix[state], code] if state else 0
            child = children[state].get(code)
            moves[state, code] = below if child is None else child
            if child is not None:
                suffix[child] = int(below)
                queue.append(child)


def word_hash(word: str) -> int:
    """FNV-1a of the UTF-8 bytes."""
    value = WORD_SEED
    for byte in word.encode():
        value = (value ^ byte) * WORD_PRIME & MASK64
    return value


def _word_table() -> tuple[np.ndarray, np.ndarray]:
    words = {word_hash(word): STOP_WORD for word in lexicon.STOP_WORDS.split()}
    words |= {word_hash(word): FURNITURE_WORD for word in lexicon.FURNITURE.split()}
    return _hashed(words, 2048)
