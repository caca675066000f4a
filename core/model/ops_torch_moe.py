"""Dispatch, grouped products and combination of experts in torch.

Copies of tokens are sorted by expert, so each expert's rows are contiguous. Gradients of both
permutations are permutations too (gathers, no scattered sums). The product of all groups is one
`grouped_mm` in bfloat16 where its layout rule holds (rows of 16-byte multiples, both ways),
otherwise one product per expert, opaque to the compiler, which cannot follow sizes that depend on
data: each row is multiplied once either way. On CUDA the kernels of sabia.kernels take the place of
the latter, and of all of it where SABIA_KERNELS names one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from sabia.core.model.kernel_choice import kernels_of, obeyed
from sabia.kernels.grouped_matmul.interface import grouped_matmul as grouped_matmul_kernel

Tensor = torch.Tensor
ALIGNMENT_BYTES = 16
KERNELS = kernels_of("torch")
_kernel = obeyed(grouped_matmul_kernel)


@dataclass(frozen=True)
class Plan:
    """Where copies went. A copy is numbered token·k + place of its expert in the token's choice.

    order[M]: the copy in each row; places[M]: the row of each copy; experts[M]: the expert of
    each row; ends[E]: the row behind each expert's last (int32).
    """

    shape: tuple[int, ...]
    order: Tensor
    places: Tensor
    experts: Tensor
    ends: Tensor


class _Send(torch.autograd.Function):
    """rows = tokens[order // k]; the gradient of a token is the sum of its copies'."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return tokens.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        grads = grad.index_select(0, places).view(-1, ctx.copies, grad.shape[-1])
        return grads.sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """x[forth]; back is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, forth)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def dispatch(y: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Plan]:
    """See Ops.dispatch."""
    flat = chosen.reshape(-1)
    sorted_experts, order = torch.sort(flat, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(experts, device=flat.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    rows = _Send.apply(y.reshape(-1, y.shape[-1]), order, places, chosen.shape[-1])
    return rows, Plan(tuple(chosen.shape), order, places, sorted_experts, ends)


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows)."""
    bounds = pairwise([0, *ends.tolist()])
    return ((expert, slice(*pair)) for expert, pair in enumerate(bounds))


@torch.library.custom_op("sabia::expert_products", mutates_args=())
def _expert_products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows[M, in] of each expert e · weight[e, in, out]."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, part in _groups(ends):
        torch.mm(rows[part], weight[expert], out=out[part])
    return out


@torch.library.custom_op("sabia::expert_gradients", mutates_args=())
def _expert_gradients(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """[E, in, out]: rows[M, in]ᵀ · grad[M, out] of each expert."""
    out = rows.new_empty(len(ends), rows.shape[1], grad.shape[1])
    for expert, part in _groups(ends):
        torch.mm(rows[part].t(), grad[part], out=out[expert])
    return out


@_expert_products.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@_expert_gradients.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    grad = grad.contiguous()
    d_rows = _expert_products(grad, weight.transpose(1, 2), ends) if needs_rows else None
    return d_rows, _expert_gradients(rows, grad, ends) if needs_weight else None, None


_expert_products.register_autograd(_backward, setup_context=_keep)


def _takes_grouped(rows: Tensor, weight: Tensor) -> bool:
    aligned = all(size * rows.element_size() % ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    return rows.dtype == torch.bfloat16 and aligned


def grouped_matmul(
    rows: Tensor, weight: Tensor, plan: Plan, bias: Tensor | None = None, *, name: str = ""
) -> Tensor:
    """See Ops.grouped_matmul."""
    weight = weight if weight.dtype == rows.dtype else weight.to(rows.dtype)
    named = KERNELS.asked["grouped_matmul"]
    if named is None and _takes_grouped(rows, weight):
        out = F.grouped_mm(rows, weight.transpose(1, 2), offs=plan.ends)
    elif KERNELS.serve("grouped_matmul", rows.device.type):
        counts = plan.ends.diff(prepend=plan.ends.new_zeros(1))
        out = _kernel(rows, weight, counts, implementation=named)
    else:
        out = _expert_products(rows, weight.transpose(1, 2), plan.ends)
    return biased(out, plan, bias)


def biased(rows: Tensor, plan: Any, bias: Tensor | None) -> Tensor:
    """See Ops.biased."""
    return rows if bias is None else rows + bias.to(rows.dtype).index_select(0, plan.experts)


def combine(rows: Tensor, plan: Plan, shares: Tensor) -> Tensor:
    """See Ops.combine."""
    copies = _Permute.apply(rows, plan.places, plan.order).view(-1, plan.shape[-1], rows.shape[-1])
    shares = shares.reshape(-1, 1, plan.shape[-1]).to(rows.dtype)
    return torch.bmm(shares, copies).view(*plan.shape[:-1], rows.shape[-1])


def tally(indices: Tensor, weights: Tensor, count: int) -> Tensor:
    """See Ops.tally."""
    found = weights.new_zeros((len(indices), count), dtype=torch.float32)
    return found.scatter_add_(1, indices, weights.detach().float())
