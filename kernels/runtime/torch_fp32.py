"""Matrix products of a training step on CPUs: in fp32, and in BF16 for AMX.

Large fp32 products are oneDNN's: beside those of MKL, which torch uses, they take 0.4 to 0.95 of
the time on processors of AMD, but 1.05 to 1.1 on one of Intel, which keeps MKL's
(tests/bench/RESULTS.md); small ones are slower to start.

A CPU without AMX or AVX512-BF16 multiplies BF16 matrices several times slower than fp32 ones. A
product of two BF16 (or FP16) numbers is exact in fp32, which is also the dtype of the sum, so
converting the inputs to fp32, multiplying and rounding the result once is the same computation at
the speed of fp32. Only the 16-bit tensors are saved for the backward pass.

AMX needs the rows of its left operand one after the other, and the left operand of a weight's
gradient is transposed: oneDNN's copy takes as long as the product. torch.compile writes it
transposed at once, in the same loop as the gradient itself, or copies it faster.
"""

import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sabia.kernels.runtime.autograd_context import Context

Tensor = torch.Tensor
X86_64 = platform.machine() in ("x86_64", "AMD64")
LARGE = 1 << 26  # multiplications of a product from which oneDNN is faster


def _native_dtypes(capabilities: dict[str, Any]) -> frozenset[torch.dtype]:
    """The 16-bit dtypes that a CPU with these capabilities has instructions for."""
    units = {
        torch.bfloat16: ("avx512_bf16", "amx_bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16"),
    }
    return frozenset(k for k, names in units.items() if any(capabilities.get(n) for n in names))


_CAPABILITIES: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict[str, Any])()
_NARROW = frozenset((torch.bfloat16, torch.float16) if X86_64 and _CAPABILITIES else ())
FP32_COMPUTED = _NARROW - _native_dtypes(_CAPABILITIES)
HAS_BF16_UNITS = X86_64 and torch.bfloat16 in _native_dtypes(_CAPABILITIES)
HAS_AMX = X86_64 and bool(_CAPABILITIES.get("amx_bf16"))
HAS_AVX512 = X86_64 and bool(_CAPABILITIES.get("avx512_f"))
HAS_ONEDNN = X86_64 and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_CPU = Path("/proc/cpuinfo")  # of Linux
_IS_INTEL = _CPU.exists() and "GenuineIntel" in _CPU.read_text()
MKL_IS_FASTER = _IS_INTEL and torch.backends.mkl.is_available()


def computed_in_fp32(x: Tensor) -> bool:
    """Whether products of x are computed in fp32 on this machine."""
    return x.dtype in FP32_COMPUTED and x.device.type == "cpu"


def is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether x[..., in] · weight[out, in]ᵀ, both in fp32, is a product for oneDNN."""
    return (
        HAS_ONEDNN
        and not MKL_IS_FASTER
        and x.numel() * weight.shape[0] >= LARGE
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x[..., in] · weight[out, in]ᵀ + bias by oneDNN, without a gradient; the weight may be packed
    for it. Only with HAS_ONEDNN."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x[..., in] · weight[out, in]ᵀ, without a gradient."""
    return onednn_linear(x, weight) if is_large(x, weight) else F.linear(x, weight)


def over_rows(left: Tensor, right: Tensor) -> Tensor:
    """left[M, A]ᵀ · right[M, B], such as the gradient of a weight, without a gradient."""
    return times(left.t(), right.t())


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None or torch.compiler.is_compiling():
        bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), bias).to(x.dtype)
    return times(x.float(), weight.float()).to(x.dtype)


class _Fp32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad32, (needs_x, needs_weight, needs_bias) = grad.float(), ctx.needs_input_grad
        rows = grad32.flatten(0, -2)  # [M, out]
        dx = times(grad32, weight.float().t()).to(x.dtype) if needs_x else None
        dw = over_rows(rows, x.float().flatten(0, -2)).to(weight.dtype) if needs_weight else None
        return dx, dw, rows.sum(0).to(x.dtype) if needs_bias else None


@torch.library.custom_op("sabia::cpu_rows_product", mutates_args=())
def _rows_product(left: Tensor, right: Tensor) -> Tensor:
    """left · right; torch's compiler chooses the strides of its own products, not of this one."""
    return left @ right


@_rows_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


class _AmxLinear(torch.autograd.Function):
    """For torch.compile, in BF16."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, dw = grad.flatten(0, -2), None  # [M, out]
        if ctx.needs_input_grad[1]:
            dw = _rows_product(rows.t().contiguous(), x.flatten(0, -2))
        return grad @ weight, dw, rows.sum(0) if ctx.needs_input_grad[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x[..., in] · weight[out, in]ᵀ + bias, all of one dtype."""
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled()
    if HAS_AMX and compiled and x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return _AmxLinear.apply(x, weight, bias)
    if computed_in_fp32(x) or is_large(x, weight):
        return fp32_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def fp32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x[..., in] · weight[out, in]ᵀ + bias, all of one dtype, fp32 or 16 bits."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _product(x, weight, bias)
    return _Fp32Linear.apply(x, weight, bias)
