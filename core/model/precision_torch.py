"""Low-precision products in torch: autograd functions around `linear` and `grouped_matmul`.

With Q the rounding of a recipe, H the Hadamard transform along the summed rows, and dy rounded
stochastically where the recipe says so:
  y  = Q(x) · Q(w)ᵀ          dx = Q(dy) · Q(wᵀ)ᵀ          dw = Q(H dyᵀ) · Q(H xᵀ)ᵀ
x itself is kept for the backward pass, in its own dtype. For experts the rows of each are moved
apart to whole tiles before their gradients are summed, so that no tile or transform mixes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from sabia.core.model.ops_torch_moe import ALIGNMENT_BYTES
from sabia.core.model.precision import LowOps, Precision, Products, Served, words
from sabia.core.model.precision_torch_units import product
from sabia.core.numerics.hadamard import SIZE
from sabia.core.numerics.hadamard import signs as hadamard_signs
from sabia.core.numerics.integers_torch import fake
from sabia.kernels.quantize.interface import NVFP4, mix
from sabia.kernels.quantize.torch_impl import hadamard, mix_tensor, rounded, signed

Tensor = torch.Tensor
WEIGHT_ROLE = 0x5BD1E995  # tells the draws of the weight's gradient from the input's


class TorchLowOps(LowOps):
    """See `precision.wrap`. One object; `at` sets its clock, a tensor that compiled code reads."""

    def __init__(self, base: Any, precision: Precision, low: frozenset[str], seed: int) -> None:
        super().__init__(base, precision, low, seed)
        self._clock = torch.zeros((), dtype=torch.int32)
        self._words = {name: tuple(map(signed, words(seed, name))) for name in low}
        self._signs = torch.from_numpy(hadamard_signs(seed))
        self.at(0)

    def at(self, step: int, part: int = 0) -> TorchLowOps:
        """Itself, drawing as in that part of that step until the next call."""
        self._clock.fill_(signed(mix((mix(step & 0xFFFFFFFF) + part * 0x9E3779B9) & 0xFFFFFFFF)))
        return self

    def served(self, weight: Tensor) -> Tensor:
        """See LowOps."""
        return _Straight.apply(weight, self.format)

    def product(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """See LowOps."""
        return _Linear.apply(x, weight, *self._chance(name, x), self.products)

    def grouped_product(self, name: str, rows: Tensor, weight: Tensor, plan: Any) -> Tensor:
        """See LowOps."""
        settings = (*self._chance(name, rows), self.products, self.base.grouped_matmul)
        return _Grouped.apply(rows, weight, *settings, plan)

    def _chance(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """(key int32[2] of this tensor now, signs of the transform), where x is."""
        first, second = self._words[name]
        clock = self._clock.to(x.device)
        key = torch.stack((mix_tensor(clock ^ first), torch.full_like(clock, second)))
        return key, self._signs.to(x.device)


class _Straight(torch.autograd.Function):
    """The weight as it will be served; the gradient as if it were the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, served: Served) -> Tensor:
        return _as_served(weight, served).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _as_served(weight: Tensor, served: Served) -> Tensor:
    if served.kind != "nvfp4":
        return fake(weight, int(served.kind.removeprefix("int")), served.group)
    if weight.ndim == 3:
        return torch.stack([_as_served(matrix, served) for matrix in weight.unbind()])
    values, scale = rounded(weight, NVFP4)
    return values * scale


def _role(key: Tensor, products: Products, of_weight: bool = False) -> Tensor | None:
    """The key of a gradient's draws, None where it is rounded to nearest."""
    if not products.stochastic:
        return None
    return key ^ key.new_tensor([0, signed(WEIGHT_ROLE)]) if of_weight else key


