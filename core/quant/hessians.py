"""Hessians of the matrices for GPTQ, from calibration inputs, one layer at a time.

A pass for layer i starts from the stored outputs of layer i - 1: `CalibrationStage` is a stage of
one layer, which ends the pass after it. So calibrating L layers costs about two full passes.
`Hessians` is a rule of the chain of products that sums x xᵀ of their inputs x; each expert of a
layer has the inputs that the router sent to it or, with `send_all`, those of all tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sabia.core.model import forward
from sabia.core.ops.base import Ops, Stage
from sabia.core.ops.experts_torch import DispatchPlan, dispatch
from sabia.core.ops.product import Array, Multiply, Product, Rule
from sabia.core.parallel.build_ops import build_ops
from sabia.core.quant.gptq import STRIPE
from sabia.core.quant.memory_bounds import BATCH_TOKENS
from sabia.core.spec import ModelSpec

FIRST = (".experts.gate", ".experts.up")  # matrices of experts whose inputs are those of the layer


@dataclass(frozen=True)
class Batch:
    """ids[B, T] and segments[B, T]: 1 for tokens, 0 for padding; rows[B]: numbers of the rows."""

    ids: np.ndarray
    segments: np.ndarray
    rows: np.ndarray

    @property
    def mask(self) -> torch.Tensor:
        """[B, T], True for tokens."""
        return torch.from_numpy(self.segments > 0)


def batches(rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Rows of similar length in padded batches of about `batch_tokens` tokens."""
    batches, group = list[Batch](), list[int]()
    for number in sorted(range(len(rows)), key=lambda number: len(rows[number])):
        if group and (len(group) + 1) * len(rows[number]) > batch_tokens:
            batches.append(_batch(rows, group))
            group = []
        group.append(number)
    return [*batches, _batch(rows, group)]


