"""Grouped matrix products in torch: a loop over groups, and torch's own kernel.

The loop is `reference` in plain operations, and `eager` as one operation with its own gradient,
opaque to the compiler, which cannot trace sizes that depend on data.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from sabia.kernels.runtime.dispatch import Choice, Option, choose, reference_option, triton_obstacle
from sabia.kernels.runtime.torch_support import Context

Tensor = torch.Tensor
LEAST_CAPABILITY = (8, 0)


def library_obstacle(x: Tensor, widths: Sequence[int]) -> str | None:
    """Why `grouped_mm` cannot multiply x by matrices of these two sizes; None: it can."""
    if not hasattr(F, "grouped_mm"):
        return "torch.nn.functional.grouped_mm came with torch 2.10"
    if x.dtype != torch.bfloat16:
        return f"grouped_mm takes bfloat16, not {x.dtype}"
    if any(width % 8 for width in widths):
        return f"grouped_mm needs rows of 16 bytes: {tuple(widths)}"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < LEAST_CAPABILITY:
        return "grouped_mm needs compute capability 8.0"
    return None


def choose_grouped_matmul(x: Tensor, weight: Tensor, implementation: str | None) -> Choice:
    """See grouped_matmul.choose_grouped_matmul."""
    library = Option("library", "torch's grouped_mm", library_obstacle(x, weight.shape[1:]))
    reason = "a fused kernel for any shape"
    own = Option("triton", reason, triton_obstacle(x), automatic=x.is_cuda)
    loop = Option("eager", "a loop over the groups, without copies")
    return choose("grouped_matmul", [library, own, loop, reference_option()], implementation)


def _reference(x: Tensor, weight: Tensor, counts: Tensor, full: bool) -> Tensor:
    sizes = counts.tolist()
    rest = x.shape[0] - sum(sizes)
    parts = x.split([*sizes, rest])  # [counts[e], D] each, then the rest
    weight = weight.to(x.dtype)
    # [counts[e], F] each
    out = [part @ matrix.t() for part, matrix in zip(parts, weight, strict=False)]
    return torch.cat((*out, x.new_zeros(rest, weight.shape[1])))


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, slice of its rows)."""
    bounds = pairwise([0, *ends.tolist()])
    return ((expert, slice(*pair)) for expert, pair in enumerate(bounds))


@torch.library.custom_op("sabia::expert_products", mutates_args=())
def _loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows[M, in] of each expert e · weight[e, in, out]."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, group in _groups(ends):
        torch.mm(rows[group], weight[expert], out=out[group])
    out[int(ends[-1]) :].zero_()
    return out


@torch.library.custom_op("sabia::expert_gradients", mutates_args=())
def _loop_gradients(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """[E, in, out]: rows[M, in]ᵀ · grad[M, out] of each expert."""
    out = rows.new_empty(len(ends), rows.shape[1], grad.shape[1])
    for expert, group in _groups(ends):
        torch.mm(rows[group].t(), grad[group], out=out[expert])
    return out


@_loop.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@_loop_gradients.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def _save_for_backward(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    grad = grad.contiguous()
    d_rows = _loop(grad, weight.transpose(1, 2), ends) if needs_rows else None
    return d_rows, _loop_gradients(rows, grad, ends) if needs_weight else None, None


_loop.register_autograd(_backward, setup_context=_save_for_backward)


def _eager(x: Tensor, weight: Tensor, counts: Tensor, full: bool) -> Tensor:
    return _loop(x, weight.to(x.dtype).transpose(1, 2), counts.cumsum(0).int())


def _library(x: Tensor, weight: Tensor, counts: Tensor, full: bool) -> Tensor:
    ends = counts.cumsum(0).int()
    weight = weight.to(x.dtype).transpose(1, 2)  # [E, D, F]
    if full:
        return F.grouped_mm(x, weight, offs=ends)
    outside = torch.arange(x.shape[0], device=x.device)[:, None] >= ends[-1]  # [M, 1]
    # the kernel does not write these rows: keep them out of the gradient as well
    return F.grouped_mm(x.masked_fill(outside, 0), weight, offs=ends).masked_fill(outside, 0)


def _triton(x: Tensor, weight: Tensor, counts: Tensor, full: bool) -> Tensor:
    from sabia.kernels.grouped_matmul.triton_impl import grouped_matmul

    return grouped_matmul(x, weight.to(x.dtype), counts)


IMPLEMENTATIONS = {"reference": _reference, "eager": _eager, "library": _library, "triton": _triton}
