"""Relevance of a page in a focused crawl: a score in [0, 1].

Three judges of pages: a fastText model; words that a page should contain; or example texts, where
the score is the TF-IDF similarity to the nearest example (1 is the mean similarity of an example to
its nearest other example).
"""

import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

from sabia.core.errors import BadData, UsageError
from sabia.core.options.crawl import CrawlOptions, Focus

KNOWN_LETTERS = 4
DECAY = 0.7  # of the relevance that links inherit from a page that is not relevant itself
SCORED_CHARACTERS = 20_000
_WORD = re.compile(r"\w+")


class PageJudge(Protocol):
    """Scores a page's text."""

    def __call__(self, text: str) -> float:
        """A score in [0, 1]."""

    def knows(self, word: str) -> bool:
        """Whether a word of a link has the higher prior of a `LinkJudge`."""


def words_of(text: str) -> list[str]:
    """Words in lower case without accents; numbers folded to 0."""
    plain = unicodedata.normalize("NFKD", text.lower())
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return ["0" if word.isdecimal() else word for word in _WORD.findall(plain)]


def make_judge(options: Focus) -> PageJudge | None:
    """The judge of `--classifier` or `--focus`; None without either."""
    if options.classifier:
        return FastTextJudge(options.classifier, options.label)
    if options.focus and os.path.isfile(options.focus):
        with open(options.focus, encoding="utf-8", errors="replace") as file:
            return ExampleJudge([line for line in file if line.strip()])
    return WordJudge(options.focus) if options.focus else None


class WordJudge:
    """The share of the given words that a page contains, as a word or the beginning of one."""

    def __init__(self, words: str) -> None:
        self.words = sorted(set(words_of(words)))
        if not self.words:
            raise UsageError(
                f"--focus: {words!r} contains no word (expected words, or a file of texts)"
            )

    def __call__(self, text: str) -> float:
        page_words = set(words_of(text[:SCORED_CHARACTERS]))
        hits = sum(any(f.startswith(word) for f in page_words) for word in self.words)
        return hits / len(self.words)

    def knows(self, word: str) -> bool:
        """True for the given words and words that begin like them."""
        return word.startswith(tuple(self.words))


class ExampleJudge:
    """Similarity to the nearest of some example texts, in units of their own similarity."""

    def __init__(self, examples: Sequence[str]) -> None:
        counts = [Counter(words_of(text[:SCORED_CHARACTERS])) for text in examples]
        counts = [count for count in counts if count]
        if len(counts) < 2:
            raise UsageError("--focus: a file of examples needs at least two texts, one per line")
        frequency = Counter(word for count in counts for word in count)
        self.weight = {w: math.log(1 + len(counts) / n) for w, n in frequency.items()}
        self.unknown = math.log(1 + len(counts))
        self.vectors = [self._vector(count) for count in counts]
        self.unit = fmean(
            max(_cosine(v, other) for other in self.vectors if other is not v) for v in self.vectors
        )

    def __call__(self, text: str) -> float:
        vector = self._vector(Counter(words_of(text[:SCORED_CHARACTERS])))
        nearest = max(_cosine(vector, example) for example in self.vectors)
        return min(1.0, nearest / self.unit) if self.unit else 0.0

    def knows(self, word: str) -> bool:
        """True for words of the examples with at least KNOWN_LETTERS letters."""
        return len(word) >= KNOWN_LETTERS and word in self.weight

    def _vector(self, count: Counter[str]) -> dict[str, float]:
        raw = {w: (1 + math.log(n)) * self.weight.get(w, self.unknown) for w, n in count.items()}
        length = math.sqrt(sum(value * value for value in raw.values())) or 1.0
        return {word: value / length for word, value in raw.items()}


def _cosine(a: dict[str, float], b: dict[str, float]) -> float:
    small, large = (a, b) if len(a) < len(b) else (b, a)
    return sum(value * large.get(word, 0.0) for word, value in small.items())


class FastTextJudge:
    """The probability that a fastText model gives to one label."""

    def __init__(self, path: str, label: str) -> None:
        import fasttext

        if not os.path.isfile(path):
            raise UsageError(f"--classifier: {path}: No such file or directory")
        try:
            self.model = fasttext.load_model(path)
        except (ValueError, RuntimeError) as error:
            raise BadData(f"{path}: not a fastText model ({error})") from error
        self.label = f"__label__{label.removeprefix('__label__')}"
        if self.label not in self.model.get_labels():
            known = ", ".join(x.removeprefix("__label__") for x in self.model.get_labels())
            raise UsageError(f"--label: {label!r} is not a label of {path} (expected {known})")

    def __call__(self, text: str) -> float:
        line = " ".join(text[:SCORED_CHARACTERS].split())
        labels, probabilities = self.model.predict(line, k=-1)
        scores = dict(zip(labels, map(float, probabilities), strict=True))
        return min(1.0, scores.get(self.label, 0.0))

    def knows(self, word: str) -> bool:
        """False: a model of pages does not score single words."""
        return False


def link_relevance(score: float, inherited: float, options: CrawlOptions) -> float | None:
    """The relevance that the links of a page inherit; None if they must not be followed.

    The links of a relevant page inherit its score. Those of other pages are not followed (hard
    focus), or inherit half the sum of the score and of the decayed relevance of the page itself
    (soft focus): a path can lead through menus, but not far through irrelevant pages.
    """
    if score >= options.threshold:
        return score
    return None if options.hard else (score + DECAY * inherited) / 2
