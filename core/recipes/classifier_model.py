"""A trained sequence classifier at work: token rows in, scores out, and a scorer of texts.

Rows are taken in order of length, as many at a time as `batch_tokens` holds, so little is computed
on padding; where a new shape costs a compilation there are few. What a row scores does not depend
on its company. Windows of one text are averaged, each by its tokens.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sabia.core import stop
from sabia.core.errors import UsageError
from sabia.core.generate.local import model_fingerprint
from sabia.core.model import hub
from sabia.core.model.backend import load_ops
from sabia.core.model.forward import hidden
from sabia.core.model.heads import class_logits, pool_weights
from sabia.core.recipes.classifier_input import TextReader
from sabia.core.spec.families import load_spec
from sabia.core.spec.heads import label_names, problem_of
from sabia.core.spec.model import ModelSpec
from sabia.core.text.tokenizer import load_tokenizer

BATCH_TOKENS = 16_384
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
_STEP = 64  # of lengths where shapes are to be few


class ClassifierModel:
    """A model directory on this process's default device."""

    def __init__(
        self,
        path: str,
        backend: str = "torch",
        precision: str = "fp32",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.spec, params = hub.load_model(path)
        _check(self.spec, path)
        self.problem, self.batch_tokens = problem_of(self.spec.config), batch_tokens
        self.ops = load_ops(backend)
        self.params = self.ops.to_device(params, PRECISIONS[precision])
        self.few_shapes = backend == "jax" or str(self.params["embed"].device) != "cpu"
        self._forward = _compiled(self._logits, backend)

    def scores(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """float32[n, L] of rows of token ids: probabilities, or numbers of a regression."""
        assert self.spec.classifier is not None
        found = np.zeros((len(rows), self.spec.classifier.labels), np.float32)
        for chosen in self._batches([len(row) for row in rows]):
            stop.check()
            found[chosen] = self._batch([rows[i] for i in chosen])
        return found

    def _batches(self, lengths: Sequence[int]) -> Iterator[np.ndarray]:
        order = np.argsort(np.array(lengths, np.int64), kind="stable")[::-1]
        start = 0
        while start < len(order):
            count = max(1, self.batch_tokens // self._width(lengths[order[start]]))
            yield order[start : start + count]
            start += count

    def _width(self, longest: int) -> int:
        if not self.few_shapes:
            return longest
        shape = _STEP
        while shape < longest:
            shape *= 2
        return max(longest, min(shape, self.spec.max_positions))

    def _batch(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        width = self._width(max(len(row) for row in rows))
        count = max(1, self.batch_tokens // width) if self.few_shapes else len(rows)
        ids, lengths = np.zeros((count, width), np.int32), np.ones(count, np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)], lengths[number] = row, len(row)
        assert self.spec.classifier is not None
        pool = pool_weights(lengths, width, self.spec.classifier.pooling)
        padded = self.few_shapes or bool((lengths < width).any())
        segments = None
        if padded and not self.spec.causal:  # a causal model's tokens do not see what is behind
            segments = (np.arange(width) < lengths[:, None]).astype(np.int32)
        arrays = self.ops.to_device({"pool": pool})
        logits = self._forward(self.params, ids, segments, arrays["pool"])
        return self._told(self.ops.to_numpy({"x": logits})["x"][: len(rows)])

    def _logits(self, params: Any, ids: Any, segments: Any, pool: Any) -> Any:
        x = hidden(self.spec, params, ids, self.ops, segments=segments)
        return class_logits(self.spec, params, x, pool, self.ops)

    def _told(self, logits: np.ndarray) -> np.ndarray:
        if self.problem == "regression":
            return logits
        if self.problem == "multi_label_classification":
            return 1 / (1 + np.exp(-logits))
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        return shares / shares.sum(-1, keepdims=True)


def _check(spec: ModelSpec, path: str) -> None:
    if spec.classifier is None:
        raise UsageError(
            f"--model: {path} is no classifier (expected one of {spec.family} with labels, as "
            "`sabia classify train --model` makes it)"
        )


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    if backend == "jax":
        import jax

        return jax.jit(function)
    import torch

    return torch.inference_mode()(function)


class ModelScorer:
    """core.text.scorers.Scorer of a model directory; it travels as its settings."""

    def __init__(
        self,
        path: str,
        backend: str = "torch",
        length: int = 0,
        long: str = "truncate",
        precision: str = "fp32",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        """length: most tokens of a text or a window (0: what the model was trained for)."""
        spec = load_spec(path)
        _check(spec, path)
        if precision not in PRECISIONS:
            raise UsageError(f"--precision: {precision!r} (expected {' or '.join(PRECISIONS)})")
        if length > spec.max_positions:
            raise UsageError(
                f"--length: {length} tokens (expected at most the model's {spec.max_positions})"
            )
        self.path, self.names = path, label_names(spec.config)
        trained = int(spec.config.get("classifier_length") or spec.max_positions)
        self.reader = TextReader(load_tokenizer(path), length or trained, long)
        self._opening = (path, backend, precision, batch_tokens)
        how = f"{model_fingerprint(path)} {self.reader.length} {long} {precision}"
        self.digest = hashlib.blake2b(how.encode(), digest_size=16).hexdigest()

    def score(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """float32[n] of every label; NaN for a text without tokens."""
        rows, owner = self.reader.read(texts)
        scores = _opened(*self._opening).scores(rows)
        sizes = np.array([len(row) for row in rows], np.float64)
        total = np.bincount(owner, sizes, minlength=len(texts))
        with np.errstate(invalid="ignore"):
            return {
                name: (np.bincount(owner, sizes * scores[:, i], minlength=len(texts)) / total)
                .astype(np.float32)
                for i, name in enumerate(self.names)
            }  # fmt: skip


@functools.lru_cache(maxsize=2)
def _opened(path: str, backend: str, precision: str, batch_tokens: int) -> ClassifierModel:
    return ClassifierModel(path, backend, precision, batch_tokens)
