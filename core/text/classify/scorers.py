"""Scorers: trained models that score texts, with one small protocol.

A scorer is opened once by path, pickled into worker processes (only its path; the first call there
loads the model) and called with whole batches. `names` are the scores it adds. `digest` identifies
its weights in fingerprints, so that outputs are computed again after the model was retrained. This
package has the fastText scorer; scorers that need a transformer or a language model are in
core/recipes (score_documents) and follow the same protocol.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.text.classify import fasttext_model


class Scorer(Protocol):
    """What a scorer must implement; instances must be picklable."""

    names: tuple[str, ...]  # of the scores, in a fixed order
    digest: str  # of the weights and of everything else that changes scores

    def score(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """float32[n] for every name; NaN where a text cannot be scored."""


@runtime_checkable
class ColumnScorer(Protocol):
    """A scorer that reads Arrow buffers directly, without a Python string for each text."""

    def score_column(self, texts: pa.StringArray) -> dict[str, np.ndarray]:
        """The same as `score` over a string array without nulls."""


class FastTextScorer:
    """The probability of every label of a fastText model, under the label's name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.digest = fasttext_model.digest(path)
        self.names = fasttext_model.load(path).labels

    def score(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """float32[n] of every label."""
        return self.score_column(pa.array(texts, pa.string()))

    def score_column(self, texts: pa.StringArray) -> dict[str, np.ndarray]:
        """float32[n] of every label, from the array's own buffers."""
        scores = fasttext_model.score_array(fasttext_model.load(self.path), texts)
        return dict(zip(self.names, scores.T, strict=True))


class PrefixedScorer:
    """A scorer whose scores are named PREFIX_name."""

    def __init__(self, scorer: Scorer, prefix: str) -> None:
        self.scorer, self.prefix = scorer, prefix
        self.names = tuple(f"{prefix}_{name}" for name in scorer.names)
        self.digest = f"{prefix}={scorer.digest}"

    def score(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """The same scores under the new names."""
        return self._named(self.scorer.score(texts))

    def score_column(self, texts: pa.StringArray) -> dict[str, np.ndarray]:
        """The same scores under the new names."""
        return self._named(score_column(self.scorer, texts))

    def _named(self, scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {f"{self.prefix}_{name}": values for name, values in scores.items()}


def split_name(argument: str) -> tuple[str, str]:
    """(prefix, path) of `PATH` (prefix empty) or `NAME=PATH`."""
    prefix, mark, path = argument.partition("=")
    return (prefix, path) if mark and prefix.isidentifier() else ("", argument)


def open_scorer(path: str) -> Scorer:
    """The scorer of a model file. Raises UsageError or BadData where it is no model."""
    return FastTextScorer(path)


def with_prefix(scorer: Scorer, prefix: str) -> Scorer:
    """The scorer with PREFIX_ before its names; itself for an empty prefix."""
    return PrefixedScorer(scorer, prefix) if prefix else scorer


def check_names(scorers: Sequence[Scorer]) -> None:
    """Raise UsageError where two scorers give the same score."""
    names = [name for scorer in scorers for name in scorer.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"--model: two models give the score {twice[0]!r}; name one: --model NAME=PATH"
        )


def score_column(scorer: Scorer, texts: pa.StringArray) -> dict[str, np.ndarray]:
    """float32[n] for each of the scorer's names, over a string array without nulls."""
    if isinstance(scorer, ColumnScorer):
        return scorer.score_column(texts)
    return scorer.score(texts.to_pylist())
