"""Hessians of the matrices for GPTQ, from calibration inputs, one layer at a time.

A pass for layer i starts from the stored outputs of layer i - 1: `BlockOps`, passed to the forward
pass as its operations, counts the blocks, skips those before i, gives block i the stored states and
ends the pass after it. So calibrating L layers costs about two full passes. `BlockOps` also shows
the inputs x of every product, whose x xᵀ are summed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sabia.core.model import forward
from sabia.core.model.ops import WrappedOps
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


class BlockOps(WrappedOps):
    """The operations of `base`, for a pass that computes only block `index` (None: all blocks).

    states: output of the block before; None for the embeddings (index 0). record: called with
    (inputs, name) of every product. simulate: returns changed inputs for (inputs, name).
    """

    def __init__(self, base: Any, index: int | None = None, states: Any = None) -> None:
        super().__init__(base)
        self.index, self.states, self.block = index, states, 0
        self.record: Any = None
        self.simulate: Any = None

    def remat(self, function: Any, policy: str) -> Any:
        """Skip the blocks before `index`; end the pass after it."""
        last = self.index
        if last is None:
            return self.base.remat(function, policy)
        position, self.block = self.block, self.block + 1

        def call(weights: Any, x: Any) -> Any:
            if position < last:
                # the last skipped block returns the stored states as its output
                return (x if self.states is None else self.states), {}
            raise _BlockOutput(function(weights, x if self.states is None else self.states)[0])

        return call

    def linear(self, x: Any, weight: Any, bias: Any = None, *, name: str = "") -> Any:
        """The product, with its inputs recorded or changed."""
        if self.record is not None:
            self.record(x, name)
        if self.simulate is not None:
            x = self.simulate(x, name)
        return self.base.linear(x, weight, bias, name=name)


class Hessians:
    """H = 2/n Σ x xᵀ by parameter name, over n tokens; computed once for products of one input."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}  # name → Σ x xᵀ [I, I], float64
        self.tokens = 0
        self._mask: torch.Tensor | None = None
        self._seen: list[tuple[Any, torch.Tensor]] = []

    def begin(self, mask: torch.Tensor) -> None:
        """Start a batch with token mask[B, T]."""
        self._mask, self._seen = mask, []
        self.tokens += int(mask.sum())

    def record(self, x: torch.Tensor, name: str) -> None:
        """Add the inputs x[B, T, I] of a product with the parameter `name`."""
        if self._mask is None:
            return
        product = next((product for inputs, product in self._seen if inputs is x), None)
        if product is None:
            flat = x[self._mask.to(x.device)].double()  # [tokens, I], without padding
            product = flat.T @ flat  # Σ x xᵀ, [I, I]
            self._seen.append((x, product))
        before = self.sums.get(name)
        self.sums[name] = product.clone() if before is None else before.add_(product)

    def of(self, name: str) -> torch.Tensor | None:
        """H[I, I] of a parameter; None if it had no inputs."""
        return None if name not in self.sums else self.sums[name] * (2 / self.tokens)


def run_block(
    spec: ModelSpec,
    params: Mapping[str, Any],
    ops: BlockOps,
    batch: Batch,
) -> torch.Tensor:
    """The output [B, T, D] of block `ops.index`; for an index after the last, the final state."""
    try:
        return forward.hidden(spec, params, batch.ids, ops, segments=batch.segments)
    except _BlockOutput as output:
        return output.states
