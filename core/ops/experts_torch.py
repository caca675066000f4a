"""Dispatch, grouped products and combination of experts in torch.

Token–expert assignments are sorted by expert, so that each expert's rows are contiguous. Gradients
of both permutations are permutations too (gathers, no scattered sums). The products are those of
sabia.kernels.grouped_matmul.
"""

from dataclasses import dataclass
from typing import Any

import torch

from sabia.core.ops.kernel_choice import raises_missing_backend, requested_kernels
from sabia.kernels.runtime.torch_support import Context

Tensor = torch.Tensor
REQUESTED = requested_kernels("torch")


@dataclass(frozen=True)
class DispatchPlan:
    """The order of rows. Assignment token·k + i is that of a token to its i-th expert.

    order[M]: the assignment of each row, and its inverse[M]; experts[M]: the expert of each row;
    ends[E]: the end of each expert's rows (int32); shape: (B, T, k).
    """

    shape: tuple[int, ...]
    order: Tensor
    inverse: Tensor
    experts: Tensor
    ends: Tensor


class _CopyToRows(torch.autograd.Function):
    """rows = tokens[order // k]; a token's gradient is the sum over its k rows."""

    @staticmethod
    def forward(
        ctx: Context, tokens: Tensor, order: Tensor, inverse: Tensor, per_token: int
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.per_token = per_token
        return tokens.index_select(0, order // per_token)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        # [tokens, k, D]
        grads = grad.index_select(0, inverse).view(-1, ctx.per_token, grad.shape[-1])
        return grads.sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """x[forth]; `back` is the inverse permutation."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, forth)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def dispatch(y: Tensor, experts_of_tokens: Tensor, experts: int) -> tuple[Tensor, DispatchPlan]:
    """See Ops.dispatch."""
    flat = experts_of_tokens.reshape(-1)  # [M], M = B·T·k
    # stable: the rows of an expert keep the order of the tokens
    sorted_experts, order = torch.sort(flat, stable=True)
    inverse = torch.empty_like(order)
    # the inverse permutation
    inverse[order] = torch.arange(len(order), device=order.device)
    expert_indices = torch.arange(experts, device=flat.device)
    ends = torch.searchsorted(sorted_experts, expert_indices, right=True, out_int32=True)  # [E]
    shape = tuple(experts_of_tokens.shape)
    rows = _CopyToRows.apply(y.reshape(-1, y.shape[-1]), order, inverse, shape[-1])
    return rows, DispatchPlan(shape, order, inverse, sorted_experts, ends)


@raises_missing_backend
def _kernel(*arrays: Tensor, **options: Any) -> Tensor:
    from sabia.kernels.grouped_matmul.interface import grouped_matmul

    return grouped_matmul(*arrays, **options)


def grouped(rows: Tensor, weight: Tensor, plan: DispatchPlan) -> Tensor:
    """rows[M, in] of each expert times weight[E, out, in]ᵀ, in rows' dtype."""
    counts = plan.ends.diff(prepend=plan.ends.new_zeros(1))  # [E]
    implementation = REQUESTED["grouped_matmul"]
    return _kernel(rows, weight, counts, full=True, implementation=implementation)


def of_experts(rows: Tensor, weight: Tensor, bias: Tensor | None, plan: DispatchPlan) -> Tensor:
    """rows[M, in] of each expert times weight[E, out, in]ᵀ, plus bias[E, out]."""
    return biased(grouped(rows, weight, plan), bias, plan)


def biased(rows: Tensor, bias: Tensor | None, plan: DispatchPlan | None) -> Tensor:
    """rows + bias[out] or, with a plan, rows[M, out] + bias[e, out] of each row's expert."""
    if bias is None:
        return rows
    bias = bias.to(rows.dtype)
    return rows + (bias if plan is None else bias.index_select(0, plan.experts))


def per_token(rows: Tensor, plan: DispatchPlan) -> Tensor:
    """The k rows of each token, [B·T, k, D]."""
    back: Tensor = _Permute.apply(rows, plan.inverse, plan.order)
    return back.view(-1, plan.shape[-1], rows.shape[-1])


def combine(rows: Tensor, plan: DispatchPlan, gates: Tensor) -> Tensor:
    """See Ops.combine."""
    gates = gates.reshape(-1, 1, plan.shape[-1]).to(rows.dtype)  # [B·T, 1, k]
    return torch.bmm(gates, per_token(rows, plan)).view(*plan.shape[:-1], rows.shape[-1])
