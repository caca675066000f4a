"""One byte for each code point: its properties in the splitting patterns of tokenizers.

The low four bits are the class (general category, or white space as the regular expressions'
`\\s` has it), the others are flags: CJK is DeepSeek's `[一-龥぀-ゟ゠-ヿ]`, NFC_MAYBE marks code
points that NFC may change or reorder (composition, combining classes), UNKNOWN those that Python's
unicodedata does not assign. Regular-expression engines follow a later Unicode version: on every
code point that Python 3.11 (Unicode 14) assigns they agree with this table, and on those it does
not assign they may know a letter where we know nothing, so a document with an UNKNOWN code point
must be split by the regular-expression engine. A test compares every code point.
"""

import functools
import unicodedata

import numpy as np

OTHER, NEWLINE, SPACE, UPPER, LOWER, LETTER, MARK, NUMBER, PUNCT = range(9)
CJK, NFC_MAYBE, UNKNOWN = 0x10, 0x20, 0x40
CLASS_BITS = 0x0F
CODE_POINTS = 0x110000

_CLASS = {"Lu": UPPER, "Lt": UPPER, "Ll": LOWER, "Lm": LETTER, "Lo": LETTER}
_INITIAL = {"M": MARK, "N": NUMBER, "P": PUNCT, "S": PUNCT}
_SPACES = "\t\v\f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
_EN_QUAD, _HAIR_SPACE = 0x2000, 0x200A
_CJK_RANGES = ((0x4E00, 0x9FA5), (0x3040, 0x309F), (0x30A0, 0x30FF))
# ranges that are one class throughout: ideographs, private use, surrogates (not in UTF-8)
_UNIFORM = (
    (0x3400, 0x4DBF, LETTER),
    (0x4E00, 0x9FFC, LETTER),
    (0x20000, 0x2A6DD, LETTER),
    (0x2A700, 0x2B734, LETTER),
    (0x2B740, 0x2B81D, LETTER),
    (0x2B820, 0x2CEA1, LETTER),
    (0x2CEB0, 0x2EBE0, LETTER),
    (0x30000, 0x3134A, LETTER),
    (0xD800, 0xF8FF, OTHER),
    (0xF0000, 0xFFFFD, OTHER),
    (0x100000, 0x10FFFD, OTHER),
)
_EMPTY = ((0x323B0, 0xE0000), (0xE01F0, 0xF0000))  # nothing assigned here up to Unicode 17
_HANGUL = (0xAC00, 0xD7A3)  # letters that NFC does not change


@functools.lru_cache(maxsize=1)
def class_table() -> np.ndarray:
    """uint8[0x110000]: class and flags of each code point; read-only, made once (about 0.1 s)."""
    table = np.full(CODE_POINTS, UNKNOWN, np.uint8)
    pending = np.ones(CODE_POINTS, bool)
    for low, high, uniform in (*_UNIFORM, (*_HANGUL, LETTER)):
        table[low : high + 1] = uniform
        pending[low : high + 1] = False
    for low, high in _EMPTY:
        pending[low:high] = False
    for code in np.flatnonzero(pending).tolist():
        table[code] = _entry(chr(code))
    for low, high in _CJK_RANGES:
        table[low : high + 1] |= CJK
    table.setflags(write=False)
    return table


def _entry(char: str) -> int:
    category = unicodedata.category(char)
    if category == "Cn":
        return UNKNOWN
    known = OTHER
    if char in "\r\n":
        known = NEWLINE
    elif char in _SPACES or _EN_QUAD <= ord(char) <= _HAIR_SPACE:
        known = SPACE
    elif category in _CLASS:
        known = _CLASS[category]
    elif category[0] in _INITIAL:
        known = _INITIAL[category[0]]
    return known | (NFC_MAYBE if _may_compose(char) else 0)


def _may_compose(char: str) -> bool:
    """False if NFC keeps the character in every context."""
    if unicodedata.combining(char) or not unicodedata.is_normalized("NFC", char):
        return True
    return char in _seconds()


@functools.cache
def _seconds() -> frozenset[str]:
    """Starters that compose with the character before them, besides combining marks."""
    seconds = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for code in range(0x80, 0x12000):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            seconds.add(chr(int(parts[1], 16)))
    return frozenset(seconds)
