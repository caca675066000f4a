"""Tensors for sabia.kernels.row_functions: where these loops are the faster ones, and gradients."""

from typing import Any

import torch

from sabia.kernels.row_functions import interface
from sabia.kernels.row_products.torch_arrays import FEW_THREADS, numbers
from sabia.kernels.runtime.autograd_context import Context

Tensor = torch.Tensor
LEAST = 1 << 18  # numbers; with fewer a run would compile more than it computes
LEAST_DECODED = 1 << 8  # of a step of decoding, which many equal steps follow


def serves(x: Tensor, decodes: bool = False) -> bool:
    """Whether the functions of numbers like x are computed by these loops, in one thread; decodes:
    of x[B, 1, ...] in inference mode, fewer numbers are."""
    if torch.compiler.is_compiling():  # the mode cannot be traced
        return False
    decodes = decodes and x.ndim > 2 and x.shape[1] == 1 and torch.is_inference_mode_enabled()
    least = LEAST_DECODED if decodes else LEAST
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.numel() >= least
        and torch.get_num_threads() <= FEW_THREADS
    )


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of contiguous x[..., D], and the inverse of each row."""
    y, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    rows, made = (numbers(part.view(-1, x.shape[-1])) for part in (x, y))
    interface.rms_norm(rows, numbers(weight), eps, made, numbers(inverse.view(-1)))
    return y, inverse


class _RowNorm(torch.autograd.Function):
    """rms_norm of x[..., D] and weight[D], fp32."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y, inverse = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        grad, dx, dw = grad.contiguous(), torch.empty_like(x), torch.zeros_like(weight)
        g, rows, out = (numbers(part.flatten(0, -2)) for part in (grad, x, dx))
        given = g, rows, numbers(weight), numbers(inverse.flatten())
        interface.rms_norm_gradient(*given, out, numbers(dw))
        return dx, dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm of x[..., D] and fp32 weight[D]."""
    if torch.is_grad_enabled():
        return _RowNorm.apply(x, weight, eps)
    return _normed(x.contiguous(), weight, eps)[0]


def _flat(*tensors: Tensor) -> Any:
    return [numbers(x.view(-1)) for x in tensors]


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    interface.silu_product(*_flat(gate, up, out))
    return out


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        made = torch.empty_like(gate), torch.empty_like(up)
        interface.silu_product_gradient(*_flat(grad.contiguous(), gate, up, *made))
        return made


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of one shape and dtype."""
    if torch.is_grad_enabled():
        return _SiluProduct.apply(gate, up)
    return _gated(gate.contiguous(), up.contiguous())


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    interface.rotate(numbers(x), numbers(cos), numbers(sin), sign, numbers(y))
    return y


class _Rotation(torch.autograd.Function):
    """Its gradient is the inverse rotation, so x need not be saved."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[B, T, H, N] rotated by the angles of fp32 cos and sin[B or 1, T, 1, N]."""
    if torch.is_grad_enabled():
        return _Rotation.apply(x, cos, sin)
    return _rotated(x, cos, sin, 1.0)
