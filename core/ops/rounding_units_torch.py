"""Products a · bᵀ of rounded matrices in torch: by the chip's own units, or emulated.

`product` takes float matrices a[M, K] and b[N, K], with tiles along K, and returns [M, N].
Chips that have units for it (`torch.nn.functional.scaled_mm`):
  fp8        CUDA capability ≥ 8.9
  fp8-block  capability 9.0 with CUDA ≥ 12.9 (cuBLASLt has the 1×128 and 128×128 scales there only)
  nvfp4      capability ≥ 10.0
Matrices are zero-padded to the sizes that the units need. Elsewhere the same values are multiplied
in the compute dtype: BF16 holds each of them exactly, and the scales of the tensors are applied to
the product in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F

from sabia.core.ops.precision import MatmulRecipe
from sabia.kernels.quantize.definitions import Layout
from sabia.kernels.quantize.interface import quantize
from sabia.kernels.quantize.torch_arithmetic import pack_fp4, rounded

Tensor = torch.Tensor
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def has_units(layout: Layout, device: torch.device) -> bool:
    """Whether the device multiplies matrices of this layout itself."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(device)
    if layout.scale == "tensor":
        return capability >= (8, 9)
    if layout.scale == "power2":
        cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
        return capability == (9, 0) and cuda >= (12, 9)
    return capability >= (10, 0)


def describe_units(recipe: MatmulRecipe, device: torch.device) -> str:
    """What computes the products on the device."""
    device = torch.device(device)
    if not has_units(recipe.activation, device):
        reason = "" if device.type == "cpu" else ", which has no units for it"
        return f"emulated on {device.type}{reason}"
    name = torch.cuda.get_device_name(device)
    return f"torch scaled_mm on {name} (products of experts emulated)"


def product(
    a: Tensor,
    a_layout: Layout,
    b: Tensor,
    b_layout: Layout,
    dtype: torch.dtype,
    key: Tensor | None = None,
    units: bool | None = None,
) -> Tensor:
    """a[M, K] · b[N, K]ᵀ in `dtype`, each rounded to its layout; with a key, a stochastically.

    units: whether the chip multiplies the codes itself (None: where the device can).
    """
    if has_units(a_layout, a.device) if units is None else units:
        return product_by_units(a, a_layout, b, b_layout, dtype, key)
    values_a, scale_a = rounded(a, a_layout, key)
    values_b, scale_b = rounded(b, b_layout)
    out = torch.mm(values_a.to(dtype), values_b.to(dtype).t())
    return (out.float() * (scale_a * scale_b)).to(dtype)


def product_by_units(
    a: Tensor,
    a_layout: Layout,
    b: Tensor,
    b_layout: Layout,
    dtype: torch.dtype,
    key: Tensor | None = None,
) -> Tensor:
    """`product` through scaled_mm."""
    rows, columns = len(a), len(b)
    # both sizes of b and the columns of a must be multiples of this; scales of 1×128 tiles lie
    # column by column, each of which begins at a multiple of 16 bytes
    step = 128 if a_layout.scale == "power2" else 32 if a_layout.scale == "e4m3" else 16
    multiple = 4 if a_layout.scale == "power2" else 1
    coded_a, scales_a, recipe_a = _operand(_padded(a, multiple, step), a_layout, key, a.shape[1])
    coded_b, scales_b, recipe_b = _operand(_padded(b, step, step), b_layout)
    swizzle = [F.SwizzleType.NO_SWIZZLE] * len(recipe_a)
    if a_layout.scale == "e4m3":
        swizzle[0] = F.SwizzleType.SWIZZLE_32_4_4
    kind = dtype if a_layout.scale == "tensor" else torch.bfloat16
    options: Any = {"swizzle_a": swizzle, "swizzle_b": swizzle, "output_dtype": kind}
    out = F.scaled_mm(coded_a, coded_b.t(), scales_a, recipe_a, scales_b, recipe_b, **options)
    return out[:rows, :columns].to(dtype)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    down, across = -x.shape[0] % rows, -x.shape[1] % columns
    return F.pad(x, (0, across, 0, down)) if down or across else x


def _operand(
    x: Tensor, layout: Layout, key: Tensor | None = None, width: int | None = None
) -> tuple[Tensor, list[Tensor], list[Any]]:
    """(codes, scales, kinds of scales) as scaled_mm reads them.

    The random bits are indexed by the elements of the first `width` columns, without the padding.
    """
    kinds = F.ScalingType
    if key is not None and width != x.shape[1]:
        unpadded = quantize(x[:, :width].contiguous(), layout, key)
        matrix = unpadded._replace(codes=F.pad(unpadded.codes, (0, x.shape[1] - (width or 0))))
    else:
        matrix = quantize(x, layout, key)
    if layout.scale == "tensor":
        return matrix.codes.view(_DTYPES[layout.element]), [matrix.scale], [kinds.TensorWise]
    tiles = _padded(matrix.tiles, 1, layout.tiles(*x.shape)[1])
    if layout.scale == "power2":
        codes = matrix.codes.view(_DTYPES[layout.element])
        if layout.tile == (1, 128):
            return codes, [tiles.t().contiguous().t()], [kinds.BlockWise1x128]
        return codes, [_padded(tiles, 1, 4).t()], [kinds.BlockWise128x128]
    if layout.tile == (16, 16):
        tiles = tiles.repeat_interleave(16, 0)  # one row of scales per row of codes
    codes = pack_fp4(matrix.codes).view(torch.float4_e2m1fn_x2)
    scales = [swizzled_scales(tiles).view(torch.float8_e4m3fn), matrix.scale.reshape(1)]
    return codes, scales, [kinds.BlockWise1x16, kinds.TensorWise]


def swizzled_scales(scales: Tensor) -> Tensor:
    """Tile scales[R, C] in the order of cuBLASLt, zero-padded, flat.

    Blocks of 128 × 4 are contiguous; row r of a block begins at 16·(r mod 32) + 4·(r div 32).
    """
    scales = _padded(scales, 128, 4)  # [R', C'], multiples of 128 and 4
    parts = scales.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))  # [R'/128, 4, 32, C'/4, 4]
    return parts.permute(0, 3, 2, 1, 4).reshape(-1)
