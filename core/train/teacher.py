"""Distillation: what another model predicts for the tokens of a batch, as further arrays of it.

`Teacher` adds the arrays that `core.train.losses.next_token` compares the trained model with, so
that any source of batches, either backend and every micro-batch or division of rows can use it.
Every process holds the whole teacher.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sabia.core.model import forward
from sabia.core.parallel.build_ops import ops_as_served
from sabia.core.spec.model import ModelSpec

LOGIT_BYTES = 256 << 20  # of the logits that are computed together


class Teacher:
    """Adds the predictions of a model, with parameters as NumPy arrays, to batches."""

    def __init__(
        self, spec: ModelSpec, params: Mapping[str, np.ndarray], backend: str, top: int = 0
    ) -> None:
        self.spec, self.top = spec, min(top, spec.vocab_size)
        self.ops = ops_as_served(backend, spec)
        self.params = self.ops.to_device(params, "float32")

    def complete(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch with, of tokens [B, T], teacher_probabilities [B, T, K], teacher_ids
        [B, T, K] where not all tokens are compared, and teacher_information [B, T], Σ p log p.
        """
        length = batch["input_ids"].shape[1]
        rows = max(1, LOGIT_BYTES // (4 * self.spec.vocab_size * length))
        parts = [
            self._of_rows({k: v[start : start + rows] for k, v in batch.items()})
            for start in range(0, len(batch["input_ids"]), rows)
        ]
        made = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return {**batch, **made}

    def _of_rows(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given: dict[str, Any] = {name: batch.get(name) for name in ("positions", "segments")}
        x = forward.hidden(self.spec, self.params, batch["input_ids"], self.ops, **given)
        logits = forward.logits(self.spec, self.params, x, self.ops)
        scores = self.ops.to_numpy({"x": logits})["x"].astype(np.float64)  # [B, T, V]
        made: dict[str, np.ndarray] = {}
        if self.top:
            # the lower id first among equals
            ids = np.argsort(-scores, -1, kind="stable")[..., : self.top]
            made["teacher_ids"] = ids.astype(np.int32)
            scores = np.take_along_axis(scores, ids, -1)
        scores -= scores.max(-1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        probabilities = np.exp(logs)
        made["teacher_probabilities"] = probabilities.astype(np.float32)
        made["teacher_information"] = (probabilities * logs).sum(-1).astype(np.float32)
        return made
