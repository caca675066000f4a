"""The rounding of `integers` in torch, for quantization-aware training."""

import torch

from sabia.core.numerics.integers import code_range, group_width

Tensor = torch.Tensor


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
