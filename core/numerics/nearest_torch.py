"""Rounding to the values of codes in torch: `Integers.round` and `SmallFloat.round`; and those of
`integers` and, to NVFP4, of `scales`, for quantization-aware training."""

from collections.abc import Sequence

import torch

from sabia.core.numerics.floats import E2M1, E4M3, SmallFloat
from sabia.core.numerics.integers import Integers, code_range, group_width

Tensor = torch.Tensor
NVFP4_GROUP = 16


def nearest(element: Integers | SmallFloat, x: torch.Tensor) -> torch.Tensor:
    """The values of codes nearest to finite x[...], ties to even; larger ones are clipped."""
    if isinstance(element, Integers):
        return torch.round(x).clamp(*code_range(element.bits))
    power = torch.frexp(x)[1] - 1  # 2^power ≤ |x| < 2^(power+1)
    step = torch.ldexp(torch.ones_like(x), power.clamp_min(1 - element.bias) - element.mantissa)
    return (torch.round(x / step) * step).clamp(-element.max, element.max)


def fake(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """weight[O, I] rounded to integer codes with BF16 absmax scales, as float32.

    Equals decode(encode(…)) of `integers`. UsageError if `group` does not divide the columns.
    """
    lowest, highest = code_range(bits)
    parts = weight.float().unflatten(-1, (-1, group_width(weight.shape[-1], group)))  # [O, G, g]
    scale = (parts.abs().amax(-1, keepdim=True) / highest).bfloat16().float()
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (parts / scale).round().clamp(lowest, highest)
    return (codes * scale).flatten(-2)


def fake_nvfp4(weights: Sequence[Tensor]) -> list[Tensor]:
    """weights[..., O, I] in NVFP4 as float32, with one scale for those at an index [...] together.

    Equals decode(encode(...)) of `scales` by absmax. UsageError if 16 does not divide the columns.
    """
    wide = [weight.float() for weight in weights]
    sizes = [weight.abs().amax((-2, -1), keepdim=True) for weight in wide]
    largest = torch.stack(sizes).amax(0).unsqueeze(-1)  # [..., 1, 1, 1]
    # g = 448 * 6 / max|w|; a tensor, because torch turns a scalar into a reciprocal
    whole = largest.new_full((), E4M3.max * E2M1.max) / largest
    whole = torch.where((largest > 0) & whole.isfinite(), whole, 1.0)
    made = []
    for weight in wide:
        width = group_width(weight.shape[-1], NVFP4_GROUP)
        groups = weight.unflatten(-1, (-1, width))  # [..., O, I/16, 16]
        size = groups.abs().amax(-1, keepdim=True)
        wanted = size / size.new_full((), E2M1.max)
        stored = nearest(E4M3, wanted * whole).clamp_min(float(E4M3.values[1]))
        step = torch.where(wanted > 0, stored, 1.0) / whole
        made.append((nearest(E2M1, groups / step) * step).flatten(-2))
    return made
