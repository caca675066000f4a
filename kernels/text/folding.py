"""How a text becomes words for hashing: one folding and one kind for each code point.

Folding: compatibility decomposition (NFKD) with combining diacritics dropped, then lower case,
where that leaves one code point; so `É`, `é`, `e` + U+0301 and full-width `Ｅ` are all `e`. A code
point whose decomposition is several (`ﬁ`, `½`, a Hangul syllable) is only made lower case.
Kinds: SPACE and MARK end a word (a mark is a token of the exact hash, a space is nothing), LETTER
(letters, digits, `_`, vowel signs) makes words, SOLO is a word of its own (scripts written without
spaces: Han, kana, Thai, Lao, Khmer, Burmese, so that word n-grams are character n-grams there),
SKIP is not there at all (combining diacritics, and format characters such as soft hyphens).
Code points from U+20000 to U+3FFFF are Han: SOLO, unfolded; above that, MARK. A byte that is not
part of a well-formed UTF-8 sequence reads as a SPACE. The tables come from Python's unicodedata, so
characters that a later Unicode version adds read as MARK until Python knows them.
"""

import functools
import unicodedata
from bisect import bisect_right

import numpy as np

SPACE, MARK, LETTER, SOLO, SKIP = range(5)
TABLE_SIZE = 0x20000  # the two planes that hold scripts with case, accents and marks
SOLO_END = 0x40000

_SOLO_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17D3),  # Khmer
    (0x2E80, 0x2FDF),  # Han radicals
    (0x3005, 0x3007),
    (0x3041, 0x3096),  # Hiragana
    (0x30A1, 0x30FA),  # Katakana
    (0x30FC, 0x30FE),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_DIACRITICS = (
    (0x0300, 0x036F),
    (0x1AB0, 0x1AFF),
    (0x1DC0, 0x1DFF),
    (0x20D0, 0x20FF),
    (0xFE00, 0xFE0F),
    (0xFE20, 0xFE2F),
)
_ZERO_WIDTH_SPACE = 0x200B


def _bounds(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    """The first code of each range and the first after it, ascending."""
    return [bound for low, high in ranges for bound in (low, high + 1)]


_SOLO_BOUNDS, _DIACRITIC_BOUNDS = _bounds(_SOLO_RANGES), _bounds(_DIACRITICS)


def _within(code: int, bounds: list[int]) -> bool:
    return bisect_right(bounds, code) % 2 == 1


def fold(code: int) -> int:
    """The code point that replaces `code` in words."""
    char = chr(code)
    if unicodedata.decomposition(char):
        parts = unicodedata.normalize("NFKD", char)
        bare = [part for part in parts if not _within(ord(part), _DIACRITIC_BOUNDS)]
        char = bare[0] if len(bare) == 1 else char
    lowered = char.lower()
    return ord(lowered) if len(lowered) == 1 else code


def kind(code: int) -> int:
    """SPACE, MARK, LETTER, SOLO or SKIP, of a folded code point."""
    char = chr(code)
    category = unicodedata.category(char)
    if code == _ZERO_WIDTH_SPACE:
        return SPACE
    if category == "Cf" or _within(code, _DIACRITIC_BOUNDS):
        return SKIP
    if char.isspace() or category in ("Cc", "Zs", "Zl", "Zp", "Cs"):
        return SPACE
    if char.isalnum() or char == "_" or category in ("Mn", "Mc", "Me"):
        return SOLO if _within(code, _SOLO_BOUNDS) else LETTER
    return MARK


_UNIFORM = {(0x3400, 0x4DBF): SOLO, (0x4E00, 0x9FFF): SOLO, (0xAC00, 0xD7A3): LETTER}
_UNIFORM |= {(0xD800, 0xDFFF): SPACE, (0xE000, 0xF8FF): MARK}  # surrogates, private use


@functools.lru_cache(maxsize=1)
def folding_tables() -> tuple[np.ndarray, np.ndarray]:
    """(fold uint32[TABLE_SIZE], kind uint8[TABLE_SIZE]); read-only, made once (about 0.1 s)."""
    folds = np.arange(TABLE_SIZE, dtype=np.uint32)
    kinds = np.full(TABLE_SIZE, MARK, np.uint8)
    pending = np.ones(TABLE_SIZE, bool)
    for (low, high), uniform in _UNIFORM.items():
        kinds[low : high + 1] = uniform
        pending[low : high + 1] = False
    for code in np.flatnonzero(pending).tolist():
        if unicodedata.category(chr(code)) == "Cn":
            continue  # unassigned: a mark, unfolded
        folded, own = fold(code), kind(code)
        folds[code], kinds[code] = folded, own if folded == code or own == SKIP else kind(folded)
    folds.setflags(write=False)
    kinds.setflags(write=False)
    return folds, kinds
