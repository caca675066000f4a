"""Flags of code points for the quality statistics: one 16-bit word for each code point.

SPACE and BREAK are Python's `str.isspace` and the boundaries of `str.splitlines`. SYMBOL marks code
points that make no word by themselves (punctuation, symbols, controls: Unicode categories P, S, C
but for private use). TERMINAL is the Unicode property Sentence_Terminal, with the Khmer signs
U+17D6, U+17D9 and U+17DA and U+FF0E. AFFIX, QUOTE, CURRENCY and ICON are used by the word splitter
text.words; SOLO are the letters of scripts written without spaces (see text.folding). Code points
beyond the table are Han up to SOLO_END, and symbols above.
"""

import functools
import unicodedata
from collections.abc import Callable

import numpy as np

from sabia.kernels.text.folding import SOLO as SOLO_KIND
from sabia.kernels.text.folding import TABLE_SIZE, fold, kind

SPACE, BREAK, ALPHA, LOWER, UPPER, DIGIT, AFFIX, ICON = (1 << bit for bit in range(8))
CURRENCY, SYMBOL, TERMINAL, SOLO, QUOTE, CODE = (1 << bit for bit in range(8, 14))

BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉⟦⟧"
PUNCTUATION = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪" + QUOTES
CODE_MARKS = "{}[]<>;=|\\"
_TERMINALS = """
21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e
1735-1736 17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c
1c7e-1c7f 203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf
a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59
10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239
1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946
11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44
16e98 1bc9f 1da88
"""
HAN = ALPHA | LOWER | UPPER | SOLO  # what code points from TABLE_SIZE to SOLO_END are
_UNIFORM = {(0x3400, 0x4DBF): HAN, (0x4E00, 0x9FFF): HAN, (0xAC00, 0xD7A3): HAN & ~SOLO}
_UNIFORM[(0xD800, 0xF8FF)] = 0


def terminals() -> list[int]:
    """Code points that end sentences."""
    ends = (part.partition("-") for part in _TERMINALS.split())
    return [code for low, _, high in ends for code in range(int(low, 16), int(high or low, 16) + 1)]


@functools.lru_cache(maxsize=1)
def flag_table() -> np.ndarray:
    """uint16[TABLE_SIZE]; read-only, made once (about 0.1 s)."""
    characters = [chr(code) for code in range(TABLE_SIZE)]

    def where(test: Callable[[str], bool]) -> np.ndarray:
        return np.fromiter(map(test, characters), bool, TABLE_SIZE)

    alpha, upper, lower = where(str.isalpha), where(str.isupper), where(str.islower)
    table = where(str.isspace) * np.uint16(SPACE)
    table[alpha] |= ALPHA
    table[alpha & ~upper] |= LOWER  # an uncased letter is LOWER and UPPER
    table[alpha & ~lower] |= UPPER
    categories = np.array([unicodedata.category(char) for char in characters])
    table[np.isin(categories.astype("U1"), ("P", "S", "C")) & (categories != "Co")] |= SYMBOL
    table[categories == "So"] |= ICON
    table[categories == "Sc"] |= CURRENCY
    for (low, high), uniform in _UNIFORM.items():
        table[low : high + 1] = uniform
    for code in np.flatnonzero(alpha & ~upper & ~lower & (table & SOLO == 0)).tolist():
        if kind(fold(code)) == SOLO_KIND:
            table[code] |= SOLO
    table[[ord(digit) for digit in "0123456789"]] |= DIGIT
    for flag, chars in ((BREAK, BREAKS), (QUOTE, QUOTES), (AFFIX, PUNCTUATION), (CODE, CODE_MARKS)):
        table[[ord(char) for char in chars]] |= flag
    table[terminals()] |= TERMINAL
    table.setflags(write=False)
    return table


@functools.lru_cache(maxsize=1)
def lower_table() -> np.ndarray:
    """`str.lower` where it gives one code point, else the code point itself; uint32[TABLE_SIZE]."""
    lower = np.arange(TABLE_SIZE, dtype=np.uint32)
    for code in np.flatnonzero(flag_table() & (ALPHA | ICON)).tolist():
        small = chr(code).lower()
        lower[code] = ord(small) if len(small) == 1 else code
    lower.setflags(write=False)
    return lower
