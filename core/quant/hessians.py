"""Hessians of the matrices for GPTQ, from calibration inputs, one layer at a time.

A pass for layer i starts from the stored outputs of layer i - 1: `CalibrationStage` is a stage of
one layer, which ends the pass after it. So calibrating L layers costs about two full passes.
`Hessians` is a rule of the chain of products that sums x xᵀ of their inputs x.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sabia.core.model import forward
from sabia.core.ops.base import Ops, Stage
from sabia.core.ops.product import Multiply, Product, Rule
from sabia.core.spec import ModelSpec

BATCH_TOKENS = 8_192


@dataclass(frozen=True)
class Batch:
    """ids[B, T] and segments[B, T]: 1 for tokens, 0 for padding."""

    ids: np.ndarray
    segments: np.ndarray

    @property
    def mask(self) -> torch.Tensor:
        """[B, T], True for tokens."""
        return torch.from_numpy(self.segments > 0)


def batches(rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Rows of similar length in padded batches of about `batch_tokens` tokens."""
    batches, group = list[Batch](), list[Sequence[int]]()
    for row in sorted(rows, key=len):
        if group and (len(group) + 1) * len(row) > batch_tokens:
            batches.append(_batch(group))
            group = []
        group.append(row)
    return [*batches, _batch(group)]


def _batch(rows: Sequence[Sequence[int]]) -> Batch:
    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), np.int64)  # [B, T], right-padded with 0
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    lengths = np.array([len(row) for row in rows])
    return Batch(ids, (np.arange(width) < lengths[:, None]).astype(np.int64))


class _BlockOutput(Exception):
    """Ends a forward pass after a block; carries the block's output states [B, T, D]."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


class CalibrationStage(Stage):
    """One layer; `index` after the last layer: none, for the final norm.

    states: output of the layer before; None for the embeddings (index 0).
    """

    def __init__(self, index: int, states: torch.Tensor | None) -> None:
        self.index, self.states, self.layers = index, states, 0

    def begin(self, embed: Any, layers: int) -> tuple[Any, range]:
        """See Ops.stage_input."""
        self.layers = layers
        x = embed() if self.states is None else self.states
        return x, range(self.index, min(self.index + 1, layers))

    def end(self, x: Any, stats: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """See Ops.stage_output."""
        if self.index < self.layers:
            raise _BlockOutput(x)
        return x, stats


class Hessians(Rule):
    """H = 2/n Σ x xᵀ by parameter name, over n tokens; computed once for matrices of one input."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}  # name → Σ x xᵀ [I, I], float64
        self.tokens = 0
        self._mask: torch.Tensor | None = None

    def begin(self, mask: torch.Tensor) -> None:
        """Start a batch with token mask[B, T]."""
        self._mask = mask
        self.tokens += int(mask.sum())

    def apply(self, product: Product, proceed: Multiply) -> list[Any]:
        """See Rule.apply."""
        if product.plan is None:  # routed experts see a part of the tokens each
            self.add(product.x, [matrix.name for matrix in product.matrices])
        return proceed(product)

    def add(self, x: torch.Tensor, names: Sequence[str]) -> None:
        """Add the inputs x[B, T, I] of products with the parameters `names`."""
        if self._mask is None:
            return
        flat = x[self._mask.to(x.device)].double()  # [tokens, I], without padding
        product = flat.T @ flat  # Σ x xᵀ, [I, I]
        for name in names:
            before = self.sums.get(name)
            self.sums[name] = product.clone() if before is None else before.add_(product)

    def of(self, name: str) -> torch.Tensor | None:
        """H[I, I] of a parameter; None if it had no inputs."""
        return None if name not in self.sums else self.sums[name] * (2 / self.tokens)


def run_block(
    spec: ModelSpec,
    params: Mapping[str, Any],
    ops: Ops,
    batch: Batch,
) -> torch.Tensor:
    """The output [B, T, D] of the layer of a CalibrationStage; else the final state."""
    try:
        return forward.hidden(spec, params, batch.ids, ops, segments=batch.segments)
    except _BlockOutput as output:
        return output.states
