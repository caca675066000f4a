"""Dispatch, grouped products and combination of experts in torch.

Token–expert assignments are sorted by expert, so that each expert's rows are contiguous. Gradients
of both permutations are permutations too (gathers, no scattered sums). The product of all groups is
one `grouped_mm` in bfloat16 if its alignment rule holds (both dimensions of a matrix are multiples
of 16 bytes), otherwise one product per expert, opaque to the compiler, which cannot trace sizes
that depend on data. On CUDA a kernel of sabia.kernels replaces the latter; it replaces both if
SABIA_KERNELS names one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from sabia.core.model.kernel_choice import kernels_of, raises_missing_backend
from sabia.kernels.grouped_matmul.interface import grouped_matmul as grouped_matmul_kernel
from sabia.kernels.grouped_matmul.torch_impl import library_obstacle

Tensor = torch.Tensor
KERNELS = kernels_of("torch")
_kernel = raises_missing_backend(grouped_matmul_kernel)


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
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.per_token = per_token
        return tokens.index_select(0, order // per_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        # [tokens, k, D]
        grads = grad.index_select(0, inverse).view(-1, ctx.per_token, grad.shape[-1])
        return grads.sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """x[forth]; `back` is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, forth)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
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


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, slice of its rows)."""
    bounds = pairwise([0, *ends.tolist()])
    return ((expert, slice(*pair)) for expert, pair in enumerate(bounds))


@torch.library.custom_op("sabia::expert_products", mutates_args=())
def _expert_products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows[M, in] of each expert e · weight[e, in, out]."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, group in _groups(ends):
        torch.mm(rows[group], weight[expert], out=out[group])
    return out


@torch.library.custom_op("sabia::expert_gradients", mutates_args=())
def _expert_gradients(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """[E, in, out]: rows[M, in]ᵀ · grad[M, out] of each expert."""
    out = rows.new_empty(len(ends), rows.shape[1], grad.shape[1])
    for expert, group in _groups(ends):
        torch.mm(rows[group].t(), grad[group], out=out[expert])
    return out


@_expert_products.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@_expert_gradients.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    grad = grad.contiguous()
    d_rows = _expert_products(grad, weight.transpose(1, 2), ends) if needs_rows else None
    return d_rows, _expert_gradients(rows, grad, ends) if needs_weight else None, None


_expert_products.register_autograd(_backward, setup_context=_save_for_backward)


def grouped_matmul(
    rows: Tensor, weight: Tensor, plan: DispatchPlan, bias: Tensor | None = None, *, name: str = ""
) -> Tensor:
    """See Ops.grouped_matmul."""
    weight = weight if weight.dtype == rows.dtype else weight.to(rows.dtype)
    implementation = KERNELS.requested["grouped_matmul"]
    if implementation is None and library_obstacle(rows, weight.shape[1:]) is None:
        out = F.grouped_mm(rows, weight.transpose(1, 2), offs=plan.ends)
    elif KERNELS.use("grouped_matmul", rows.device.type):
        counts = plan.ends.diff(prepend=plan.ends.new_zeros(1))  # [E]
        out = _kernel(rows, weight, counts, implementation=implementation)
    else:
        out = _expert_products(rows, weight.transpose(1, 2), plan.ends)
    return biased(out, plan, bias)


def biased(rows: Tensor, plan: Any, bias: Tensor | None) -> Tensor:
    """See Ops.biased."""
    return rows if bias is None else rows + bias.to(rows.dtype).index_select(0, plan.experts)


def combine(rows: Tensor, plan: DispatchPlan, gates: Tensor) -> Tensor:
    """See Ops.combine."""
    per_token = _Permute.apply(rows, plan.inverse, plan.order)
    per_token = per_token.view(-1, plan.shape[-1], rows.shape[-1])
    gates = gates.reshape(-1, 1, plan.shape[-1]).to(rows.dtype)  # [B·T, 1, k]
    return torch.bmm(gates, per_token).view(*plan.shape[:-1], rows.shape[-1])


def weighted_bincount(indices: Tensor, weights: Tensor, count: int) -> Tensor:
    """See Ops.tally."""
    sums = weights.new_zeros((len(indices), count), dtype=torch.float32)
    return sums.scatter_add_(1, indices, weights.detach().float())
