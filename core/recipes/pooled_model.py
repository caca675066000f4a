"""A model over rows of tokens, to one vector a row: the batches, the padding, the backends.

Rows are taken in order of length, as many at a time as `batch_tokens` holds, so little is computed
on padding; where a new shape costs a compilation there are few. What a row gives does not depend on
its company. A row's tokens are weighted by a pooling (core.model.heads.pool_weights).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sabia.core import stop
from sabia.core.model.backend import load_ops
from sabia.core.model.heads import pool_weights
from sabia.core.spec.heads import Pooling
from sabia.core.spec.model import ModelSpec

BATCH_TOKENS = 16_384
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
_STEP = 64  # of lengths where shapes are to be few


class PooledRows(ABC):
    """A model on this process's default device."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, np.ndarray],
        pooling: Pooling,
        backend: str = "torch",
        precision: str = "fp32",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.spec, self.pooling, self.batch_tokens = spec, pooling, batch_tokens
        self.ops = load_ops(backend)
        self.params = self.ops.to_device(params, PRECISIONS[precision])
        self.few_shapes = backend == "jax" or str(self.params["embed"].device) != "cpu"
        self._forward = _compiled(self.forward, backend)

    @abstractmethod
    def forward(self, params: Any, ids: Any, segments: Any, pool: Any) -> Any:
        """fp32 [B, out] of ids[B, T], segments[B, T] or None, and weights pool[B, T]."""

    def vectors(self, rows: Sequence[np.ndarray], out: int) -> np.ndarray:
        """float32[n, out] of rows of token ids."""
        found = np.zeros((len(rows), out), np.float32)
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
        pool = pool_weights(lengths, width, self.pooling)
        padded = self.few_shapes or bool((lengths < width).any())
        segments = None
        if padded and not self.spec.causal:  # a causal model's tokens do not see what is behind
            segments = (np.arange(width) < lengths[:, None]).astype(np.int32)
        arrays = self.ops.to_device({"pool": pool})
        x = self._forward(self.params, ids, segments, arrays["pool"])
        return self.ops.to_numpy({"x": x})["x"][: len(rows)]


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    if backend == "jax":
        import jax

        return jax.jit(function)
    import torch

    return torch.inference_mode()(function)
