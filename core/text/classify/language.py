"""Language identification among 78 languages: by script, then by n-grams of letters and by words.

A script that only one language uses decides (from a share of MIN_SCRIPT of the letters; kana among
Han means Japanese). For the most frequent shared script, a naive Bayes table decides among its
languages (kernels.language, language_profiles), on the first 1,000 letters. Adjacent n-grams are
not independent, so the sums are multiplied by TRUST before they become probabilities. The language
is `und` (undetermined) where the confidence is low, where the mean of the best language is at the
level of mixed text, or where too few of the words are frequent in it.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.text.classify.language_profiles import GROUPS, SCRIPTS, SHARED, load
from sabia.kernels.language.definitions import STEP
from sabia.kernels.language.interface import score
from sabia.kernels.runtime.dispatch import text_engine

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
