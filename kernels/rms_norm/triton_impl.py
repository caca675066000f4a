"""RMSNorm as Triton kernels, the residual added on the way.

Forward: one program per row. Backward: a fixed number of programs walk the rows in turn and keep
their part of dw in registers; the parts are summed at the end without atomics, so the result does
not depend on the order in which programs run. Registered as operators of torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sabia.kernels.runtime.cache_folder import name_compilers_folders
from sabia.kernels.runtime.torch_support import Context
from sabia.kernels.runtime.tuned import tuned_blocks

name_compilers_folders()

Tensor = torch.Tensor
LARGEST = 65536  # columns: a row is held in registers


@triton.jit
def _forward_kernel(
    x, residual, weight, y, h, inverse, D, eps,
    ADD: tl.constexpr, PLUS_ONE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    value = tl.load(x + row * D + columns, mask=inside, other=0.0)
    if ADD:
        value += tl.load(residual + row * D + columns, mask=inside, other=0.0)
        tl.store(h + row * D + columns, value, mask=inside)
    wide = value.to(tl.float32)  # [WIDTH]: one row h, zeros beyond D
    # r = 1 / sqrt(mean(h^2) + eps), arXiv 1910.07467, equation 4
    r = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    tl.store(y + row * D + columns, (wide * r * factor).to(y.dtype.element_ty), mask=inside)
    tl.store(inverse + row, r)


@triton.jit
def _backward_kernel(
    grad, grad_h, h, weight, inverse, dx, shares, rows, D,
    ADD: tl.constexpr, PLUS_ONE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    share = tl.zeros([WIDTH], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * D + columns
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(inverse + row)
        unit = tl.load(h + at, mask=inside, other=0.0).to(tl.float32) * r  # u = h r
        share += g * unit  # this program's part of dw = sum of g u
        scaled = g * factor  # g W
        d = r * (scaled - unit * (tl.sum(scaled * unit, 0) / D))  # dh = r (g W - u mean(g W u))
        if ADD:
            d += tl.load(grad_h + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    tl.store(shares + tl.program_id(0).to(tl.int64) * D + columns, share, mask=inside)


def launch_options(x: Tensor, kernel: str) -> dict[str, int]:
    """Block size and compiler options of the kernel `forward` or `backward` for x[R, D]."""
    width = triton.next_power_of_2(x.shape[1])
    key = f"{width} {str(x.dtype).removeprefix('torch.')}"
    default = (min(16, max(1, width // 512)),)
    (warps,) = tuned_blocks(f"rms_norm.{kernel}", key, x, default)
    return {"WIDTH": width, "num_warps": warps}


def _programs(x: Tensor, rows: int) -> int:
    """Programs of the backward pass: four a multiprocessor."""
    if x.is_cuda:
        return min(rows, 4 * torch.cuda.get_device_properties(x.device).multi_processor_count)
    return min(rows, 2)


@torch.library.custom_op("sabia::rms_norm_forward", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x[R, D] → y[R, D], h[R, D] (empty without a residual), 1 / rms [R]."""
    y, inverse = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    h = x.new_empty(0) if residual is None else torch.empty_like(x)
    options = launch_options(x, "forward") | {"ADD": residual is not None, "PLUS_ONE": plus_one}
    if x.shape[0]:
        _forward_kernel[(x.shape[0],)](
            x, residual, weight, y, h, inverse, x.shape[1], eps, **options
        )
    return y, h, inverse


@_forward.register_fake
def _(x, weight, residual, eps, plus_one):
    h = x.new_empty(0) if residual is None else torch.empty_like(x)
    return torch.empty_like(x), h, x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("sabia::rms_norm_backward", mutates_args=())
def _backward(
    grad: Tensor, grad_h: Tensor | None, h: Tensor, weight: Tensor, inverse: Tensor, plus_one: bool
) -> tuple[Tensor, Tensor]:
    dx, programs = torch.empty_like(h), _programs(h, h.shape[0])
    shares = h.new_empty(programs, h.shape[1], dtype=torch.float32)
    options = launch_options(h, "backward") | {"ADD": grad_h is not None, "PLUS_ONE": plus_one}
    if programs:
        _backward_kernel[(programs,)](
            grad, grad_h, h, weight, inverse, dx, shares, *h.shape, **options
        )
    return dx, shares.sum(0).to(weight.dtype)


@_backward.register_fake
def _(grad, grad_h, h, weight, inverse, plus_one):
    return torch.empty_like(h), torch.empty_like(weight)


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, residual, _, ctx.plus_one = inputs
    ctx.added = residual is not None
    ctx.save_for_backward(output[1] if ctx.added else x, weight, output[2])


def _gradients(ctx: Context, grad: Tensor, grad_h: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    own = grad_h.contiguous() if ctx.added else None
    dx, dw = _backward(grad.contiguous(), own, *ctx.saved_tensors, ctx.plus_one)
    return dx, dw, dx if ctx.added else None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool) -> Any:
    """See sabia.kernels.rms_norm.interface.rms_norm; at most LARGEST columns."""
    if x.shape[-1] > LARGEST:
        raise ValueError(f"rms_norm: {x.shape[-1]} columns (at most {LARGEST} in Triton)")
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    other = None if residual is None else residual.to(x.dtype).reshape(rows.shape).contiguous()
    y, h, _ = _forward(rows, weight, other, eps, plus_one)
    return y.view(x.shape) if residual is None else (y.view(x.shape), h.view(x.shape))
