"""GPTQ (Frantar et al. 2023, arXiv 2210.17323): rounding that compensates errors by the inputs.

With H = 2/n Σ x xᵀ over calibration inputs, columns are rounded one after the other; the error of
each, divided by the diagonal of the upper Cholesky factor of H⁻¹, is subtracted from the columns
that are not yet rounded. Columns without inputs (H_ii = 0) become 0. H is damped by a fraction of
its mean diagonal. Updates are made in blocks of columns. Column order `static`: by decreasing H_ii,
with scales and groups in the stored order, so that no index has to be stored; `natural`: left to
right, with the scales of a group chosen from the updated weights at its first column.
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
    """bits and group size of the codes; scale, order and damping as in a recipe."""

    bits: int
    group: int | None
    scale: integers.Method = "mse"
    order: str = "static"
    damping: float = 0.01


def gptq(
    weight: np.ndarray, hessian: torch.Tensor, config: GptqConfig, name: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """(codes[O, I] int8, scales[O, groups]) of weight[O, I] for hessian[I, I] (float64).

    `name` is for messages. Raises Failed if H cannot be factored with more damping either.
    """
    w = torch.tensor(weight, dtype=torch.float32, device=hessian.device)  # [O, I]
    h = hessian.clone()
    diagonal = h.diagonal()
    dead = diagonal == 0  # columns without inputs
    diagonal[dead] = 1
    w[:, dead] = 0  # their weights do not affect the output
    group = config.group or w.shape[1]
    integers.group_width(w.shape[1], group)
    if config.order == "static":
        order = torch.argsort(diagonal, descending=True, stable=True)  # [I], largest H_ii first
        scale = _scales(w, config)
    else:
        order, scale = torch.arange(w.shape[1], device=h.device), None
    factor = _inverse_factor(h[order][:, order], config.damping, name).float()  # U, [I, I]
    codes, scale = _rounded(w[:, order], factor, order // group, scale, config)
    restored = torch.empty_like(codes)
    restored[:, order] = codes  # the stored order of columns
    return restored.cpu().numpy(), scale.cpu().numpy()


def _scales(weight: torch.Tensor, config: GptqConfig, group: int | None = None) -> torch.Tensor:
    chosen = integers.choose_scales(
        weight.cpu().numpy(), config.bits, group or config.group, config.scale
    )
    return torch.from_numpy(chosen).to(weight.device)


def _inverse_factor(hessian: torch.Tensor, damping: float, name: str) -> torch.Tensor:
    """U[I, I] with H⁻¹ = Uᵀ U, the upper Cholesky factor for the damped H."""
    mean = hessian.diagonal().mean()
    for attempt in range(_RETRIES):
        fraction = damping * 10**attempt
        # H + λ·mean(diag H)·I; ten times more damping after a failure
        damped = hessian + torch.diag_embed((fraction * mean).expand(len(hessian)))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)  # H⁻¹ = (L Lᵀ)⁻¹
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        notes.warn(f"{name}: H is not positive definite with damping {fraction:g}; trying more")
    raise Failed(
        f"{name}: the Hessian cannot be factored (expected finite calibration inputs; check the "
        "model for inf and NaN)"
    )


def _rounded(
    w: torch.Tensor,
    factor: torch.Tensor,
    group_of: torch.Tensor,
    scale: torch.Tensor | None,
    config: GptqConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes[O, I], scales[O, groups]) of w[O, I], columns in the order given; w is modified."""
    low, high = integers.code_range(config.bits)
    codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    groups = group_of.tolist()
    scales: torch.Tensor = (
        torch.ones(len(w), max(groups) + 1, device=w.device) if scale is None else scale
    )
    step = _block(config.group)
    for start in range(0, w.shape[1], step):
        block, end = w[:, start : start + step], min(start + step, w.shape[1])
        errors = torch.empty_like(block)  # E, [O, step]
        triangle = factor[start:end, start:end]
        for i in range(end - start):
            column, group = start + i, groups[start + i]
            if scale is None and (column == 0 or groups[column - 1] != group):
                width = config.group or w.shape[1]
                scales[:, group] = _scales(w[:, column : column + width], config, width)[:, 0]
            s = scales[:, group]  # [O]
            code = torch.clamp(torch.round(block[:, i] / s), low, high)  # q_i / s, [O]
            codes[:, column] = code.to(torch.int8)
            # algorithm 1: e_i = (w_i - q_i) / U_ii, and w_j ← w_j - e_i U_ij for j > i
            errors[:, i] = (block[:, i] - code * s) / triangle[i, i]
            block[:, i + 1 :] -= torch.outer(errors[:, i], triangle[i, i + 1 :])
        w[:, end:] -= errors @ factor[start:end, end:]  # the lazy batch update of algorithm 1
    return codes, scales


def _block(group: int | None) -> int:
    """Columns of a block: whole groups, so that a group is up to date when its scale is chosen."""
    return BLOCK if group is None else max(group, BLOCK // group * group)


def relative_output_error(weight: np.ndarray, decoded: np.ndarray, hessian: torch.Tensor) -> float:
    """|X (W' - W)ᵀ| / |X Wᵀ| in the Frobenius norm, from H instead of the inputs X."""
    w = torch.from_numpy(np.array(weight, np.float64)).to(hessian.device)
    off = torch.from_numpy(np.array(decoded, np.float64)).to(hessian.device) - w
    # |X mᵀ|² = n/2 · Σ (m H) ∘ m; the factor cancels
    error, size = (float(((m @ hessian) * m).sum()) for m in (off, w))
    return (max(error, 0.0) / size) ** 0.5 if size > 0 else 0.0
