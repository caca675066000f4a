"""Attention on a CPU, each query by itself: its bits do not depend on the other queries and rows.

Prefill, decoding and training give a query the same result then, to the last bit (kernels.
row_products); the gradient is that of torch_cpu.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sabia.kernels.attention import torch_cpu, torch_impl
from sabia.kernels.attention.torch_cached import whole_rows
from sabia.kernels.row_products import interface
from sabia.kernels.row_products.torch_arrays import numbers

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowMask:
    """first[B or 1, T], last[B or 1, T]: the keys of each query; none where first > last."""

    first: Tensor
    last: Tensor
    keys: int

    @property
    def queries(self) -> int:
        """T."""
        return self.first.shape[-1]

    def whole(self, batch: int) -> tuple[Tensor, Tensor]:
        """first[B, T] and last[B, T], int64."""
        shape = batch, self.queries
        first, last = self.first.expand(shape).long(), self.last.expand(shape).long()
        return first.contiguous(), last.contiguous()

    @cached_property
    def groups(self) -> dict[int, list[torch_cpu.Group]]:
        """The pieces of a gradient, by batch."""
        return {}

    def pieces(self, batch: int) -> list[torch_cpu.Group]:
        """Those of a batch, computed once."""
        if batch not in self.groups:
            first, last = self.whole(batch)
            self.groups[batch] = torch_cpu.groups(first, last, self.keys, causal=False)
        return self.groups[batch]


def row_mask(
    like: Tensor, queries: int, keys: int, segments: Tensor | None, slots: Tensor | None,
    window: int | None,
) -> RowMask:  # fmt: skip
    """See attention.attention_mask; causal."""
    if slots is not None:
        first = slots * 0 if window is None else (slots - (window - 1)).clamp_min(0)
        return RowMask(first, slots, keys)
    mask = torch_impl.attention_mask(like, queries, keys, segments, 0, window, True)
    return RowMask(mask.first, mask.last_keys, keys)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float) -> Tensor:
        out, lse = _forward(q, k, v, mask, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts = ctx.mask.pieces(len(q))
        k, v = k.contiguous(), v.contiguous()
        given = grad.contiguous(), q.contiguous(), k, v, out, lse
        return *torch_cpu.backward_of(*given, parts, ctx.scale, None), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:3], v.shape[3])
    out, lse = torch.empty(shape), torch.empty(shape[:3])
    queries = (q.detach().float() * scale).contiguous()
    keys, values = (_in_order(x.detach()) for x in (k, v))
    first, last = (x.numpy() for x in mask.whole(len(q)))
    interface.attention(
        numbers(queries), numbers(keys), numbers(values), first, last, numbers(out), numbers(lse)
    )
    return out.to(q.dtype), lse


def _in_order(x: Tensor) -> Tensor:
    """x[B, S, K, N], with later slots where it is the first ones of contiguous rows."""
    if x.is_contiguous():
        return x
    whole = whole_rows(x)
    return x.contiguous() if whole is None else whole


def attention(q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float) -> Tensor:
    """q[B, T, H, N], k[B, S, K, N], v[B, S, K, M] → [B, T, H, M] in q's dtype."""
    if torch.is_grad_enabled():
        return _Attention.apply(q, k, v, mask, scale)
    return _forward(q, k, v, mask, scale)[0]
