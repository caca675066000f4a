"""Quality of a text by counting: figures in the manner of Gopher, C4 and FineWeb, and one verdict.

Each figure is a score of its own, so thresholds can be chosen later. `quality` in [0, 1] is the
product over RULES of 1 - weight * badness, where badness rises linearly from 0 at the rule's good
bound to 1 at its bad bound: an ordinary page has 1, and one figure that is plainly wrong brings it
to 0 (or to 1 - weight for rules that good texts break too). Rae et al. 2021 (Gopher, appendix A),
Raffel et al. 2020 (C4), Penedo et al. 2024 (FineWeb).
"""

from dataclasses import dataclass

import numpy as np

from sabia.core.text.characters import Texts, sums
from sabia.core.text.language import Verdict
from sabia.kernels.minhash_reference import mix, run_hashes
from sabia.kernels.text_table import LETTER

SHORT_LINE = 30  # characters
REPEAT_WORDS = 5  # n of the n-grams whose repetition counts
BULLETS = "•‣▪▫●○◦-*–·"
TERMINALS = ".!?…:;\"'”’»)。！？"
CODE_MARKS = "{}[]<>;=|\\"


@dataclass(frozen=True)
class Rule:
    """Badness is 0 at `good`, 1 at `bad` and beyond, linear between them."""

    score: str
    good: float
    bad: float
    weight: float = 1.0

    def factor(self, values: np.ndarray) -> np.ndarray:
        """What the rule contributes, in [1 - weight, 1]; 1 where the figure is missing (NaN)."""
        badness = np.clip((values - self.good) / (self.bad - self.good), 0, 1)
        return 1 - self.weight * np.nan_to_num(badness, nan=0.0)


RULES = (
    Rule("word_count", good=50, bad=5),
    Rule("word_count", good=100_000, bad=1_000_000),
    Rule("mean_word_length", good=3, bad=2),
    Rule("mean_word_length", good=10, bad=14),
    Rule("symbol_ratio", good=0.1, bad=0.3),
    Rule("bullet_lines", good=0.8, bad=1.0, weight=0.8),
    Rule("ellipsis_lines", good=0.3, bad=0.6),
    Rule("alpha_words", good=0.7, bad=0.3),
    Rule("stop_words", good=0.15, bad=0.03),
    Rule("duplicate_lines", good=0.2, bad=0.6),
    Rule("top_bigram", good=0.15, bad=0.35),
    Rule("duplicate_ngrams", good=0.2, bad=0.7),
    Rule("punctuated_lines", good=0.12, bad=0.0, weight=0.6),
    Rule("short_lines", good=0.7, bad=1.0, weight=0.4),
    Rule("upper_ratio", good=0.3, bad=0.7),
    Rule("links", good=0.03, bad=0.2),
    Rule("code_marks", good=0.03, bad=0.15, weight=0.8),
)
NAMES = (*dict.fromkeys(rule.score for rule in RULES), "quality")


def measure(texts: Texts, verdict: Verdict) -> dict[str, np.ndarray]:
    """All scores of NAMES, float64[n] each; NaN where a figure has no meaning (no words)."""
    scores = _word_scores(texts) | _line_scores(texts) | _character_scores(texts)
    scores |= _repetition_scores(texts)
    known = verdict.language != "und"
    scores["stop_words"] = np.where(known, verdict.function_words, np.nan)
    quality = np.ones(texts.count)
    for rule in RULES:
        quality *= rule.factor(scores[rule.score])
    scores["quality"] = quality
    return {name: scores[name] for name in NAMES}


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


def _is_any(codes: np.ndarray, marks: str) -> np.ndarray:
    """True where a code point is one of the marks."""
    table = np.zeros(0x10000, bool)
    table[[ord(mark) for mark in marks]] = True
    return table[np.minimum(codes, 0xFFFF)]


def _word_scores(texts: Texts) -> dict[str, np.ndarray]:
    start, end = texts.word_spans
    bounds = texts.word_bounds
    count = np.diff(bounds).astype(float)
    spelled = texts.kind[start] == LETTER  # scripts without spaces have no word lengths
    letters = np.concatenate(([0], np.cumsum(texts.alphabetic)))
    return {
        "word_count": count,
        "mean_word_length": _share(sums((end - start) * spelled, bounds), sums(spelled, bounds)),
        "alpha_words": _share(sums(letters[end] > letters[start], bounds), count),
    }