def _batch(rows: Sequence[Sequence[int]], numbers: Sequence[int]) -> Batch:
    lengths = np.array([len(rows[number]) for number in numbers])
    ids = np.zeros((len(numbers), lengths.max()), np.int64)  # [B, T], right-padded with 0
    for slot, number in enumerate(numbers):
        ids[slot, : lengths[slot]] = rows[number]
    segments = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
    return Batch(ids, segments, np.array(numbers))


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

    def begin(self, embed: Array, layers: int) -> tuple[Any, range]:
        """See Ops.stage_input."""
        self.layers = layers
        x = embed() if self.states is None else self.states
        return x, range(self.index, min(self.index + 1, layers))

    def end(self, x: Array, stats: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """See Ops.stage_output."""
        if self.index < self.layers:
            raise _BlockOutput(x)
        return x, stats


Key = tuple[str, int | None]  # parameter name, expert number or None


class _Sum:
    """Σ x xᵀ [I, I] in float32 over some tokens; one for all matrices with these inputs.

    total: the sum at and below the diagonal. sizes: Σ |x| of each column, peaks: max |x|, both [I],
    if they are wanted.
    """

    def __init__(self, like: torch.Tensor, sizes: bool) -> None:
        width = like.shape[-1]
        self.total = like.new_zeros(width, width, dtype=torch.float32)
        self.sizes = like.new_zeros(width, dtype=torch.float32) if sizes else None
        self.peaks, self.tokens = like.new_zeros(width, dtype=torch.float32), 0

    def add(self, x: torch.Tensor) -> None:
        """Add x[tokens, I]."""
        x = x.float()
        for start in range(0, x.shape[1], STRIPE):  # what is above the diagonal is not computed
            end = start + STRIPE
            self.total[start:end, :end].addmm_(x[:, start:end].T, x[:, :end])
        self.tokens += len(x)
        if self.sizes is not None:
            self.sizes += torch.linalg.vector_norm(x, 1, 0)
            self.peaks = torch.maximum(self.peaks, torch.linalg.vector_norm(x, torch.inf, 0))


class Hessians(Rule):
    """H = 2/n Σ x xᵀ by parameter and expert, over the n tokens that it sees.

    experts: the numbers of those whose inputs are summed, as one H takes the memory of a matrix
    [I, I] in float32; dense: whether those of other matrices are. wanted: the parameters whose
    inputs are summed, after the last of which a pass ends; by default all. sizes: whether `means`,
    `peaks` and `largest` are wanted too. every: the experts see all tokens (`send_all`).
    """

    def __init__(
        self,
        experts: range = range(0),
        dense: bool = True,
        wanted: Collection[str] | None = None,
        sizes: bool = True,
        every: bool = False,
    ) -> None:
        self.every = every
        self.experts, self.dense, self.wanted, self.sizes = experts, dense, wanted, sizes
        self.sums: dict[Key, _Sum] = {}
        self._mask: torch.Tensor | None = None
        self._left = set[str]()

    def begin(self, mask: torch.Tensor) -> None:
        """Start a batch with token mask[B, T]."""
        self._mask, self._left = mask, {*(self.wanted or ())}

    def wants(self, name: str) -> bool:
        """Whether the inputs of a parameter are summed."""
        return self.wanted is None or name in self.wanted

    def apply(self, product: Product, proceed: Multiply) -> list[Any]:
        """See Rule.apply."""
        names = [matrix.name for matrix in product.matrices if self.wants(matrix.name)]
        if names and product.plan is not None:
            self._add_experts(product.x, names, product.plan)
        elif names and self.dense:
            self.add(product.x, names)
        self._left -= {*names}
        if names and self.wanted and not self._left:
            raise _BlockOutput(product.x)
        return proceed(product)

    def add(self, x: torch.Tensor, names: Sequence[str]) -> None:
        """Add the inputs x[B, T, I] of products with the parameters `names`."""
        if self._mask is not None:
            full = bool(self._mask.all())
            rows = x.flatten(0, 1) if full else x[self._mask.to(x.device)]  # without padding
            self._add(rows, names, None)

    def _add_experts(self, rows: torch.Tensor, names: Sequence[str], plan: DispatchPlan) -> None:
        """Add rows[M, I], sorted by expert."""
        if self._mask is None or not self.experts:
            return
        tokens = plan.order // plan.shape[-1]  # of each row
        real = self._mask.to(rows.device).flatten()[tokens]
        ends = [0, *plan.ends.tolist()]
        same = self.every and all(name.endswith(FIRST) for name in names)  # one sum for all
        for expert in self.experts:
            if same and expert != self.experts.start:
                first = {name: self.sums.get((name, self.experts.start)) for name in names}
                self.sums |= {(name, expert): one for name, one in first.items() if one}
                continue
            part = slice(ends[expert], ends[expert + 1])
            self._add(rows[part][real[part]], names, expert)

    def _add(self, x: torch.Tensor, names: Sequence[str], expert: int | None) -> None:
        """Add the inputs x[tokens, I]."""
        if not len(x):
            return
        known = self.sums.get((names[0], expert))
        if known is None:
            known = _Sum(x, self.sizes)
            self.sums |= {(name, expert): known for name in names}
        known.add(x)

    def inputs(self, name: str, expert: int | None = None) -> int | None:
        """A number that parameters with the same inputs share; None for one that had none."""
        known = self.sums.get((name, expert))
        return None if known is None else id(known)

    def of(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        """H[I, I] of a parameter; None if it had no inputs."""
        known = self.sums.get((name, expert))
        if known is None:
            return None
        return (known.total.tril() + known.total.tril(-1).T) * (2 / known.tokens)

    def largest(self, name: str, expert: int | None = None) -> float:
        """max |x| of the inputs of a parameter; 0 if it had none."""
        known = self.sums.get((name, expert))
        return 0.0 if known is None else float(known.peaks.max())

    def peaks(self, name: str) -> np.ndarray:
        """max |x| of each column [I] of the inputs of a parameter that had some."""
        peaks: np.ndarray = self.sums[name, None].peaks.float().cpu().numpy()
        return peaks

    def means(self, name: str) -> np.ndarray:
        """The mean |x| of each column [I] of the inputs of a parameter that had some."""
        known = self.sums[name, None]
        assert known.sizes is not None
        means: np.ndarray = (known.sizes / known.tokens).float().cpu().numpy()
        return means

    def tokens(self, name: str, expert: int | None = None) -> int:
        """The number of inputs of a parameter."""
        known = self.sums.get((name, expert))
        return 0 if known is None else known.tokens


def send_all(ops: Ops, experts: range) -> None:
    """Make the operations send all tokens to each of these experts of a layer, and to no other.

    The outputs of the experts are zeros then: the pass is for the inputs of their products.
    """
    if not experts:
        return
    plain: Any = ops

    def to_all(y: torch.Tensor, chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, Any]:
        every = torch.arange(experts.start, experts.stop, device=y.device)
        return dispatch(y, every.expand(*chosen.shape[:2], len(experts)), count)

    def nothing(rows: torch.Tensor, plan: DispatchPlan, gates: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros(*plan.shape[:-1], rows.shape[-1])

    plain.dispatch, plain.combine = to_all, nothing


def add_inputs(
    spec: ModelSpec,
    params: Mapping[str, Any],
    index: int,
    states: torch.Tensor,
    batch: Batch,
    hessians: Hessians,
) -> None:
    """Add the inputs of a layer's matrices, or after the last layer those of the head, for the
    states [B, T, D] before it."""
    hessians.begin(batch.mask)
    ops = build_ops("torch", stage=CalibrationStage(index, states), record=hessians)
    if hessians.every:
        send_all(ops, hessians.experts)
    out = run_block(spec, params, ops, batch)
    if index == len(spec.layers) and hessians.wants(spec.head_name):
        hessians.add(out, [spec.head_name])


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
