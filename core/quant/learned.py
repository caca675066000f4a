"""Learned rounding: whether each weight is rounded up or down, by signed gradients.

As in AutoRound (Cheng et al. 2023, arXiv 2309.05516) an offset v in [-1/2, 1/2] of each code is
learned: q = round(w/s + z + v), with the rounding passed through unchanged in the gradient, and
v ← v - η·sign(∂L/∂v), η falling to 0. L is the squared error of the outputs of this matrix alone,
|X (W' - W)ᵀ|² from H, so that no inputs have to be kept. The offsets with the least L are taken;
those of step 0 are rounding to nearest, so L is never above it.
"""

import numpy as np
import torch

from sabia.core import stop
from sabia.core.numerics.nearest_torch import nearest
from sabia.core.numerics.scales import Scales
from sabia.core.numerics.schemes import Scheme
from sabia.core.quant.gptq import columns

STEPS = 200
RATE = 0.005  # of the first step, η; the sum of all is 1/2, the largest offset


def learned(
    weight: np.ndarray, hessian: torch.Tensor, scheme: Scheme, scales: Scales
) -> np.ndarray:
    """Codes[O, I] of weight[O, I] for scales and hessian[I, I]."""
    w = torch.tensor(weight, dtype=torch.float32, device=hessian.device)
    h = hessian.float()
    s, z = columns(scales, scheme, w)
    scaled = w / s + z
    v, best, least = torch.zeros_like(w), torch.empty(0), torch.full((len(w),), torch.inf)
    least = least.to(w.device)
    for number in range(STEPS):
        stop.check()
        values = nearest(scheme.codes, scaled + v)
        product = ((values - z) * s - w) @ h  # (W' - W) H
        loss = (product * ((values - z) * s - w)).sum(1)  # of each row
        better = loss < least
        best = values if number == 0 else torch.where(better[:, None], values, best)
        least = torch.where(better, loss, least)
        # ∂L/∂v = 2 s (W' - W) H, of which only the sign counts; s > 0
        rate = RATE * (1 - number / STEPS)
        v = (v - rate * product.sign()).clamp(-0.5, 0.5)
    return scheme.codes.encode(best.cpu().numpy())
