"""Which language a text is in: a small naive Bayes over frequent words and letter trigrams.

The model is made from language_data when first used (a few ms): a listed word of rank r has
probability proportional to 1 / (r + 3); trigrams (with word boundaries) are counted in the prose
and the listed words. The first MAX_CHARACTERS of a document decide. Texts in scripts of one
language are told by script. `und` (undetermined) where the evidence is thin: no language leads
clearly, or too few of the words hold sentences of the leading language together.
"""

import functools
from dataclasses import dataclass

import numpy as np

from sabia.core.text.characters import Texts, sums, text_of
from sabia.core.text.language_data import PROSE, SCRIPTS, WORDS

LANGUAGES = (*WORDS,)
UNDETERMINED = "und"
MAX_CHARACTERS = 4_000
WORD_FLOOR = 3e-5  # probability of a listed word in a language that does not list it
TRIGRAM_FLOOR = 0.05  # added count of every trigram
TRIGRAM_WEIGHT = 0.35  # trigrams of a word are not independent of each other
RARE = {"nl": 0.2, "ca": 0.1}  # prior odds against 1 of the others
MIN_CONFIDENCE = 0.6
MIN_FUNCTION_WORDS = 0.12  # share of words that the leading language lists …
SURE_WORDS = 8  # … in texts of at least so many words
MIN_SCRIPT = 0.3  # share of letters in a script of one language
_FIRST_SCRIPT = min(low for ranges in SCRIPTS.values() for low, _ in ranges)


@dataclass(frozen=True)
class _Model:
    """Sorted keys and log-probabilities [keys, languages] of words and trigrams."""

    words: np.ndarray
    word_scores: np.ndarray
    listed: np.ndarray  # bool[keys, languages]
    trigrams: np.ndarray
    trigram_scores: np.ndarray


@dataclass(frozen=True)
class Verdict:
    """Of n documents: language names object[n], confidence float64[n] in [0, 1], share of words
    that hold sentences together in the leading language float64[n]."""

    language: np.ndarray
    confidence: np.ndarray
    function_words: np.ndarray


def _trigrams(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """(trigram keys int64[t], their words int64[t]); a word of k letters has k, with boundaries."""
    start, end = texts.word_spans
    lengths = end - start
    word = np.repeat(np.arange(len(start)), lengths)
    place = np.arange(len(word)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + start[word]
    here = texts.lower[place]
    before = np.where(place > start[word], texts.lower[np.maximum(place - 1, 0)], 0)
    following = texts.lower[np.minimum(place + 1, len(texts.lower) - 1)]
    after = np.where(place + 1 < end[word], following, 0)
    return (before << 42) | (here << 21) | after, word


@functools.lru_cache(maxsize=1)
def _model() -> _Model:
    ranked, counted = {}, {}
    for language in LANGUAGES:
        hashes = text_of(WORDS[language]).word_hash
        unique, rank = np.unique(hashes, return_index=True)
        ranked[language] = (unique, 1 / (rank + 3.0))
        keys = [_trigrams(text_of(part))[0] for part in (PROSE[language], WORDS[language])]
        counted[language] = np.unique(np.concatenate(keys), return_counts=True)
    words, probability, listed = _matrix(ranked, WORD_FLOOR, 0.5)
    trigrams, share, _ = _matrix(counted, TRIGRAM_FLOOR, None)
    scores = np.log(share) - np.log(share).mean(axis=1, keepdims=True)
    return _Model(words, np.log(probability), listed, trigrams, scores)


def _matrix(
    tables: dict[str, tuple[np.ndarray, np.ndarray]], floor: float, mass: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sorted keys, probabilities [keys, languages], listed): rows sum to `mass` of a language."""
    keys = np.unique(np.concatenate([table[0] for table in tables.values()]))
    values = np.zeros((len(keys), len(tables)))
    for column, (own, weights) in enumerate(tables.values()):
        values[np.searchsorted(keys, own), column] = weights
    listed = values > 0
    if mass is None:
        values += floor
        return keys, values / values.sum(axis=0), listed
    return keys, np.maximum(values / values.sum(axis=0) * mass, floor), listed


def _look_up(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places in `wanted` that are known, their index in `keys`)."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    known = np.flatnonzero(keys[index] == wanted)
    return known, index[known]


def _accumulate(owner: np.ndarray, scores: np.ndarray, index: np.ndarray, n: int) -> np.ndarray:
    """Sum scores[index] by owner: float64[n, languages]."""
    columns = [np.bincount(owner, scores[index, c], minlength=n) for c in range(scores.shape[1])]
    return np.stack(columns, axis=1).astype(float)


def beginning(texts: Texts) -> Texts:
    """The first MAX_CHARACTERS of each document."""
    lengths = np.diff(texts.bounds)
    if not len(lengths) or lengths.max() <= MAX_CHARACTERS:
        return texts
    place = np.arange(len(texts.codes)) - np.repeat(texts.bounds[:-1], lengths)
    kept = np.minimum(lengths, MAX_CHARACTERS)
    return Texts(texts.codes[place < MAX_CHARACTERS], np.concatenate(([0], np.cumsum(kept))))


def identify(texts: Texts) -> Verdict:
    """Name the language of each document."""
    texts, model = beginning(texts), _model()
    n = texts.count
    owner = texts.document[texts.word_spans[0]]
    known, index = _look_up(model.words, texts.word_hash)
    score = _accumulate(owner[known], model.word_scores, index, n)
    hits = _accumulate(owner[known], model.listed, index, n)
    keys, word = _trigrams(texts)
    known, index = _look_up(model.trigrams, keys)
    score += TRIGRAM_WEIGHT * _accumulate(owner[word[known]], model.trigram_scores, index, n)
    score += np.log([RARE.get(language, 1.0) for language in LANGUAGES])
    best = score.argmax(axis=1)
    odds = np.exp(score - score.max(axis=1, keepdims=True))
    confidence = odds.max(axis=1) / odds.sum(axis=1)
    words = np.diff(texts.word_bounds)
    share = hits[np.arange(n), best] / np.maximum(words, 1)
    thin = (words >= SURE_WORDS) & (share < MIN_FUNCTION_WORDS)
    unsure = thin | (confidence < MIN_CONFIDENCE) | (words == 0)
    names = np.where(unsure, UNDETERMINED, np.array(LANGUAGES, object)[best])
    by_script, certain = _by_script(texts)
    told = by_script != UNDETERMINED
    confidence = np.where(told, certain, np.where(words == 0, 0, confidence))
    return Verdict(np.where(told, by_script, names), confidence, np.where(told, np.nan, share))


def _by_script(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """(language or und object[n], share of letters float64[n]) from scripts of one language."""
    names = np.full(texts.count, UNDETERMINED, object)
    certain = np.zeros(texts.count)
    if not len(texts.codes) or texts.codes.max() < _FIRST_SCRIPT:
        return names, certain
    letters = np.maximum(sums(texts.alphabetic, texts.bounds), 1)
    for language, ranges in SCRIPTS.items():
        inside = np.zeros(len(texts.codes), bool)
        for low, high in ranges:
            inside |= (texts.codes >= low) & (texts.codes <= high)
        share = np.minimum(sums(inside, texts.bounds) / letters, 1)
        # kana mark Japanese even among many Han characters
        told = (share > (0.05 if language == "ja" else MIN_SCRIPT)) & (names == UNDETERMINED)
        names[told], certain[told] = language, share[told]
    return names, certain
