"""The rounding of `integers` in torch, for training: same scales, same codes, values back."""

import torch

from sabia.core.numerics.integers import code_range, group_width

Tensor = torch.Tensor


def fake(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """weight[O, I] as int codes with BF16 scales by largest value give it back, float32.

    Equals decode(encode(…)) of `integers` with absmax scales. UsageError where groups of columns
    do not come out even.
    """
    lowest, highest = code_range(bits)
    parts = weight.float().unflatten(-1, (-1, group_width(weight.shape[-1], group)))
    scale = (parts.abs().amax(-1, keepdim=True) / highest).bfloat16().float()
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (parts / scale).round().clamp(lowest, highest)
    return (codes * scale).flatten(-2)
