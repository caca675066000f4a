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
from sabia.core.numerics.nearest_torch import nearest
from sabia.core.numerics.scales import Method, Scales, choose_scales, steps, whole_scale
from sabia.core.numerics.schemes import Scheme

BLOCK = 32
STRIPE = 128  # columns that are computed together, where H is symmetric
_RETRIES = 3


@dataclass(frozen=True)
class GptqConfig:
    """scheme: the format of the codes. scale, order and damping as in a recipe; whole: the scale of
    the matrix (core.numerics.scales), by default that of this matrix alone."""

    scheme: Scheme
    scale: Method = "mse"
    order: str = "static"
    damping: float = 0.01
    whole: np.float32 | None = None


def gptq(
    weight: np.ndarray, hessian: torch.Tensor, config: GptqConfig, name: str = ""
) -> tuple[np.ndarray, Scales]:
    """(codes[O, I], scales) of weight[O, I] for hessian[I, I].

    `name` is for messages. Raises Failed if H cannot be factored with more damping either.
    """
    w = torch.tensor(weight, dtype=torch.float32, device=hessian.device)  # [O, I]
    h = hessian.clone()
    diagonal = h.diagonal()
    dead = diagonal == 0  # columns without inputs
    diagonal[dead] = 1
    w[:, dead] = 0  # their weights do not affect the output
    scheme = config.scheme
    live = w.cpu().numpy()
    whole = config.whole
    if whole is None:
        whole = whole_scale(float(np.abs(live).max(initial=0)), scheme)
    scales = choose_scales(live, scheme, config.scale, whole)
    order = torch.arange(w.shape[1], device=h.device)
    updated = None  # groups whose scales are chosen from updated weights
    if config.order == "static":
        order = torch.argsort(diagonal, descending=True, stable=True)  # [I], largest H_ii first
    elif scheme.group:
        updated = scales
    factor = _inverse_factor(h[order][:, order], config.damping, name).float()  # U, [I, I]
    values = _rounded(w.T[order], factor, order, scales, updated, config)
    restored = torch.empty_like(w)
    restored[:, order] = values.T  # the stored order of columns
    return scheme.codes.encode(restored.cpu().numpy()), scales


def _inverse_factor(hessian: torch.Tensor, damping: float, name: str) -> torch.Tensor:
    """U[I, I], upper triangular with H⁻¹ = Uᵀ U, for the damped H.

    With the order of rows and columns reversed, H = L Lᵀ; then U is L⁻¹, reversed.
    """
    mean = hessian.diagonal().mean()
    for attempt in range(_RETRIES):
        fraction = damping * 10**attempt
        # H + λ·mean(diag H)·I; ten times more damping after a failure
        damped = hessian + torch.diag_embed((fraction * mean).expand(len(hessian)))
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            return _inverse(lower).flip(0, 1)
        notes.warn(f"{name}: H is not positive definite with damping {fraction:g}; trying more")
    raise Failed(
        f"{name}: the Hessian cannot be factored (expected finite calibration inputs; check the "
        "model for inf and NaN)"
    )


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """L⁻¹ of a lower triangle L[I, I], by halves: most of it is products of matrices."""
    half = len(lower) // 2
    if half < STRIPE:
        eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, eye, upper=False)
    first, last = _inverse(lower[:half, :half]), _inverse(lower[half:, half:])
    whole = torch.zeros_like(lower)
    whole[:half, :half], whole[half:, half:] = first, last
    whole[half:, :half] = -(last @ (lower[half:, :half] @ first))
    return whole


def _rounded(
    w: torch.Tensor,
    factor: torch.Tensor,
    order: torch.Tensor,
    scales: Scales,
    updated: Scales | None,
    config: GptqConfig,
) -> torch.Tensor:
    """Values[I, O] of the codes of w[I, O], the columns in the given order; w is modified.

    updated: the scales, if those of a group are chosen (and replaced) at its first column.
    """
    scheme = config.scheme
    values = torch.empty_like(w)
    unit = factor / factor.diagonal()[:, None]  # U_ij / U_ii
    step, zero = (x.T[order] for x in columns(scales, scheme, w.T))
    size = _block(scheme.group)
    for start in range(0, len(w), size):
        block, end = w[start : start + size], min(start + size, len(w))
        errors = torch.empty_like(block)  # E, [size, O]
        rows = zip(
            block, errors, values[start:end], step[start:end], zero[start:end],
            unit[start:end, start:end], strict=True,
        )  # fmt: skip
        for i, (row, error, wanted, s, z, share) in enumerate(rows):
            column = start + i
            if updated is not None and scheme.group and column % scheme.group == 0:
                here = slice(column, column + scheme.group)
                chosen = choose_scales(w[here].T.cpu().numpy(), scheme, config.scale, updated.whole)
                _replace(updated, chosen, column // scheme.group)
                step[here], zero[here] = (x.T for x in columns(chosen, scheme, w[here].T))
            if scheme.symmetric:
                value = wanted.copy_(nearest(scheme.codes, row / s))  # q_i / s, [O]
            else:
                value = wanted.copy_(nearest(scheme.codes, row / s + z)) - z
            # algorithm 1: w_j ← w_j - (w_i - q_i) / U_ii · U_ij for j > i
            torch.addcmul(row, value, s, value=-1, out=error)
            block[i + 1 :].addr_(share[i + 1 :], error, alpha=-1)
        # the lazy batch update of algorithm 1
        w[end:].addmm_(unit[start:end, end:].T, errors, alpha=-1)
    return values


def _replace(scales: Scales, chosen: Scales, group: int) -> None:
    scales.stored[:, group] = chosen.stored[:, 0]
    if scales.zero is not None and chosen.zero is not None:
        scales.zero[:, group] = chosen.zero[:, 0]


def columns(
    scales: Scales, scheme: Scheme, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and zero points of the elements of like[O, I]."""
    step, zero = steps(scales, scheme, tuple(like.shape))
    pair = (step, np.float32(0) if zero is None else zero)
    one, other = (np.broadcast_to(x, like.shape) for x in pair)
    return torch.tensor(one, device=like.device), torch.tensor(other, device=like.device)


def _block(group: int | None) -> int:
    """Columns of a block: whole groups, so that a group is up to date when its scale is chosen."""
    return BLOCK if group is None else max(group, BLOCK // group * group)


def output_norm(matrix: np.ndarray, hessian: torch.Tensor) -> float:
    """|X Mᵀ| for M[O, I] in the Frobenius norm, up to a factor that H gives all of them."""
    m = torch.from_numpy(np.ascontiguousarray(matrix, np.float32)).to(hessian)
    total = 0.0  # |X Mᵀ|² = n/2 · Σ (M H) ∘ M
    for start in range(0, m.shape[1], STRIPE):  # H is symmetric: what is above counts twice
        here, rest = m[:, start : start + STRIPE], m[:, start + STRIPE :]
        rows = hessian[start : start + STRIPE]
        product = here @ rows[:, start : start + STRIPE]
        total += float(product.mul_(here).sum(dtype=torch.float64))
        if rest.shape[1]:
            product = here @ rows[:, start + STRIPE :]
            total += 2 * float(product.mul_(rest).sum(dtype=torch.float64))
    return max(total, 0.0) ** 0.5
