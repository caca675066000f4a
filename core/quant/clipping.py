"""Scales that clip weights where the outputs of a matrix lose least, AWQ's second part.

AWQ (Lin et al. 2023, arXiv 2306.00978) shrinks the range of each group as far as the error of the
outputs falls, group by group. Here the error is that of the whole outputs, |X (W' - W)ᵀ|² from H,
with the errors that the other groups have: one group after the other takes the scale that is best
beside theirs, so that it never rises and errors of groups cancel on the inputs (in NVFP4 this has
two to three times the gain of the groups alone, tests/bench/RESULTS.md).
"""

import numpy as np
import torch

from sabia.core import stop
from sabia.core.numerics.integers import group_width
from sabia.core.numerics.scales import Scales, candidates, choose_scales, decode, encode
from sabia.core.numerics.schemes import Scheme


def clipped(
    weight: np.ndarray, hessian: torch.Tensor, scheme: Scheme, whole: np.float32 | None = None
) -> Scales:
    """Scales of weight[O, I] for codes to nearest and hessian[I, I]; see scales.choose_scales."""
    scales = choose_scales(weight, scheme, "mse", whole)
    h = hessian.float().cpu().numpy()
    off = decode(encode(weight, scales, scheme), scales, scheme) - weight  # E, [O, I]
    width = group_width(weight.shape[1], scheme.group)
    for group in range(weight.shape[1] // width):
        stop.check()
        here = slice(group * width, (group + 1) * width)
        own, block = weight[:, here], h[here, here]
        # E H Eᵀ with e in this group: e H_gg eᵀ + 2 Σ_j E_j H_jg eᵀ over the others, and a constant
        cross = 2 * (off @ h[:, here] - off[:, here] @ block)
        best, stored = off[:, here], scales.stored[:, group]
        zero = np.zeros_like(stored) if scales.zero is None else scales.zero[:, group]
        least = _error(best, block, cross)
        for step, shift in candidates(own[:, None], scheme, "mse", scales.whole):
            step, shift = step[:, 0], shift[:, 0]
            size, moved = (step / scales.whole)[:, None], shift[:, None]
            errors = (scheme.codes.round(own / size + moved) - moved) * size - own
            error = _error(errors, block, cross)
            better = error < least
            best = np.where(better[:, None], errors, best)
            least, stored = np.where(better, error, least), np.where(better, step, stored)
            zero = np.where(better, shift, zero)
        off[:, here], scales.stored[:, group] = best, stored
        if scales.zero is not None:
            scales.zero[:, group] = zero
    return scales


def _error(errors: np.ndarray, block: np.ndarray, cross: np.ndarray) -> np.ndarray:
    made: np.ndarray = np.einsum("oi,oi->o", errors @ block + cross, errors)
    return made
