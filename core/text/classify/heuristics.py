"""Quality of a text by counting: the filters of Gopher, C4 and FineWeb, and one graded verdict.

Every figure of sabia.kernels.quality is a score, so that thresholds can be chosen later. A filter
is a list of RULES over figures in the order of the published code: `gopher`, `c4` and `fineweb` are
1 where no rule of theirs fails, else 0, and `first_failure` names the rule that fails first. A
figure without meaning fails no rule, except in a text without words, which fails every filter.
Gopher's rule of stop words takes English ones for texts in English or no known language, and the
eight most frequent words of the language for others.

`quality` in [0, 1] is the product over GRADES of 1 - weight * badness, where badness rises linearly
from 0 at the good bound to 1 at the bad bound: an ordinary page has 1, and one figure that is
plainly wrong brings it to 0 (or to 1 - weight where good texts break the rule too).
Rae et al. 2021 (appendix A), Raffel et al. 2020, Penedo et al. 2024; thresholds as in datatrove.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sabia.core.shards.named_numbers import as_dict
from sabia.core.text.classify.language import LANGUAGES, Verdict, frequent_words
from sabia.kernels.quality.definitions import DUPLICATED, FIGURES, TOP
from sabia.kernels.quality.interface import measure as measure_documents
from sabia.kernels.runtime.dispatch import numba_available
from sabia.kernels.text.words import word_hash

ENGLISH_STOPS = ("the", "be", "to", "of", "and", "that", "have", "with")
STOPS = 8  # words of a list

FILTERS = ("gopher", "c4", "fineweb")


@dataclass(frozen=True)
class Rule:
    """A text fails where `figure` is above (or, with `below`, under) the threshold."""

    name: str
    figure: str
    threshold: float
    below: bool = False

    def fails(self, values: np.ndarray) -> np.ndarray:
        """bool[n]; False where the figure is missing (NaN)."""
        compare: Callable[..., np.ndarray] = operator.lt if self.below else operator.gt
        with np.errstate(invalid="ignore"):
            return compare(values, self.threshold)


_TOP_LIMITS = zip(TOP, (0.2, 0.18, 0.16), strict=True)
_DUPLICATE_LIMITS = zip(DUPLICATED, (0.15, 0.14, 0.13, 0.12, 0.11, 0.10), strict=True)
RULES: dict[str, tuple[Rule, ...]] = {
    "gopher": (
        Rule("too few words", "word_count", 50, below=True),
        Rule("too many words", "word_count", 100_000),
        Rule("short words", "mean_word_length", 3, below=True),
        Rule("long words", "mean_word_length", 10),
        Rule("hash signs", "gopher_hash_ratio", 0.1),
        Rule("ellipses", "gopher_ellipsis_ratio", 0.1),
        Rule("bullets", "gopher_bullet_lines", 0.9),
        Rule("lines end in ellipses", "gopher_ellipsis_lines", 0.3),
        Rule("words without letters", "gopher_alpha_words", 0.8, below=True),
        Rule("few stop words", "gopher_stop_words", 2, below=True),
        Rule("repeated paragraphs", "gopher_dup_paragraphs", 0.3),
        Rule("repeated paragraphs", "gopher_dup_paragraph_chars", 0.2),
        Rule("repeated lines", "gopher_dup_lines", 0.3),
        Rule("repeated lines", "gopher_dup_line_chars", 0.2),
        *(Rule(f"one {k}-gram", f"gopher_top_{k}gram_share", at) for k, at in _TOP_LIMITS),
        *(
            Rule(f"repeated {k}-grams", f"gopher_dup_{k}gram_share", at)
            for k, at in _DUPLICATE_LIMITS
        ),
    ),
    "c4": (
        Rule("lorem ipsum", "c4_lorem_ipsum", 0),
        Rule("curly bracket", "c4_curly_bracket", 0),
        Rule("too few sentences", "c4_sentences", 5, below=True),
    ),
    "fineweb": (
        Rule("unpunctuated lines", "fineweb_punctuated_lines", 0.12, below=True),
        Rule("short lines", "fineweb_short_lines", 0.67),
        Rule("repeated characters", "fineweb_dup_chars", 0.01),
        Rule("many line breaks", "fineweb_newline_ratio", 0.3),
    ),
}


@dataclass(frozen=True)
class Grade:
    """Badness is 0 at `good`, 1 at `bad` and beyond, linear between them."""

    score: str
    good: float
    bad: float
    weight: float = 1.0

    def factor(self, values: np.ndarray) -> np.ndarray:
        """What the grade contributes, in [1 - weight, 1]; 1 where the figure is missing (NaN)."""
        badness = np.clip((values - self.good) / (self.bad - self.good), 0, 1)
        return 1 - self.weight * np.nan_to_num(badness, nan=0.0)


GRADES = (
    Grade("word_count", good=50, bad=5),
    Grade("word_count", good=100_000, bad=1_000_000),
    Grade("mean_word_length", good=3, bad=2),
    Grade("mean_word_length", good=10, bad=14),
    Grade("gopher_hash_ratio", good=0.1, bad=0.3),
    Grade("gopher_ellipsis_ratio", good=0.1, bad=0.3),
    Grade("gopher_bullet_lines", good=0.8, bad=1.0, weight=0.8),
    Grade("gopher_ellipsis_lines", good=0.3, bad=0.6),
    Grade("gopher_alpha_words", good=0.6, bad=0.25),
    Grade("stop_words", good=0.15, bad=0.03),
    Grade("gopher_dup_line_chars", good=0.2, bad=0.6),
    Grade("gopher_top_2gram_share", good=0.15, bad=0.35),
    Grade("gopher_dup_5gram_share", good=0.2, bad=0.7),
    Grade("fineweb_punctuated_lines", good=0.12, bad=0.0, weight=0.6),
    Grade("fineweb_short_lines", good=0.7, bad=1.0, weight=0.4),
    Grade("upper_ratio", good=0.3, bad=0.7),
    Grade("links", good=0.03, bad=0.2),
    Grade("code_marks", good=0.03, bad=0.15, weight=0.8),
)
NAMES = (*FIGURES, "stop_words", "quality", *FILTERS)


@functools.lru_cache(maxsize=1)
def _stop_lists() -> tuple[np.ndarray, np.ndarray]:
    """(hashes uint64, bounds int64): of English at 0, then of LANGUAGES in order."""
    lists = [ENGLISH_STOPS, *(frequent_words(name)[:STOPS] for name in LANGUAGES)]
    lists[1 + LANGUAGES.index("en")] = ENGLISH_STOPS
    hashes = np.array([word_hash(word) for words in lists for word in words], np.uint64)
    return hashes, np.concatenate(([0], np.cumsum([len(words) for words in lists])))


def measure(data: np.ndarray, offsets: np.ndarray, verdict: Verdict) -> dict[str, np.ndarray]:
    """All scores of NAMES, float64[n] each, of documents data[offsets[i]:offsets[i+1]] (UTF-8);
    NaN where a figure has no meaning."""
    hashes, bounds = _stop_lists()
    which = np.maximum(verdict.number + 1, 0)
    which[(np.diff(bounds) == 0)[which]] = -1  # languages without spaces have no such words
    engine = "numba" if numba_available() else "python"
    scores = measure_documents(data, offsets, (hashes, bounds), which, engine)
    scores["stop_words"] = np.where(verdict.number >= 0, verdict.function_words, np.nan)
    graded = np.ones(len(offsets) - 1)
    for grade in GRADES:
        graded *= grade.factor(scores[grade.score])
    scores["quality"] = graded
    return scores | verdicts(scores)


def verdicts(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """1.0 where a text passes all rules of a filter, else 0.0, for each of FILTERS."""
    wordless = scores["word_count"] == 0
    found = {}
    for name in FILTERS:
        failed = wordless.copy()
        for rule in RULES[name]:
            failed |= rule.fails(scores[rule.figure])
        found[name] = (~failed).astype(float)
    return found


def first_failure(name: str, figures: Mapping[str, float]) -> str:
    """Why a text fails a filter: its first failing rule with the figure, or `` if it passes.

    A figure that is not there is one without meaning.
    """
    for rule in RULES[name]:
        value = figures.get(rule.figure, float("nan"))
        if rule.fails(np.array([value]))[0]:
            sign = "<" if rule.below else ">"
            return f"{name}: {rule.name} ({rule.figure} {value:.4g} {sign} {rule.threshold:g})"
    return f"{name}: no words" if figures.get("word_count") == 0 else ""


def failures(scores: pa.Array, names: Sequence[str]) -> list[list[str]]:
    """For each row of a `scores` column, why it fails each of the named filters that it fails."""
    rows = scores.to_pylist() if names else [None] * len(scores)
    reasons = []
    for row in rows:
        figures = as_dict(row)
        found = (first_failure(name, figures) for name in names)
        reasons.append([reason for reason in found if reason])
    return reasons
