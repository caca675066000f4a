"""Low-precision products in torch: autograd functions around `linear` and `grouped_matmul`.

With Q the rounding of a recipe, H the Hadamard transform along the summed rows, and dy rounded
stochastically if the recipe asks for it:
  y  = Q(x) · Q(w)ᵀ          dx = Q(dy) · Q(wᵀ)ᵀ          dw = Q(H dyᵀ) · Q(H xᵀ)ᵀ
x itself is saved for the backward pass, in its own dtype. The rows of each expert are padded to
whole tiles before the weight's gradient, so that no tile or transform mixes two experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from sabia.core.numerics.hadamard import SIZE
from sabia.core.numerics.hadamard import signs as hadamard_signs
from sabia.core.numerics.nearest_torch import fake, fake_nvfp4
from sabia.core.ops.experts_torch import DispatchPlan, biased
from sabia.core.ops.precision import (
    MatmulRecipe,
    Precision,
    QatTarget,
    RoundedProducts,
    hash_words,
)
from sabia.core.ops.rounding_units_torch import product
from sabia.kernels.grouped_matmul.torch_impl import library_obstacle
from sabia.kernels.quantize.definitions import mix
from sabia.kernels.quantize.torch_arithmetic import hadamard, mix_tensor, rounded, signed
from sabia.kernels.runtime.torch_support import Context

Tensor = torch.Tensor
WEIGHT_ROLE = 0x5BD1E995  # separates the random bits of the weight's gradient from the input's


class TorchRounding(RoundedProducts):
    """See RoundedProducts; `at` sets the clock, a tensor that compiled code reads."""

    biased = staticmethod(biased)

    def __init__(
        self, precision: Precision, names: frozenset[str], seed: int, device: torch.device
    ) -> None:
        super().__init__(precision, names, seed)
        # on the device: a copy for each product would stop the host each time
        self._clock = torch.zeros((), dtype=torch.int32, device=device)
        self._words = {name: tuple(map(signed, hash_words(seed, name))) for name in names}
        self._signs = torch.from_numpy(hadamard_signs(seed)).to(device)
        self.at(0, 0)

    def at(self, step: int, part: int) -> TorchRounding:
        """Itself, with the random bits of that part of that step until the next call."""
        self._clock.fill_(signed(mix((mix(step & 0xFFFFFFFF) + part * 0x9E3779B9) & 0xFFFFFFFF)))
        return self

    def fake_quantize(self, weights: list[Tensor]) -> list[Tensor]:
        """See RoundedProducts."""
        return list(_StraightThrough.apply(self.qat, *weights))

    def product(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """See RoundedProducts."""
        return _Linear.apply(x, weight, *self._random_state(name, x), self.recipe)

    def grouped_product(
        self, name: str, rows: Tensor, weight: Tensor, plan: DispatchPlan, multiply: object
    ) -> Tensor:
        """See RoundedProducts."""
        settings = (*self._random_state(name, rows), self.recipe, multiply)
        return _Grouped.apply(rows, weight, *settings, plan)

    def _random_state(self, name: str, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(key int32[2] of this tensor in this step, signs of the transform), on x's device.

        None where the recipe has no use for them.
        """
        signs = self._signs.to(x.device) if self.recipe.hadamard else None
        if not self.recipe.stochastic:
            return None, signs
        first, second = self._words[name]
        clock = self._clock.to(x.device)
        key = torch.stack((mix_tensor(clock ^ first), torch.full_like(clock, second)))
        return key, signs


class _StraightThrough(torch.autograd.Function):
    """Weights rounded to the QAT format; their gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Context, target: QatTarget, *weights: Tensor) -> tuple[Tensor, ...]:
        made = target.rounded(weights, fake, fake_nvfp4)
        return tuple(values.to(w.dtype) for values, w in zip(made, weights, strict=True))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads


def _weight_key(key: Tensor | None) -> Tensor | None:
    """The key of the random bits of the weight's gradient; None where there are none."""
    return None if key is None else torch.stack((key[0], key[1] ^ signed(WEIGHT_ROLE)))