def _summed_rows(x: Tensor, signs: Tensor, products: Products) -> Tensor:
    """xᵀ as an operand of the weight's gradient; behind the transform in float32."""
    if not products.hadamard:
        return x.t()
    return hadamard(F.pad(x.t(), (0, -len(x) % SIZE)), signs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, key: Tensor, signs: Tensor, products: Products
    ) -> Tensor:
        ctx.save_for_backward(x, weight, key, signs)
        ctx.products = products
        flat = x.reshape(-1, x.shape[-1])
        out = product(flat, products.activation, weight, products.weight, x.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, key, signs = ctx.saved_tensors
        products, dx, dw = ctx.products, None, None
        flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            layouts = products.gradient, weight.t(), products.weight
            dx = product(grad, *layouts, x.dtype, _role(key, products)).view(x.shape)
        if ctx.needs_input_grad[1]:
            left, right = (_summed_rows(part, signs, products) for part in (grad, flat))
            chance = _role(key, products, of_weight=True)
            layouts = products.gradient, right, products.activation
            dw = product(left, *layouts, x.dtype, chance).to(weight.dtype)
        return dx, dw, None, None, None


def _rounded_stack(weight: Tensor, products: Products) -> tuple[Tensor, Tensor]:
    """Values [E, out, in] and the scale of a stack of matrices; no tile spans two of them."""
    height = products.weight.tile[0] if products.weight.tile else 1
    count, rows, columns = weight.shape
    filled = F.pad(weight, (0, 0, 0, -rows % height))
    values, scale = rounded(filled.reshape(-1, columns), products.weight)
    return values.view(count, -1, columns)[:, :rows], scale


def _apart(parts: Sequence[Tensor], plan: Any, group: int) -> tuple[list[Tensor], Any]:
    """Rows with each expert's beginning at a multiple of `group`, zeros between; their plan."""
    counts = torch.diff(plan.ends, prepend=plan.ends.new_zeros(1))
    room = (counts + group - 1) // group * group
    ends = room.cumsum(0).to(torch.int32)
    moved = (ends - room) - (plan.ends - counts)
    rows = len(plan.experts)
    index = torch.arange(rows, device=moved.device) + moved[plan.experts]
    total = -(-rows // group) * group + len(counts) * group  # known without asking the device
    ends[-1] = total
    found = [part.new_zeros(total, part.shape[1]).index_copy(0, index, part) for part in parts]
    return found, replace(plan, ends=ends)


def _weight_gradient(grad: Tensor, rows: Tensor, plan: Any) -> Tensor:
    """gradᵀ · rows of each expert, [E, out, in]."""
    sizes = (grad.shape[1], rows.shape[1])
    if all(size * rows.element_size() % ALIGNMENT_BYTES == 0 for size in sizes):
        return F.grouped_mm(grad.t(), rows, offs=plan.ends)
    ends = [0, *plan.ends.tolist()]
    return torch.stack([grad[a:b].t() @ rows[a:b] for a, b in pairwise(ends)])


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        key: Tensor,
        signs: Tensor,
        products: Products,
        multiply: Any,
        plan: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, key, signs)
        ctx.products, ctx.multiply, ctx.plan = products, multiply, plan
        values, scale = rounded(x, products.activation)
        matrices, matrix_scale = _rounded_stack(weight, products)
        out = multiply(values.to(x.dtype), matrices.to(x.dtype), plan)
        return (out.float() * (scale * matrix_scale)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, key, signs = ctx.saved_tensors
        products, dx, dw = ctx.products, None, None
        if ctx.needs_input_grad[0]:
            values, scale = rounded(grad, products.gradient, _role(key, products))
            matrices, matrix_scale = _rounded_stack(weight, products)
            turned = matrices.transpose(1, 2).to(x.dtype).contiguous()
            dx = ctx.multiply(values.to(x.dtype), turned, ctx.plan)
            dx = (dx.float() * (scale * matrix_scale)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _grouped_weight_gradient(ctx, grad, x, key, signs).to(weight.dtype)
        return dx, dw, None, None, None, None, None


def _grouped_weight_gradient(
    ctx: Any, grad: Tensor, x: Tensor, key: Tensor, signs: Tensor
) -> Tensor:
    products = ctx.products
    (grad, x), plan = _apart((grad, x), ctx.plan, products.group)
    left, right = (_summed_rows(part, signs, products) for part in (grad, x))
    values, scale = rounded(left, products.gradient, _role(key, products, of_weight=True))
    others, other_scale = rounded(right, products.activation)
    dw = _weight_gradient(values.t().to(x.dtype), others.t().to(x.dtype), plan)
    return dw.float() * (scale * other_scale)
