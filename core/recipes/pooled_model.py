"""A model that computes one vector per row of tokens: batches, padding and pooling.

Rows are batched in order of length, as many as fit into BATCH_TOKENS, so that little is computed
on padding. Where each new shape is compiled, there are few shapes. The vector of a row does not
depend on the other rows of its batch. A row's tokens are weighted by a pooling
(core.model.forward.pool_weights).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sabia.core import stop
from sabia.core.model.forward import pool_weights
from sabia.core.ops.product import Array
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec.model import ModelSpec, Pooling

Params = Mapping[str, np.ndarray]
BATCH_TOKENS = 16_384
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
_WIDTH = 64  # the smallest padded length where there are to be few shapes; then its doubles


class PooledModel(ABC):
    """A model on this process's default device."""

    def __init__(
        self, spec: ModelSpec, params: Params, pooling: Pooling, backend: str, precision: str
    ) -> None:
        self.spec, self.pooling = spec, pooling
        self.ops = load_ops(backend)
        self.params = self.ops.to_device(params, PRECISIONS[precision])
        self.few_shapes = backend == "jax" or str(self.params["embed"].device) != "cpu"
        if backend == "jax":
            import jax

            self._forward: Callable[..., Any] = jax.jit(self.forward)
        else:
            import torch

            self._forward = torch.inference_mode()(self.forward)

    @abstractmethod
    def forward(self, params: Params, ids: Array, segments: Array, pool: Array) -> Any:
        """fp32 [B, out] of ids[B, T], segments[B, T] or None, and weights pool[B, T]."""

    def vectors(self, rows: Sequence[np.ndarray], out: int) -> np.ndarray:
        """float32[n, out] of rows of token ids."""
        vectors = np.zeros((len(rows), out), np.float32)
        for numbers in self._batches([len(row) for row in rows]):
            stop.check()
            vectors[numbers] = self._batch([rows[i] for i in numbers])
        return vectors

    def _batches(self, lengths: Sequence[int]) -> Iterator[np.ndarray]:
        """The row numbers of each batch, the longest rows first."""
        order = np.argsort(np.array(lengths, np.int64), kind="stable")[::-1]
        start = 0
        while start < len(order):
            count = max(1, BATCH_TOKENS // self._width(lengths[order[start]]))
            yield order[start : start + count]
            start += count

    def _width(self, longest: int) -> int:
        if not self.few_shapes:
            return longest
        shape = _WIDTH
        while shape < longest:
            shape *= 2
        return max(longest, min(shape, self.spec.max_positions))

    def _batch(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        width = self._width(max(len(row) for row in rows))
        count = max(1, BATCH_TOKENS // width) if self.few_shapes else len(rows)
        ids, lengths = np.zeros((count, width), np.int32), np.ones(count, np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)], lengths[number] = row, len(row)
        pool = pool_weights(lengths, width, self.pooling)
        padded = self.few_shapes or bool((lengths < width).any())
        segments = None
        # a causal model's tokens do not attend to the padding after them
        if padded and not self.spec.causal:
            segments = (np.arange(width) < lengths[:, None]).astype(np.int32)
        arrays = self.ops.to_device({"pool": pool})
        x = self._forward(self.params, ids, segments, arrays["pool"])
        return self.ops.to_numpy({"x": x})["x"][: len(rows)]
