"""RMSNorm in torch: the plain expression, one with a gradient by hand (loops over the rows of
large arrays, torch's operations in fp32), torch's fused kernel."""

from typing import Any

import torch
import torch.nn.functional as F

from sabia.kernels.row_functions.torch_arrays import rms_norm as row_norm
from sabia.kernels.row_functions.torch_arrays import serves
from sabia.kernels.runtime.dispatch import Choice, Option, choose, reference_option, triton_obstacle
from sabia.kernels.runtime.torch_support import Context

Tensor = torch.Tensor


def choose_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, implementation: str | None
) -> Choice:
    """See rms_norm.choose_rms_norm."""
    if implementation is None and residual is None and _by_hand(x):
        return _BY_HAND
    obstacle = None
    if residual is not None:
        obstacle = "torch.nn.functional.rms_norm adds no residual"
    elif weight.dtype != x.dtype:
        obstacle = f"torch.nn.functional.rms_norm: weight {weight.dtype}, x {x.dtype}"
    eager = x.is_cuda and not torch.compiler.is_compiling()
    library = Option("library", "torch's fused rms_norm", obstacle, automatic=eager)
    own = Option("triton", "addition and norm in one kernel", triton_obstacle(x), automatic=eager)
    plain = Option(_BY_HAND.implementation, _BY_HAND.reason, _eager_obstacle(x, residual))
    return choose("rms_norm", [library, own, plain, reference_option()], implementation)


_BY_HAND = Choice("eager", "gradient by hand, in fewer passes over memory")
_DTYPES = (torch.float32, torch.bfloat16)


def _by_hand(x: Tensor) -> bool:
    """Whether the choice is known without a look at the alternatives."""
    return x.device.type == "cpu" and x.dtype in _DTYPES and not torch.compiler.is_compiling()


def _eager_obstacle(x: Tensor, residual: Tensor | None) -> str | None:
    if torch.compiler.is_compiling():
        return "the compiler fuses the plain expression"
    if residual is not None or not (x.dtype == torch.float32 or _by_hand(x)):
        return "it takes float32, on a CPU bfloat16 too, without a residual"
    return None


def _reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool
) -> Any:
    h = x if residual is None else x + residual.to(x.dtype)
    wide, factor = h.float(), weight.float() + plus_one
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(x.dtype)
    return y if residual is None else (y, h)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    # 1 / sqrt(mean(x²) + eps), [..., 1]; mean(x²) = ‖x‖² / D
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    """y = x·r·w, r = 1/rms(x): dx = r·(g·w - x̂·mean(g·w·x̂)), dw = Σ g·x̂, with x̂ = x·r."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse  # x̂
        product = (grad * unit).flatten(0, -2)  # g·x̂, [rows, D]
        # mean over D of g·w·x̂
        mean = torch.mv(product, weight).div_(x.shape[-1]).view(inverse.shape)
        # dx = r (g·w - x̂·mean(g·w·x̂)); unit is overwritten
        dx = unit.mul_(mean).neg_().addcmul_(grad, weight).mul_(inverse)
        return dx, product.sum(0), None


def _eager(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool
) -> Tensor:
    factor = weight.float() + 1 if plus_one else weight.float()
    if serves(x, decodes=True):
        return row_norm(x, factor, eps)
    if x.dtype != torch.float32:
        return _reference(x, weight, eps, None, plus_one)
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, factor, eps)
    return (x * _inverse_rms(x, eps)).mul_(factor)


def _library(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool
) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight + 1 if plus_one else weight, eps)


def _triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool) -> Any:
    from sabia.kernels.rms_norm.triton_impl import rms_norm

    return rms_norm(x, weight, eps, residual, plus_one)


IMPLEMENTATIONS = {"reference": _reference, "eager": _eager, "library": _library, "triton": _triton}
