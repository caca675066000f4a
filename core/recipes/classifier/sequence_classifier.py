"""Inference with a trained sequence classifier: scores of token rows and of texts.

The score of a text is the mean over its windows, weighted by their numbers of tokens.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.generate.model_directory import model_fingerprint
from sabia.core.model.forward import class_logits, hidden
from sabia.core.model.storage import hub
from sabia.core.ops.base import Params
from sabia.core.ops.product import Array
from sabia.core.recipes.classifier.token_windows import TextReader, means_by_text
from sabia.core.recipes.pooled_model import PooledModel
from sabia.core.spec.families import load_spec
from sabia.core.spec.model import ClassifierHead, ModelSpec, label_names, problem_of
from sabia.core.text.tokenize.tokenizer import load_tokenizer


class ClassifierModel(PooledModel):
    """A model directory with a classification head."""

    def __init__(self, path: str, backend: str = "torch", precision: str = "fp32") -> None:
        spec, params = hub.load_model(path)
        self.head = _head(spec, path)
        self.problem = problem_of(spec.config)
        super().__init__(spec, params, self.head.pooling, backend, precision)

    def scores(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """float32[n, L] of rows of token ids: probabilities, or numbers of a regression."""
        logits = self.vectors(rows, self.head.labels)
        if self.problem == "regression":
            return logits
        if self.problem == "multi_label_classification":
            return 0.5 * (1 + np.tanh(logits / 2))  # a sigmoid that does not overflow
        exp = np.exp(logits - logits.max(-1, keepdims=True))
        return exp / exp.sum(-1, keepdims=True)

    def forward(self, params: Params, ids: Array, segments: Array, pool: Array) -> Any:
        """The logits of the labels; see PooledModel."""
        x = hidden(self.spec, params, ids, self.ops, segments=segments)
        return class_logits(self.spec, params, x, pool, self.ops)


def _head(spec: ModelSpec, path: str) -> ClassifierHead:
    if spec.classifier is None:
        raise UsageError(
            f"--model: {path} is not a classifier (expected a {spec.family} model with labels, "
            "such as `sabia classify train --model` writes)"
        )
    return spec.classifier


class ModelScorer:
    """core.text.classify.scorers.Scorer of a model directory; pickled as its settings."""

    def __init__(
        self,
        path: str,
        backend: str = "torch",
        length: int = 0,
        long: str = "truncate",
        precision: str = "fp32",
    ) -> None:
        """length: most tokens of a text or a window (0: as in the model's training)."""
        spec = load_spec(path)
        _head(spec, path)
        if length > spec.max_positions:
            raise UsageError(
                f"--length: {length} tokens (expected at most the model's {spec.max_positions})"
            )
        self.path, self.names = path, label_names(spec.config)
        trained = int(spec.config.get("classifier_length") or spec.max_positions)
        self.reader = TextReader(load_tokenizer(path), length or trained, long)
        self._opening = (path, backend, precision)
        settings = f"{model_fingerprint(path)} {self.reader.length} {long} {precision}"
        self.digest = hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()

    def score(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """float32[n] of every label; NaN for a text without tokens."""
        rows, owner = self.reader.read(texts)
        scores = _opened(*self._opening).scores(rows)
        means = means_by_text(scores, rows, owner, len(texts))
        return dict(zip(self.names, np.ascontiguousarray(means.T), strict=True))


_opened = functools.lru_cache(maxsize=2)(ClassifierModel)