def _weight_gradient_operand(x: Tensor, signs: Tensor | None) -> Tensor:
    """xᵀ as an operand of the weight's gradient; if transformed, in float32."""
    if signs is None:
        return x.t()
    return hadamard(F.pad(x.t(), (0, -len(x) % SIZE)), signs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        key: Tensor | None,
        signs: Tensor | None,
        recipe: MatmulRecipe,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, key, signs)
        ctx.recipe = recipe
        flat = x.reshape(-1, x.shape[-1])  # [M, in]
        out = product(flat, recipe.activation, weight, recipe.weight, x.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, key, signs = ctx.saved_tensors
        recipe, dx, dw = ctx.recipe, None, None
        flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            layouts = recipe.gradient, weight.t(), recipe.weight
            # dx = Q(dy) Q(wᵀ)ᵀ
            dx = product(grad, *layouts, x.dtype, key).view(x.shape)
        if ctx.needs_input_grad[1]:
            # dw = Q(H dyᵀ) Q(H xᵀ)ᵀ
            left, right = (_weight_gradient_operand(part, signs) for part in (grad, flat))
            layouts = recipe.gradient, right, recipe.activation
            dw = product(left, *layouts, x.dtype, _weight_key(key)).to(weight.dtype)
        return dx, dw, None, None, None


def _rounded_stack(weight: Tensor, recipe: MatmulRecipe) -> tuple[Tensor, Tensor]:
    """Values [E, out, in] and the scale of a stack of matrices; no tile spans two of them."""
    height = recipe.weight.tile[0] if recipe.weight.tile else 1
    count, rows, columns = weight.shape
    filled = F.pad(weight, (0, 0, 0, -rows % height))  # each matrix ends with a whole tile
    values, scale = rounded(filled.reshape(-1, columns), recipe.weight)
    return values.view(count, -1, columns)[:, :rows], scale


def _aligned_groups(
    parts: Sequence[Tensor], plan: DispatchPlan, group: int
) -> tuple[list[Tensor], Any]:
    """The rows, those of each expert zero-padded to a multiple of `group`, and their plan."""
    counts = torch.diff(plan.ends, prepend=plan.ends.new_zeros(1))  # [E] rows of each expert
    padded = (counts + group - 1) // group * group  # [E]
    ends = padded.cumsum(0).to(torch.int32)  # [E] end of each expert's rows after padding
    moved = (ends - padded) - (plan.ends - counts)  # [E] shift of an expert's first row
    rows = len(plan.experts)
    # [M] new index of each row
    index = torch.arange(rows, device=moved.device) + moved[plan.experts]
    total = -(-rows // group) * group + len(counts) * group  # known without asking the device
    # the last expert takes the rest, rows of zeros
    ends[-1] = total
    spread = [part.new_zeros(total, part.shape[1]).index_copy(0, index, part) for part in parts]
    return spread, replace(plan, ends=ends)


def _weight_gradient(grad: Tensor, rows: Tensor, plan: DispatchPlan) -> Tensor:
    """gradᵀ · rows of each expert, [E, out, in]."""
    if library_obstacle(rows, (grad.shape[1], rows.shape[1])) is None:
        return F.grouped_mm(grad.t(), rows, offs=plan.ends)
    ends = [0, *plan.ends.tolist()]
    return torch.stack([grad[a:b].t() @ rows[a:b] for a, b in pairwise(ends)])


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        key: Tensor | None,
        signs: Tensor | None,
        recipe: MatmulRecipe,
        multiply: Any,
        plan: DispatchPlan,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, key, signs)
        ctx.recipe, ctx.multiply, ctx.plan = recipe, multiply, plan
        values, scale = rounded(x, recipe.activation)  # [M, in], scalar
        matrices, matrix_scale = _rounded_stack(weight, recipe)  # [E, out, in], scalar
        # y = Q(x) Q(w)ᵀ, row by row with the matrix of its expert
        out = multiply(values.to(x.dtype), matrices.to(x.dtype), plan)
        return (out.float() * (scale * matrix_scale)).to(x.dtype)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, key, signs = ctx.saved_tensors
        recipe, dx, dw = ctx.recipe, None, None
        if ctx.needs_input_grad[0]:
            values, scale = rounded(grad, recipe.gradient, key)
            matrices, matrix_scale = _rounded_stack(weight, recipe)
            # dx = Q(dy) Q(wᵀ)ᵀ
            transposed = matrices.transpose(1, 2).to(x.dtype).contiguous()
            dx = ctx.multiply(values.to(x.dtype), transposed, ctx.plan)
            dx = (dx.float() * (scale * matrix_scale)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _grouped_gradient(ctx, grad, x, key, signs).to(weight.dtype)
        return dx, dw, None, None, None, None, None


def _grouped_gradient(
    ctx: Context, grad: Tensor, x: Tensor, key: Tensor | None, signs: Tensor | None
) -> Tensor:
    recipe = ctx.recipe
    (grad, x), plan = _aligned_groups((grad, x), ctx.plan, recipe.group)
    # H dyᵀ [out, M'] and H xᵀ [in, M'], M' rows after padding
    left, right = (_weight_gradient_operand(part, signs) for part in (grad, x))
    values, scale = rounded(left, recipe.gradient, _weight_key(key))
    others, other_scale = rounded(right, recipe.activation)
    dw = _weight_gradient(values.t().to(x.dtype), others.t().to(x.dtype), plan)
    return dw.float() * (scale * other_scale)
