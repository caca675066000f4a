"""Token rows with labels, one document per row, and the batches that classifiers are trained on.

A batch is as long as its longest row; if each new shape must be compiled, as the smallest of
LENGTHS that fits. Rows begin with their document, as pooling expects (core.model.forward).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.model.forward import pool_weights
from sabia.core.spec.model import Pooling
from sabia.core.train.token_rows import BatchArrays, TokenRows, read_token_rows

LENGTHS = tuple(64 << n for n in range(12))


@dataclass(frozen=True)
class LabelledRows(TokenRows):
    """labels float32[n, L] and weights float32[n] in the order of reading; causal: the model's
    attention is causal, so that padding at the end needs no segments; few_shapes: each new shape
    must be compiled."""

    labels: np.ndarray
    weights: np.ndarray
    pooling: Pooling
    causal: bool
    few_shapes: bool = False

    @property
    def unpacked(self) -> bool:
        """True if attention needs no segments."""
        return self.causal

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row."""
        return self.row_sizes(np.arange(len(self)))

    def batch(self, rows: np.ndarray, length: int | None = None) -> BatchArrays:
        """input_ids, segments, positions int32[B, T]; pool[B, T], labels[B, L], loss_mask[B, 1],
        tokens[B, 1] and source[B, S] float32. length: bound of T, for few shapes."""
        size = self.row_sizes(rows)  # [B] tokens
        max_length = length or (self.row_length if self.few_shapes else None)
        width = None if max_length is None else _shape(int(size.max()), max_length)
        batch = super().batch(rows, width)
        batch.pop("targets")
        return batch | {
            "loss_mask": self.weights[rows][:, None],
            "labels": self.labels[rows],
            "pool": pool_weights(size, batch["input_ids"].shape[1], self.pooling),
            "tokens": size[:, None].astype(np.float32),
        }


def _shape(longest: int, most: int) -> int:
    return min(next((n for n in LENGTHS if n >= longest), most), most)


def labelled_rows(
    ids: Sequence[Sequence[int] | np.ndarray],
    labels: np.ndarray,
    weights: np.ndarray,
    pooling: Pooling,
    causal: bool,
    few_shapes: bool = False,
) -> LabelledRows:
    """Rows of one document each; raises BadData if there are none."""
    lists = pa.array([np.asarray(document, np.int32) for document in ids], pa.list_(pa.int32()))
    sizes = pa.array([[len(document)] for document in ids], pa.list_(pa.int32()))
    schema = ["input_ids", "document_lengths"]
    rows = read_token_rows([pa.RecordBatch.from_arrays([lists, sizes], schema)])
    arrays: Any = {"labels": labels.astype(np.float32), "weights": weights.astype(np.float32)}
    return LabelledRows(rows.files, **arrays, pooling=pooling, causal=causal, few_shapes=few_shapes)
