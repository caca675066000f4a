"""GPTQ (Frantar et al. 2023, arXiv 2210.17323): rounding that knows the layer's inputs.

With H = 2/n Σ x xᵀ over calibration inputs, columns are rounded one after the other and the error
of each, divided by its diagonal of the upper Cholesky factor of H⁻¹, is taken out of the columns
still to come. Columns that no input reaches (H_ii = 0) become 0. H is damped by a share of its mean
diagonal. Updates run in blocks of columns. Column order `static`: by falling H_ii, with scales and
groups of the columns as they lie, so that no index has to be stored; `natural`: left to right, a
group's scales chosen from the weights as updated when its first column comes.
"""

from dataclasses import dataclass

import numpy as np
import torch

from sabia.core import notes
from sabia.core.errors import Failed
from sabia.core.numerics import integers

BLOCK = 128
_RETRIES = 3


@dataclass(frozen=True)
class GptqConfig:
    """bits and group of the codes; scale, order and damping as in a recipe."""

    bits: int
    group: int | None
    scale: integers.Method = "mse"
    order: str = "static"
    damping: float = 0.01


def gptq(
    weight: np.ndarray, hessian: torch.Tensor, config: GptqConfig, name: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """(codes[O, I] int8, scales[O, groups]) of weight[O, I] for hessian[I, I] (float64).

    `name` is for messages. Raises Failed where H cannot be factored even with more damping.
    """
    w = torch.tensor(weight, dtype=torch.float32, device=hessian.device)
    h = hessian.clone()
    diagonal = h.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    w[:, dead] = 0
    group = config.group or w.shape[1]
    integers.group_width(w.shape[1], group)
    if config.order == "static":
        order = torch.argsort(diagonal, descending=True, stable=True)
        scale = _scales(w, config)
    else:
        order, scale = torch.arange(w.shape[1], device=h.device), None
    factor = _inverse_factor(h[order][:, order], config.damping, name).float()
    codes, scale = _rounded(w[:, order], factor, order // group, scale, config)
    back = torch.empty_like(codes)
    back[:, order] = codes
    return back.cpu().numpy(), scale.cpu().numpy()


def _scales(weight: torch.Tensor, config: GptqConfig, group: int | None = None) -> torch.Tensor:
    chosen = integers.choose_scales(
        weight.cpu().numpy(), config.bits, group or config.group, config.scale
    )
    return torch.from_numpy(chosen).to(weight.device)


def _inverse_factor(hessian: torch.Tensor, damping: float, name: str) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the damped H."""
    mean = hessian.diagonal().mean()
    for attempt in range(_RETRIES):
        share = damping * 10**attempt
        damped = hessian + torch.diag_embed((share * mean).expand(len(hessian)))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        notes.warn(f"{name}: H is not positive definite with damping {share:g}; trying more")
    raise Failed(f"{name}: H cannot be factored (calibration inputs hold inf or NaN?)")


def _rounded(
    w: torch.Tensor,
    factor: torch.Tensor,
    group_of: torch.Tensor,
    scale: torch.Tensor | None,
    config: GptqConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes[O, I], scales[O, groups]); columns in the order given."""
    low, high = integers.code_range(config.bits)
    codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    groups = group_of.tolist()
    scales: torch.Tensor = (
        torch.ones(len(w), max(groups) + 1, device=w.device) if scale is None else scale
    )
    step = _block(config.group)
    for start in range(0, w.shape[1], step):
        block, end = w[:, start : start + step], min(start + step, w.shape[1])
        errors = torch.empty_like(block)
        triangle = factor[start:end, start:end]
        for i in range(end - start):
            column, group = start + i, groups[start + i]
            if scale is None and (column == 0 or groups[column - 1] != group):
                width = config.group or w.shape[1]
                scales[:, group] = _scales(w[:, column : column + width], config, width)[:, 0]
            s = scales[:, group]
            code = torch.clamp(torch.round(block[:, i] / s), low, high)
            codes[:, column] = code.to(torch.int8)
            errors[:, i] = (block[:, i] - code * s) / triangle[i, i]
            block[:, i + 1 :] -= torch.outer(errors[:, i], triangle[i, i + 1 :])
        w[:, end:] -= errors @ factor[start:end, end:]
    return codes, scales


def _block(group: int | None) -> int:
    """Columns of a block: whole groups, so that a group's columns are up to date at its start."""
    return BLOCK if group is None else max(group, BLOCK // group * group)


def relative_output_error(weight: np.ndarray, decoded: np.ndarray, hessian: torch.Tensor) -> float:
    """|X (W' - W)ᵀ| / |X Wᵀ| in the Frobenius norm, from H instead of the inputs X."""
    w = torch.from_numpy(np.array(weight, np.float64)).to(hessian.device)
    off = torch.from_numpy(np.array(decoded, np.float64)).to(hessian.device) - w
    wrong, right = (float(((m @ hessian) * m).sum()) for m in (off, w))
    return (max(wrong, 0.0) / right) ** 0.5 if right > 0 else 0.0
