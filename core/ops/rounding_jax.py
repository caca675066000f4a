"""Low-precision products in JAX: custom gradients around `linear` and `grouped_matmul`.

With Q the rounding of a recipe, H the Hadamard transform along the summed rows, and dy rounded
stochastically if the recipe asks for it:
  y  = Q(x) · Q(w)ᵀ          dx = Q(dy) · Q(wᵀ)ᵀ          dw = Q(H dyᵀ) · Q(H xᵀ)ᵀ
x itself is saved for the backward pass, in its own dtype. The rows of each expert are padded to
whole tiles before the weight's gradient, so that no tile or transform mixes two experts.
Hardware units: `fp8` multiplies FP8 arrays, for which XLA uses the tensor cores of CUDA capability
≥ 8.9; `nvfp4` uses `jax.nn.scaled_matmul` on capability ≥ 10.0. Everything else is emulated: the
same values in the compute dtype, which holds them exactly, and scales of the tensor in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sabia.core.numerics.hadamard import SIZE
from sabia.core.numerics.hadamard import signs as hadamard_signs
from sabia.core.numerics.nearest_jax import fake, fake_nvfp4
from sabia.core.ops.experts_jax import DispatchPlan, biased
from sabia.core.ops.precision import MatmulRecipe, RoundedProducts, hash_words
from sabia.kernels.quantize.definitions import Layout
from sabia.kernels.quantize.interface import quantize
from sabia.kernels.quantize.jax_arithmetic import hadamard, mix, rounded

Array = jax.Array
WEIGHT_ROLE = 0x5BD1E995  # separates the random bits of the weight's gradient from the input's
_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.float4_e2m1fn}


class JaxRounding(RoundedProducts):
    """See RoundedProducts; `at` returns a new rule, whose clock may be traced."""

    biased = staticmethod(biased)
    _clock: Any = 0

    def at(self, step: Array, part: Array) -> JaxRounding:
        """The rule for that part of that step, both integers, traced or not."""
        step, part = (jnp.asarray(value).astype(jnp.uint32) for value in (step, part))
        rule = JaxRounding(self.precision, self.names, self.seed)
        rule._clock = mix(mix(step) + part * np.uint32(0x9E3779B9))
        return rule

    def fake_quantize(self, weights: list[Array]) -> list[Array]:
        """See RoundedProducts; straight-through: the gradient is that of the weight itself."""
        made = zip(weights, self.qat.rounded(weights, fake, fake_nvfp4), strict=True)
        # straight-through estimator: forward the rounded weight, backward the identity
        return [
            w - lax.stop_gradient(w) + lax.stop_gradient(rounded_weight.astype(w.dtype))
            for w, rounded_weight in made
        ]

    def product(self, name: str, x: Array, weight: Array) -> Array:
        """See RoundedProducts."""
        settings = _Settings(self.recipe, self.seed)
        out = _linear(settings, x.reshape(-1, x.shape[-1]), weight, self._key(name))
        return out.reshape(*x.shape[:-1], -1)

    def grouped_product(
        self, name: str, rows: Array, weight: Array, plan: DispatchPlan, multiply: object
    ) -> Array:
        """See RoundedProducts."""
        settings = _Settings(self.recipe, self.seed, multiply)
        return _grouped(settings, rows, weight, self._key(name), plan)

    def _key(self, name: str) -> Array:
        first, second = hash_words(self.seed, name)
        clock = jnp.asarray(self._clock, jnp.uint32)
        return jnp.stack([mix(clock ^ np.uint32(first)), jnp.uint32(second)])


@dataclass(frozen=True)
class _Settings:
    """What the gradients need and what never changes within a run."""

    recipe: MatmulRecipe
    seed: int
    multiply: Any = None

    def random_key(self, key: Array, of_weight: bool = False) -> Array | None:
        """The key of a gradient's random bits, None where it is rounded to nearest."""
        if not self.recipe.stochastic:
            return None
        return key ^ np.array([0, WEIGHT_ROLE], np.uint32) if of_weight else key

    def weight_gradient_operand(self, x: Array) -> Array:
        """xᵀ as an operand of the weight's gradient; if transformed, in float32."""
        if not self.recipe.hadamard:
            return x.T
        signs: Any = hadamard_signs(self.seed)
        return hadamard(jnp.pad(x.T, ((0, 0), (0, -len(x) % SIZE))), signs)


