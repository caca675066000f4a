"""RMSNorm in torch: the plain expression, and torch's own fused kernel."""

from typing import Any

import torch
import torch.nn.functional as F

from sabia.kernels.runtime.dispatch import Choice, Option, choose, reference_option, triton_obstacle

Tensor = torch.Tensor


def choose_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, implementation: str | None
) -> Choice:
    """See rms_norm.choose_rms_norm."""
    obstacle = None
    if residual is not None:
        obstacle = "torch.nn.functional.rms_norm adds no residual"
    elif weight.dtype != x.dtype:
        obstacle = f"torch.nn.functional.rms_norm: weight {weight.dtype}, x {x.dtype}"
    eager = x.is_cuda and not torch.compiler.is_compiling()
    library = Option("library", "torch's fused rms_norm", obstacle, automatic=eager)
    own = Option("triton", "addition and norm in one kernel", triton_obstacle(x), automatic=eager)
    return choose("rms_norm", [library, own, reference_option()], implementation)


def _reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool
) -> Any:
    h = x if residual is None else x + residual.to(x.dtype)
    wide, factor = h.float(), weight.float() + plus_one
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(x.dtype)
    return y if residual is None else (y, h)


def _library(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool
) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight + 1 if plus_one else weight, eps)


def _triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool) -> Any:
    from sabia.kernels.rms_norm.triton_impl import rms_norm

    return rms_norm(x, weight, eps, residual, plus_one)


IMPLEMENTATIONS = {"reference": _reference, "library": _library, "triton": _triton}