def _line_scores(texts: Texts) -> dict[str, np.ndarray]:
    start, end = texts.line_spans
    bounds, codes = texts.line_bounds, texts.codes
    lines = np.diff(bounds).astype(float)
    last = codes[end - 1]
    dots = last == ord(".")
    for back in (2, 3):
        dots = dots & (end - back >= start) & (codes[np.maximum(end - back, 0)] == ord("."))
    flags = {
        "bullet_lines": _is_any(codes[start], BULLETS),
        "ellipsis_lines": dots | (last == ord("…")),
        "punctuated_lines": _is_any(last, TERMINALS),
        "short_lines": end - start < SHORT_LINE,
    }
    scores = {name: _share(sums(flag, bounds), lines) for name, flag in flags.items()}
    lengths = (end - start).astype(float)
    repeated = _repeated(texts.document[start], run_hashes(texts.lower, start, end))
    scores["duplicate_lines"] = _share(sums(lengths * repeated, bounds), sums(lengths, bounds))
    return scores


def _character_scores(texts: Texts) -> dict[str, np.ndarray]:
    codes, bounds = texts.codes, texts.bounds
    words = np.diff(texts.word_bounds).astype(float)
    same = texts.document[1:] == texts.document[:-1] if len(codes) else np.empty(0, bool)
    slashes = (codes[:-1] == ord("/")) & (codes[1:] == ord("/")) & same
    links = np.zeros(len(codes), bool)
    links[2:] = slashes[1:] & (codes[:-2] == ord(":")) & same[:-1]
    dots = codes == ord(".")
    ellipsis = np.zeros(len(codes), bool)
    ellipsis[2:] = dots[2:] & dots[1:-1] & dots[:-2] & same[1:] & same[:-1]
    ellipsis[3:] &= ~(dots[:-3] & same[:-2])  # a run of dots counts once
    symbols = (codes == ord("#")) | (codes == ord("…")) | ellipsis
    ink = sums(texts.kind != 0, bounds)
    return {
        "symbol_ratio": _share(sums(symbols, bounds), words),
        "upper_ratio": _share(sums(codes != texts.lower, bounds), sums(texts.alphabetic, bounds)),
        "links": _share(sums(links, bounds), words),
        "code_marks": _share(sums(_is_any(codes, CODE_MARKS), bounds), ink),
    }


def _keys(owner: np.ndarray, value: np.ndarray) -> np.ndarray:
    """One uint64 for an (owner, value) pair."""
    return mix(value ^ mix(owner.astype(np.uint64) + np.uint64(1)))


def _repeated(owner: np.ndarray, value: np.ndarray) -> np.ndarray:
    """True for every occurrence but the first of a value within its owner."""
    keys = _keys(owner, value)
    order = np.argsort(keys, kind="stable")
    again = np.zeros(len(keys), bool)
    again[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    return again


def _ngrams(texts: Texts, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first word, owner, hash) of the word n-grams within documents."""
    words = texts.word_hash
    owner = texts.document[texts.word_spans[0]]
    if len(words) < n:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64)
    first = np.flatnonzero(owner[: len(words) - n + 1] == owner[n - 1 :])
    total = np.zeros(len(first), np.uint64)
    for step in range(n):
        total = total * np.uint64(0xD6E8FEB86659FD93) + words[first + step]
    return first, owner[first], total


def _repetition_scores(texts: Texts) -> dict[str, np.ndarray]:
    """Share of word characters in the most frequent 2-gram, and in 5-grams seen before."""
    start, end = texts.word_spans
    lengths = (end - start).astype(float)
    letters = sums(lengths, texts.word_bounds)
    first, owner, value = _ngrams(texts, 2)
    _, place, number = np.unique(_keys(owner, value), return_index=True, return_counts=True)
    covered = number * (lengths[first[place]] + lengths[first[place] + 1])
    top = np.zeros(texts.count)
    np.maximum.at(top, owner[place], np.where(number > 1, covered, 0.0))
    first, owner, value = _ngrams(texts, REPEAT_WORDS)
    again = first[_repeated(owner, value)]
    within = np.zeros(len(lengths) + 1)
    np.add.at(within, again, 1)
    np.add.at(within, again + REPEAT_WORDS, -1)
    inside = np.cumsum(within)[:-1] > 0
    return {
        "top_bigram": _share(np.minimum(top, letters), letters),
        "duplicate_ngrams": _share(sums(lengths * inside, texts.word_bounds), letters),
    }