def describe_units(recipe: MatmulRecipe, device: jax.Device) -> str:
    """What computes the products on the device."""
    if not has_units(recipe.activation, device):
        reason = "" if device.platform == "cpu" else ", which has no units for it"
        return f"emulated on {device.platform}{reason}"
    unit = "FP8 dot_general" if recipe.activation.scale == "tensor" else "scaled_matmul"
    return f"jax {unit} on {device.device_kind} (products of experts emulated)"


def has_units(layout: Layout, device: jax.Device) -> bool:
    """Whether the device multiplies matrices of this layout itself."""
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return False
    try:
        capability = tuple(int(part) for part in str(device.compute_capability).split("."))
    except ValueError:  # ROCm gives the name of the chip here
        return False
    if layout.scale == "tensor":
        return capability >= (8, 9)
    return layout.scale == "e4m3" and capability >= (10, 0)


def product(
    a: Array,
    a_layout: Layout,
    b: Array,
    b_layout: Layout,
    dtype: Any,
    key: Array | None = None,
    units: bool | None = None,
) -> Array:
    """a[M, K] · b[N, K]ᵀ in `dtype`, each rounded to its layout; with a key, a stochastically.

    units: whether the chip multiplies the codes itself (None: where the device can).
    """
    if has_units(a_layout, jax.devices()[0]) if units is None else units:
        return product_by_units(a, a_layout, b, b_layout, dtype, key)
    values_a, scale_a = rounded(a, a_layout, key)
    values_b, scale_b = rounded(b, b_layout)
    out = _dot(values_a.astype(dtype), values_b.astype(dtype))
    return (out * (scale_a * scale_b)).astype(dtype)


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def product_by_units(
    a: Array, a_layout: Layout, b: Array, b_layout: Layout, dtype: object, key: Array | None = None
) -> Array:
    """`product` by the chip's own units."""
    left, right = quantize(a, a_layout, key), quantize(b, b_layout)
    scale = left.scale * right.scale
    if a_layout.scale == "tensor":
        out = _dot(_coded(left.codes, a_layout), _coded(right.codes, b_layout))
        return (out * scale).astype(dtype)
    rows, columns = len(a), len(b)
    sides = [_block_scaled(left, a_layout), _block_scaled(right, b_layout)]
    out = jax.nn.scaled_matmul(sides[0][0], sides[1][0], sides[0][1], sides[1][1])
    return (out[0, :rows, :columns] * scale).astype(dtype)


def _coded(codes: Array, layout: Layout) -> Array:
    return lax.bitcast_convert_type(codes, _DTYPES[layout.element])


