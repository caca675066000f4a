"""Rounding to the values of codes in torch: `Integers.round` and `SmallFloat.round`."""

import torch

from sabia.core.numerics.floats import SmallFloat
from sabia.core.numerics.integers import Integers, code_range


def nearest(element: Integers | SmallFloat, x: torch.Tensor) -> torch.Tensor:
    """The values of codes nearest to finite x[...], ties to even; larger ones are clipped."""
    if isinstance(element, Integers):
        return torch.round(x).clamp(*code_range(element.bits))
    power = torch.frexp(x)[1] - 1  # 2^power ≤ |x| < 2^(power+1)
    step = torch.ldexp(torch.ones_like(x), power.clamp_min(1 - element.bias) - element.mantissa)
    return (torch.round(x / step) * step).clamp(-element.max, element.max)
