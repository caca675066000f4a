"""Grouped matrix products as Triton kernels: rows by matrices, and the matrices' gradients.

A table maps tile t to the group it belongs to and its first row; it is made on the device from the
counts (at most M / BLOCK_M + E tiles, empty groups have none), so the host does not wait for them.
dx is the same kernel with transposed matrices; dw has a program for each tile of each matrix that
walks the group's rows (an empty group gets zeros). Sums in fp32. `kernels.runtime.tuned` has block
sizes measured on a device, by dtype.
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
INTERPRETED_BLOCK = 16


@triton.jit
def _rows_kernel(
    x, weight, out, groups, starts, ends, F, D,
    x_row: tl.int64, E, ACROSS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    group = tl.load(groups + tile)
    if group < E:
        rows = tl.load(starts + tile) + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        inside = rows < tl.load(ends + tile)
        f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
        acc = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
        base = weight + group.to(tl.int64) * F * D
        for at in range(0, D, BLOCK_D):
            d = at + tl.arange(0, BLOCK_D)
            a = tl.load(x + rows[:, None] * x_row + d[None, :],  # [BLOCK_M, BLOCK_D]
                        mask=inside[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
            if ACROSS:
                offsets = d[:, None] * F + f[None, :]
            else:
                offsets = f[None, :] * D + d[:, None]
            b = tl.load(base + offsets,  # [BLOCK_D, BLOCK_F]
                        mask=(d < D)[:, None] & (f < F)[None, :], other=0.0)  # fmt: skip
            acc += tl.dot(a, b, input_precision=PRECISION)  # [BLOCK_M, BLOCK_F]
        tl.store(out + rows[:, None].to(tl.int64) * F + f[None, :],
                 acc.to(out.dtype.element_ty), mask=inside[:, None] & (f < F)[None, :])  # fmt: skip


@triton.jit
def _matrices_kernel(
    grad, x, dw, bounds, F, D, grad_row: tl.int64, x_row: tl.int64, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.load(bounds + group + 1)
    acc = tl.zeros([BLOCK_F, BLOCK_D], tl.float32)
    for at in range(tl.load(bounds + group), end, BLOCK_M):
        rows = at + tl.arange(0, BLOCK_M)
        a = tl.load(grad + rows[:, None] * grad_row + f[None, :],  # [BLOCK_M, BLOCK_F]
                    mask=(rows < end)[:, None] & (f < F)[None, :], other=0.0)  # fmt: skip
        b = tl.load(x + rows[:, None] * x_row + d[None, :],  # [BLOCK_M, BLOCK_D]
                    mask=(rows < end)[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
        # dW += grad^T x: [BLOCK_F, BLOCK_D]
        acc += tl.dot(tl.trans(a), b, input_precision=PRECISION)
    tl.store(dw + (group * F + f[:, None]) * D + d[None, :],
             acc.to(dw.dtype.element_ty), mask=(f < F)[:, None] & (d < D)[None, :])  # fmt: skip


def launch_options(x: Tensor, kernel: str) -> dict[str, int | str]:
    """Block sizes, compiler options, and the precision of fp32 products of the kernel `rows` or
    `matrices`."""
    default = (*((128, 128, 64) if x.element_size() == 2 else (64, 64, 32)), 8, 3)
    key = str(x.dtype).removeprefix("torch.")
    blocks = tuned_blocks(f"grouped_matmul.{kernel}", key, x, default)
    if x.device.type == "cpu":
        blocks = (*(INTERPRETED_BLOCK,) * 3, *blocks[3:])
    names = "BLOCK_M", "BLOCK_F", "BLOCK_D", "num_warps", "num_stages"
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    return {**dict(zip(names, blocks, strict=True)), "PRECISION": precision}


def _bounds(counts: Tensor) -> Tensor:
    """int32[E + 1]: where each group begins, and the end of the last."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def _tiles(counts: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(group, first row, end of the group) of each tile: int32[tiles]; group E: no tile."""
    groups = counts.shape[0]
    ends = ((counts + block - 1) // block).cumsum(0)  # [E]: number of tiles up to each group
    # [tiles]: a bound that needs no counts on the host
    tile = torch.arange(triton.cdiv(rows, block) + groups, device=counts.device)
    group = torch.searchsorted(ends, tile, right=True)  # [tiles]
    known = group.clamp_max(groups - 1)
    bounds = _bounds(counts)
    before = torch.where(known > 0, ends[(known - 1).clamp_min(0)], 0)
    starts = bounds[known] + (tile - before) * block  # [tiles]: first row
    return group.int(), starts.int(), bounds[known + 1]


@torch.library.custom_op("sabia::grouped_rows", mutates_args=())
def _rows(x: Tensor, weight: Tensor, counts: Tensor, across: bool) -> Tensor:
    """x[M, D] by weight[E, F, D] to [M, F]; `across`: x[M, F] by the same, to [M, D]."""
    width = weight.shape[2 if across else 1]
    out = x.new_zeros(x.shape[0], width)  # rows beyond the counts stay 0
    options = launch_options(x, "rows")
    groups, starts, ends = _tiles(counts, x.shape[0], int(options["BLOCK_M"]))
    grid = (groups.shape[0], triton.cdiv(width, options["BLOCK_F"]))
    _rows_kernel[grid](
        x, weight, out, groups, starts, ends, width, x.shape[1],
        x.stride(0), weight.shape[0], ACROSS=across, **options,
    )  # fmt: skip
    return out


@_rows.register_fake
def _(x, weight, counts, across):
    return x.new_empty(x.shape[0], weight.shape[2 if across else 1])


@torch.library.custom_op("sabia::grouped_matrices", mutates_args=())
def _matrices(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Σ over a group's rows of grad[M, F]ᵀ x[M, D]: [E, F, D]."""
    dw = x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])
    options = launch_options(x, "matrices")
    grid = (
        counts.shape[0],
        triton.cdiv(grad.shape[1], options["BLOCK_F"]),
        triton.cdiv(x.shape[1], options["BLOCK_D"]),
    )
    sizes = (grad.shape[1], x.shape[1], grad.stride(0), x.stride(0))
    _matrices_kernel[grid](grad, x, dw, _bounds(counts), *sizes, **options)
    return dw


@_matrices.register_fake
def _(grad, x, counts):
    return x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])


def _gradients(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, counts = ctx.saved_tensors
    grad = grad.contiguous()
    # [M, D]: dx = grad W
    dx = _rows(grad, weight, counts, True) if ctx.needs_input_grad[0] else None
    dw = _matrices(grad, x, counts) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None


def _keep(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


_rows.register_autograd(_gradients, setup_context=_keep)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """See sabia.kernels.grouped_matmul.interface.grouped_matmul."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _rows(x, weight.contiguous(), counts, False)
