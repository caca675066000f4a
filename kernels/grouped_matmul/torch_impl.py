"""Grouped matrix products in torch: a loop over groups as the reference, and torch's own kernel."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sabia.kernels.runtime.dispatch import Choice, Option, choose, reference_option, triton_obstacle

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
    return choose("grouped_matmul", [library, own, reference_option()], implementation)


def _reference(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.tolist()
    rest = x.shape[0] - sum(sizes)
    parts = x.split([*sizes, rest])  # [counts[e], D] each, then the rest
    weight = weight.to(x.dtype)
    # [counts[e], F] each
    out = [part @ matrix.t() for part, matrix in zip(parts, weight, strict=False)]
    return torch.cat((*out, x.new_zeros(rest, weight.shape[1])))


def _library(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0).int()
    outside = torch.arange(x.shape[0], device=x.device)[:, None] >= ends[-1]  # [M, 1]
    # the kernel does not write these rows: keep them out of the gradient as well
    x = x.masked_fill(outside, 0)
    out = F.grouped_mm(x, weight.to(x.dtype).transpose(1, 2), offs=ends)  # [M, F]
    return out.masked_fill(outside, 0)


def _triton(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    from sabia.kernels.grouped_matmul.triton_impl import grouped_matmul

    return grouped_matmul(x, weight.to(x.dtype), counts)


IMPLEMENTATIONS = {"reference": _reference, "library": _library, "triton": _triton}
