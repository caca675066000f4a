"""Quality heuristics: the filters of Gopher, C4 and FineWeb, and one continuous quality score.

Every statistic of sabia.kernels.quality is a score, so that thresholds can be chosen later. A
filter is a list of RULES on statistics, in the order of the published code: `gopher`, `c4` and
`fineweb` are 1 where none of their rules fails, else 0; `first_failure` names the rule that fails
first. An undefined statistic fails no rule, except in a text without words, which fails all
filters. Gopher's rule on stop words uses English ones for texts in English or an unknown language,
and the eight most frequent words of the language for others.

`quality` in [0, 1] is the product over QUALITY_FACTORS of 1 - weight * badness, where badness rises
linearly from 0 at the good bound to 1 at the bad bound. An ordinary page has quality 1; one
statistic beyond its bad bound gives 0 (or 1 - weight where good texts break the rule too).
Rae et al. 2021 (appendix A), Raffel et al. 2020, Penedo et al. 2024; thresholds as in datatrove.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import as_dict
from sabia.core.text.classify.language import LANGUAGES, IdentifiedLanguages, frequent_words
from sabia.kernels.quality.definitions import DUPLICATED, FIGURES, TOP
from sabia.kernels.quality.interface import measure as measure_documents
from sabia.kernels.runtime.dispatch import text_engine
from sabia.kernels.text.words import word_hash

ENGLISH_STOPS = ("the", "be", "to", "of", "and", "that", "have", "with")
STOPS = 8  # stop words per language

FILTERS = ("gopher", "c4", "fineweb")


@dataclass(frozen=True)
class FilterRule:
    """A text fails where `figure` is above the threshold, or below it if `below` is true."""

    name: str
    figure: str
    threshold: float
    below: bool = False

    def fails(self, values: np.ndarray) -> np.ndarray:
        """bool[n]; False where the figure is NaN."""
        compare: Callable[..., np.ndarray] = operator.lt if self.below else operator.gt
        with np.errstate(invalid="ignore"):
            return compare(values, self.threshold)


_TOP_LIMITS = zip(TOP, (0.2, 0.18, 0.16), strict=True)
_DUPLICATE_LIMITS = zip(DUPLICATED, (0.15, 0.14, 0.13, 0.12, 0.11, 0.10), strict=True)
RULES: dict[str, tuple[FilterRule, ...]] = {
    "gopher": (
        FilterRule("too few words", "word_count", 50, below=True),
        FilterRule("too many words", "word_count", 100_000),
        FilterRule("short words", "mean_word_length", 3, below=True),
        FilterRule("long words", "mean_word_length", 10),
        FilterRule("hash signs", "gopher_hash_ratio", 0.1),
        FilterRule("ellipses", "gopher_ellipsis_ratio", 0.1),
        FilterRule("bullets", "gopher_bullet_lines", 0.9),
        FilterRule("lines end in ellipses", "gopher_ellipsis_lines", 0.3),
        FilterRule("words without letters", "gopher_alpha_words", 0.8, below=True),
        FilterRule("few stop words", "gopher_stop_words", 2, below=True),
        FilterRule("repeated paragraphs", "gopher_dup_paragraphs", 0.3),
        FilterRule("repeated paragraphs", "gopher_dup_paragraph_chars", 0.2),
        FilterRule("repeated lines", "gopher_dup_lines", 0.3),
        FilterRule("repeated lines", "gopher_dup_line_chars", 0.2),
        *(
            FilterRule(f"one {n}-gram", f"gopher_top_{n}gram_share", limit)
            for n, limit in _TOP_LIMITS
        ),
        *(
            FilterRule(f"repeated {n}-grams", f"gopher_dup_{n}gram_share", limit)
            for n, limit in _DUPLICATE_LIMITS
        ),
    ),
    "c4": (
        FilterRule("lorem ipsum", "c4_lorem_ipsum", 0),
        FilterRule("curly bracket", "c4_curly_bracket", 0),
        FilterRule("too few sentences", "c4_sentences", 5, below=True),
    ),
    "fineweb": (
        FilterRule("unpunctuated lines", "fineweb_punctuated_lines", 0.12, below=True),
        FilterRule("short lines", "fineweb_short_lines", 0.67),
        FilterRule("repeated characters", "fineweb_dup_chars", 0.01),
        FilterRule("many line breaks", "fineweb_newline_ratio", 0.3),
    ),
}


@dataclass(frozen=True)
class QualityFactor:
    """Badness is 0 at `good`, 1 at `bad` and beyond, linear between them."""

    score: str
    good: float
    bad: float
    weight: float = 1.0

    def of(self, values: np.ndarray) -> np.ndarray:
        """The factor, in [1 - weight, 1]; 1 where the score is NaN."""
        badness = np.clip((values - self.good) / (self.bad - self.good), 0, 1)
        return 1 - self.weight * np.nan_to_num(badness, nan=0.0)


QUALITY_FACTORS = (
    QualityFactor("word_count", good=50, bad=5),
    QualityFactor("word_count", good=100_000, bad=1_000_000),
    QualityFactor("mean_word_length", good=3, bad=2),
    QualityFactor("mean_word_length", good=10, bad=14),
    QualityFactor("gopher_hash_ratio", good=0.1, bad=0.3),
    QualityFactor("gopher_ellipsis_ratio", good=0.1, bad=0.3),
    QualityFactor("gopher_bullet_lines", good=0.8, bad=1.0, weight=0.8),
    QualityFactor("gopher_ellipsis_lines", good=0.3, bad=0.6),
    QualityFactor("gopher_alpha_words", good=0.6, bad=0.25),
    QualityFactor("stop_words", good=0.15, bad=0.03),
    QualityFactor("gopher_dup_line_chars", good=0.2, bad=0.6),
    QualityFactor("gopher_top_2gram_share", good=0.15, bad=0.35),
    QualityFactor("gopher_dup_5gram_share", good=0.2, bad=0.7),
    QualityFactor("fineweb_punctuated_lines", good=0.12, bad=0.0, weight=0.6),
    QualityFactor("fineweb_short_lines", good=0.7, bad=1.0, weight=0.4),
    QualityFactor("upper_ratio", good=0.3, bad=0.7),
    QualityFactor("links", good=0.03, bad=0.2),
    QualityFactor("code_marks", good=0.03, bad=0.15, weight=0.8),
)
NAMES = (*FIGURES, "stop_words", "quality", *FILTERS)


@functools.lru_cache(maxsize=1)
def _stop_lists() -> tuple[np.ndarray, np.ndarray]:
    """(hashes uint64, bounds int64) of the stop words of English, then of each of LANGUAGES."""
    lists = [ENGLISH_STOPS, *(frequent_words(name)[:STOPS] for name in LANGUAGES)]
    lists[1 + LANGUAGES.index("en")] = ENGLISH_STOPS
    hashes = np.array([word_hash(word) for words in lists for word in words], np.uint64)
    return hashes, np.concatenate(([0], np.cumsum([len(words) for words in lists])))


def measure(
    data: np.ndarray, offsets: np.ndarray, identified: IdentifiedLanguages
) -> dict[str, np.ndarray]:
    """All scores of NAMES, float64[n] each, of documents data[offsets[i]:offsets[i+1]] (UTF-8);
    NaN where a statistic is undefined."""
    hashes, bounds = _stop_lists()
    lists = np.maximum(identified.number + 1, 0)
    lists[(np.diff(bounds) == 0)[lists]] = -1  # languages without spaces have no stop words
    scores = measure_documents(data, offsets, (hashes, bounds), lists, text_engine())
    scores["stop_words"] = np.where(identified.number >= 0, identified.function_words, np.nan)
    scores["quality"] = np.ones(len(offsets) - 1)
    for factor in QUALITY_FACTORS:
        scores["quality"] *= factor.of(scores[factor.score])
    return scores | apply_filters(scores)


def apply_filters(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """float64[n] for each of FILTERS: 1.0 where a text passes all of its rules, else 0.0."""
    wordless = scores["word_count"] == 0
    passed = {}
    for name in FILTERS:
        failed = wordless.copy()
        for rule in RULES[name]:
            failed |= rule.fails(scores[rule.figure])
        passed[name] = (~failed).astype(float)
    return passed


def first_failure(name: str, figures: Mapping[str, float]) -> str:
    """The first rule of a filter that a text fails, with the figure; empty if it passes all.

    A missing figure counts as undefined.
    """
    for rule in RULES[name]:
        value = figures.get(rule.figure, float("nan"))
        if rule.fails(np.array([value]))[0]:
            sign = "<" if rule.below else ">"
            return f"{name}: {rule.name} ({rule.figure} {value:.4g} {sign} {rule.threshold:g})"
    return f"{name}: no words" if figures.get("word_count") == 0 else ""


def failures(scores: pa.Array, names: Sequence[str]) -> list[list[str]]:
    """For each row of a `scores` column, the first failing rule of each named filter it fails."""
    rows = scores.to_pylist() if names else [None] * len(scores)
    return [
        [reason for name in names if (reason := first_failure(name, as_dict(row)))] for row in rows
    ]
