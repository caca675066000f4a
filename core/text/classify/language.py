"""Which language a text is in, among 78: by script, then by n-grams of letters and by words.

A script of one language tells it (from MIN_SCRIPT of the letters on; kana among Han mark Japanese).
Among the languages of the commonest shared script the sums of a naive Bayes table decide
(language_scores, language_profiles); the first 1,000 letters count. Neighbouring n-grams
are not independent, so sums are weighted by TRUST before they become probabilities. `und`
(undetermined) where the evidence is thin: no language leads clearly, the sum of the leader is not
above what mixed text has, or too few of the words are frequent in it.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.text.classify.language_profiles import GROUPS, SCRIPTS, SHARED, load
from sabia.kernels.text.language_scores import STEP, score

UNDETERMINED = "und"
TRUST = 0.25
MIN_CONFIDENCE = 0.5
MIN_MEAN = 0.25  # of the leader's sum over features found, in natural logarithms …
MIN_FUNCTION_WORDS = 0.05  # and of its frequent words among the words, …
SURE_WORDS = 8  # … in texts of at least so many words
MIN_SCRIPT = 0.3  # share of letters in a script of one language
MIN_KANA = 0.05
LANGUAGES = load()[0]
BY_SCRIPT = tuple(name for name in SCRIPTS if name not in SHARED)


@dataclass(frozen=True)
class Verdict:
    """Of n documents: language names object[n], confidence float64[n] in [0, 1], share of words
    that are frequent in the leading language float64[n], its place in LANGUAGES int64[n] (-1 where
    undetermined or told by script)."""

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


def identify(data: np.ndarray, offsets: np.ndarray) -> Verdict:
    """Name the language of each document data[offsets[i]:offsets[i+1]] (UTF-8)."""
    n = len(offsets) - 1
    sums, used, hits, words, letters = score(data, offsets, load()[1])
    shared = letters[:, 1 : 1 + len(SHARED)]
    members = _members()[shared.argmax(axis=1)]
    scores = np.where(members, TRUST * sums / STEP, -np.inf)
    best = scores.argmax(axis=1)
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    confidence = odds.max(axis=1) / odds.sum(axis=1)
    rows = np.arange(n)
    share = hits[rows, best] / np.maximum(words, 1)
    mean = sums[rows, best] / STEP / np.maximum(used, 1)
    thin = (words >= SURE_WORDS) & ((share < MIN_FUNCTION_WORDS) | (mean < MIN_MEAN))
    unsure = thin | (confidence < MIN_CONFIDENCE) | (used == 0)
    names = np.where(unsure, UNDETERMINED, np.array(LANGUAGES, object)[best])
    by_script, certain = _by_script(letters)
    told = by_script != UNDETERMINED
    return Verdict(
        np.where(told, by_script, names),
        np.where(told, certain, np.where(used == 0, 0.0, confidence)),
        np.where(told, np.nan, share),
        np.where(told | unsure, -1, best),
    )


def _by_script(letters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(language or und object[n], share of letters float64[n]) from scripts of one language."""
    shares = letters / np.maximum(letters.sum(axis=1, keepdims=True), 1)
    own = shares[:, 1 + len(SHARED) :]
    best = own.argmax(axis=1)
    certain = own.max(axis=1)
    names = np.where(certain >= MIN_SCRIPT, np.array(BY_SCRIPT, object)[best], UNDETERMINED)
    kana, han = (own[:, BY_SCRIPT.index(name)] for name in ("ja", "zh"))
    japanese = (kana >= MIN_KANA) & (kana + han >= MIN_SCRIPT)
    return np.where(japanese, "ja", names), np.where(japanese, kana + han, certain)


def names_of(texts: list[str]) -> list[str]:
    """The language of each text, `und` where unsure."""
    return identify(*text_buffers(pa.array(texts, pa.string()))).language.tolist()