def _block_scaled(matrix: Any, layout: Layout) -> tuple[Array, Array]:
    """(E2M1 [1, R, C], E4M3 scales [1, R, C/16]), zero-padded to multiples of 128."""
    rows, columns = matrix.codes.shape
    # tiles of several rows: every row gets the scale of its tile
    tiles = jnp.repeat(matrix.tiles, layout.tile[0], 0)[:rows] if layout.tile else matrix.tiles
    down, across = -rows % 128, -columns % 128
    codes = jnp.pad(matrix.codes, ((0, down), (0, across)))
    tiles = jnp.pad(tiles, ((0, down), (0, codes.shape[1] // 16 - tiles.shape[1])))
    elements = lax.bitcast_convert_type(codes.astype(jnp.uint4), jnp.float4_e2m1fn)
    return elements[None], lax.bitcast_convert_type(tiles, jnp.float8_e4m3fn)[None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(settings: _Settings, x: Array, weight: Array, key: Array) -> Array:
    return product(x, settings.recipe.activation, weight, settings.recipe.weight, x.dtype)


def _linear_forward(settings: _Settings, x: Array, weight: Array, key: Array) -> tuple[Array, Any]:
    return _linear(settings, x, weight, key), (x, weight, key)


def _linear_backward(settings: _Settings, saved: Any, grad: Array) -> tuple[Array, Array, Any]:
    x, weight, key = saved
    recipe = settings.recipe
    layouts = recipe.gradient, weight.T, recipe.weight
    # dx = Q(dy) Q(wᵀ)ᵀ
    dx = product(grad, *layouts, x.dtype, settings.random_key(key))
    # dw = Q(H dyᵀ) Q(H xᵀ)ᵀ
    left, right = settings.weight_gradient_operand(grad), settings.weight_gradient_operand(x)
    layouts = recipe.gradient, right, recipe.activation
    dw = product(left, *layouts, x.dtype, settings.random_key(key, of_weight=True))
    return dx, dw.astype(weight.dtype), _no_gradient(key)


_linear.defvjp(_linear_forward, _linear_backward)


def _no_gradient(tree: object) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(jnp.shape(leaf), jax.dtypes.float0), tree)


def _rounded_stack(weight: Array, recipe: MatmulRecipe) -> tuple[Array, Array]:
    """Values [E, out, in] and the scale of a stack of matrices; no tile spans two of them."""
    height = recipe.weight.tile[0] if recipe.weight.tile else 1
    count, rows, columns = weight.shape
    # zero rows, so that each matrix ends with a whole tile
    filled = jnp.pad(weight, ((0, 0), (0, -rows % height), (0, 0)))
    values, scale = rounded(filled.reshape(-1, columns), recipe.weight)
    return values.reshape(count, -1, columns)[:, :rows], scale


def _aligned_groups(x: Array, plan: DispatchPlan, group: int) -> tuple[Array, Any]:
    """The rows, those of each expert zero-padded to a multiple of `group`, and their plan."""
    padded = (plan.counts + group - 1) // group * group  # [E] rows of each expert after padding
    # [E] by how much the rows of an expert move
    moved = (jnp.cumsum(padded) - padded) - (jnp.cumsum(plan.counts) - plan.counts)
    index = jnp.arange(len(x)) + moved[plan.experts]  # [M] new index of each row
    total = -(-len(x) // group) * group + len(padded) * group  # static upper bound
    spread = jnp.zeros((total, x.shape[1]), x.dtype).at[index].set(x)
    rest = total - padded.sum()  # rows of zeros, given to the last expert
    return spread, plan._replace(counts=padded.at[-1].add(rest))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(settings: _Settings, x: Array, weight: Array, key: Array, plan: DispatchPlan) -> Array:
    values, scale = rounded(x, settings.recipe.activation)  # [M, in], scalar
    matrices, matrix_scale = _rounded_stack(weight, settings.recipe)  # [E, out, in], scalar
    # y = Q(x) Q(w)ᵀ, row by row with the matrix of its expert
    out = settings.multiply(values.astype(x.dtype), matrices.astype(x.dtype), plan)
    return (out.astype(jnp.float32) * (scale * matrix_scale)).astype(x.dtype)


def _grouped_forward(
    settings: _Settings, x: Array, weight: Array, key: Array, plan: DispatchPlan
) -> tuple[Array, Any]:
    return _grouped(settings, x, weight, key, plan), (x, weight, key, plan)


def _grouped_backward(settings: _Settings, saved: Any, grad: Array) -> tuple[Any, ...]:
    x, weight, key, plan = saved
    values, scale = rounded(grad, settings.recipe.gradient, settings.random_key(key))
    matrices, matrix_scale = _rounded_stack(weight, settings.recipe)
    transposed = matrices.swapaxes(1, 2).astype(x.dtype)  # [E, in, out]
    # dx = Q(dy) Q(wᵀ)ᵀ
    dx = settings.multiply(values.astype(x.dtype), transposed, plan).astype(jnp.float32)
    dx = (dx * (scale * matrix_scale)).astype(x.dtype)
    dw = _grouped_weight_gradient(settings, x, weight, key, plan, grad).astype(weight.dtype)
    return dx, dw, _no_gradient(key), _no_gradient(plan)


def _grouped_weight_gradient(
    settings: _Settings, x: Array, weight: Array, key: Array, plan: DispatchPlan, grad: Array
) -> Array:
    recipe = settings.recipe
    x_rows, padded_plan = _aligned_groups(x, plan, recipe.group)  # [M', in]
    dy_rows, _ = _aligned_groups(grad, plan, recipe.group)  # [M', out]
    left = settings.weight_gradient_operand(dy_rows)  # H dyᵀ [out, M']
    right = settings.weight_gradient_operand(x_rows)  # H xᵀ [in, M']
    values, scale = rounded(left, recipe.gradient, settings.random_key(key, of_weight=True))
    others, other_scale = rounded(right, recipe.activation)
    others = others.T.astype(x.dtype)  # [M', in]

    def multiply(matrices: Array) -> Array:
        return settings.multiply(others, matrices, padded_plan)

    # the product is linear in the matrices: its transpose, applied to dy, is their gradient
    transpose = jax.linear_transpose(multiply, jax.ShapeDtypeStruct(weight.shape, x.dtype))
    (dw,) = transpose(values.T.astype(x.dtype))  # [E, out, in]
    return dw.astype(jnp.float32) * (scale * other_scale)


_grouped.defvjp(_grouped_forward, _grouped_backward)
