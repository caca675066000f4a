"""Token rows with a teacher's likeliest tokens: what `next_token_loss` compares the model with.

Beside a row file lie `FILE.top`, the tokens and their log-probabilities at each token that counts,
in the order of the rows, and `FILE.starts.npy`, where those of each row begin. Both are mapped.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sabia.core.train.token_rows import BatchArrays, TokenRows

TOP, STARTS = ".top", ".starts.npy"
ENTRY = np.dtype([("id", "<i4"), ("logprob", "<f4")])


def bucketed(logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From log p[n, K]: p[n, K], the rest of the mass 1 - Σ p [n], and Σ p log p with the rest as
    one bucket [n], float64. A sum above 1, which rounding makes, is divided out."""
    p = np.exp(logprobs.astype(np.float64))
    p /= np.maximum(p.sum(-1, keepdims=True), 1.0)
    rest = np.maximum(1.0 - p.sum(-1), 0.0)
    parts = np.concatenate([p, rest[:, None]], 1)
    logs = np.log(np.where(parts > 0, parts, 1.0))
    return p, rest, (parts * logs).sum(-1)


@dataclass(frozen=True)
class DistilledRows(TokenRows):
    """The rows of one file, and `top` tokens of the teacher at each token that counts."""

    top: int = 0

    @cached_property
    def _entries(self) -> np.ndarray:
        return np.memmap(f"{self.files[0].name}{TOP}", ENTRY, "r").reshape(-1, self.top)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.asarray(np.load(f"{self.files[0].name}{STARTS}"), np.int64)

    def batch(self, rows: np.ndarray, length: int | None = None) -> BatchArrays:
        """As TokenRows.batch, with teacher_ids [B, T, K], teacher_probabilities [B, T, K],
        teacher_rest [B, T] and teacher_information [B, T]; 0 where no token counts."""
        batch = super().batch(rows, length)
        shape = batch["loss_mask"].shape
        ids = np.zeros((*shape, self.top), np.int32)
        probabilities = np.zeros((*shape, self.top), np.float32)
        rest, information = np.zeros((2, *shape), np.float32)
        for index, row in enumerate(np.asarray(rows).tolist()):
            at = np.flatnonzero(batch["loss_mask"][index])
            held = self._entries[self._starts[row] : self._starts[row + 1]][: len(at)]
            ids[index, at] = held["id"]
            probabilities[index, at], rest[index, at], information[index, at] = bucketed(
                held["logprob"]
            )
        made = {"teacher_ids": ids, "teacher_probabilities": probabilities}
        return batch | made | {"teacher_rest": rest, "teacher_information": information}
