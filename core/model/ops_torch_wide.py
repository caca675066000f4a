"""Products of narrow floats on processors that have no units for them: computed in fp32.

A CPU without AMX or AVX512-BF16 multiplies BF16 matrices several times slower than fp32 ones. A
product of two BF16 (or FP16) numbers is exact in fp32, where the units sum anyway, so widening the
inputs, multiplying in fp32 and rounding the result once is the same computation, at fp32's speed.
Only the narrow tensors are kept for the gradient.
"""

import platform
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
X86 = ("x86_64", "AMD64")


def _native(capabilities: dict[str, Any]) -> frozenset[torch.dtype]:
    """The narrow dtypes that a CPU of these capabilities multiplies itself."""
    units = {
        torch.bfloat16: ("avx512_bf16", "amx_bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16"),
    }
    return frozenset(k for k, names in units.items() if any(capabilities.get(n) for n in names))


def _widened_dtypes() -> frozenset[torch.dtype]:
    read = getattr(torch.cpu, "get_capabilities", None)
    if platform.machine() not in X86 or read is None:
        return frozenset()
    return frozenset((torch.bfloat16, torch.float16)) - _native(read())


WIDENED = _widened_dtypes()


def widened(x: Tensor) -> bool:
    """Whether products of x are better computed in fp32 on this machine."""
    return x.dtype in WIDENED and x.device.type == "cpu"


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, (wants_x, wants_weight, wants_bias) = grad.float(), ctx.needs_input_grad
        rows = wide.flatten(0, -2)
        dx = (wide @ weight.float()).to(x.dtype) if wants_x else None
        dw = (rows.t() @ x.float().flatten(0, -2)).to(weight.dtype) if wants_weight else None
        return dx, dw, rows.sum(0).to(x.dtype) if wants_bias else None


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x[..., in] · weight[out, in]ᵀ + bias, all of one narrow dtype."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _product(x, weight, bias)
    return _WideLinear.apply(x, weight, bias)
