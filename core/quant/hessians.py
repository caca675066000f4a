"""Calibration: what every matrix's inputs are, layer by layer, each layer run only once or twice.

A pass for layer i starts from the states that the layers before left: an `ops` namespace handed to
the forward pass counts its blocks, skips those before i, gives block i the kept states and ends the
pass behind it; so calibrating L layers costs about two full passes. The same namespace shows the
inputs of every product, whose x xᵀ are added up.
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
    """ids[B, T] and segments[B, T]: 1 where there is a token, 0 where there is padding."""

    ids: np.ndarray
    segments: np.ndarray

    @property
    def mask(self) -> torch.Tensor:
        """[B, T], True where there is a token."""
        return torch.from_numpy(self.segments > 0)


def batches(rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Rows in padded batches of like length, about `batch_tokens` tokens each."""
    found, group = list[Batch](), list[Sequence[int]]()
    for row in sorted(rows, key=len):
        if group and (len(group) + 1) * len(row) > batch_tokens:
            found.append(_batch(group))
            group = []
        group.append(row)
    return [*found, _batch(group)]


def _batch(rows: Sequence[Sequence[int]]) -> Batch:
    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    lengths = np.array([len(row) for row in rows])
    return Batch(ids, (np.arange(width) < lengths[:, None]).astype(np.int64))


class _BlockOutput(Exception):
    """The block asked for has been run; carries its output."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


class BlockOps(WrappedOps):
    """The operations of `base`, for one pass that runs block `index` alone.

    states: what the block before left; None takes the embeddings (index 0). record: sees every
    product's (inputs, name). simulate: replaces a product's inputs, knowing its name.
    """

    def __init__(self, base: Any, index: int | None = None, states: Any = None) -> None:
        super().__init__(base)
        self.index, self.states, self.block = index, states, 0
        self.record: Any = None
        self.simulate: Any = None

    def remat(self, function: Any, policy: str) -> Any:
        """Skip the blocks before `index`; end the pass behind it."""
        last = self.index
        if last is None:
            return self.base.remat(function, policy)
        position, self.block = self.block, self.block + 1

        def call(weights: Any, x: Any) -> Any:
            if position < last:
                # the last block before a head-only pass hands over the kept states
                return (x if self.states is None else self.states), {}
            raise _BlockOutput(function(weights, x if self.states is None else self.states)[0])

        return call

    def linear(self, x: Any, weight: Any, bias: Any = None, *, name: str = "") -> Any:
        """The product, its inputs recorded or changed on the way."""
        if self.record is not None:
            self.record(x, name)
        if self.simulate is not None:
            x = self.simulate(x, name)
        return self.base.linear(x, weight, bias, name=name)


class Hessians:
    """2/n Σ x xᵀ by parameter name, summed over batches; products that share inputs share it."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.tokens = 0
        self._mask: torch.Tensor | None = None
        self._seen: list[tuple[Any, torch.Tensor]] = []

    def begin(self, mask: torch.Tensor) -> None:
        """A new batch with token mask[B, T]."""
        self._mask, self._seen = mask, []
        self.tokens += int(mask.sum())

    def record(self, x: torch.Tensor, name: str) -> None:
        """Add the inputs x[B, T, I] of a product with the parameter `name`."""
        if self._mask is None:
            return
        product = next((found for inputs, found in self._seen if inputs is x), None)
        if product is None:
            flat = x[self._mask.to(x.device)].double()
            product = flat.T @ flat
            self._seen.append((x, product))
        before = self.sums.get(name)
        self.sums[name] = product.clone() if before is None else before.add_(product)

    def of(self, name: str) -> torch.Tensor | None:
        """H[I, I] of a parameter; None where no input reached it."""
        return None if name not in self.sums else self.sums[name] * (2 / self.tokens)


def run_block(
    spec: ModelSpec,
    params: Mapping[str, Any],
    ops: BlockOps,
    batch: Batch,
) -> torch.Tensor:
    """The output of block `ops.index` [B, T, D]; behind the last block, the final hidden state."""
    try:
        return forward.hidden(spec, params, batch.ids, ops, segments=batch.segments)
    except _BlockOutput as done:
        return done.states
