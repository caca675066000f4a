"""Low-precision products in JAX: custom gradients around `linear` and `grouped_matmul`.

With Q the rounding of a recipe, H the Hadamard transform along the summed rows, and dy rounded
stochastically where the recipe says so:
  y  = Q(x) · Q(w)ᵀ          dx = Q(dy) · Q(wᵀ)ᵀ          dw = Q(H dyᵀ) · Q(H xᵀ)ᵀ
x itself is kept for the backward pass, in its own dtype. For experts the rows of each are moved
apart to whole tiles before their gradients are summed, so that no tile or transform mixes two.
Units: `fp8` multiplies FP8 arrays, which XLA gives to the units of CUDA capability ≥ 8.9; `nvfp4`
uses `jax.nn.scaled_matmul` on capability ≥ 10.0. Everything else is emulated: the same values in
the compute dtype, which holds them exactly, scales of the whole applied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sabia.core.model.precision import LowOps, Products, Served, words
from sabia.core.numerics.hadamard import SIZE
from sabia.core.numerics.hadamard import signs as hadamard_signs
from sabia.core.numerics.integers_jax import fake
from sabia.kernels.quantize.interface import NVFP4, Layout, quantize
from sabia.kernels.quantize.jax_impl import hadamard, mix, rounded

Array = jax.Array
WEIGHT_ROLE = 0x5BD1E995  # tells the draws of the weight's gradient from the input's
_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.float4_e2m1fn}


class JaxLowOps(LowOps):
    """See `precision.wrap`; `at` gives a new one, its clock may be traced."""

    clock: Any = 0

    def at(self, step: Any, part: Any = 0) -> JaxLowOps:
        """The operations of that part of that step; integers, traced or not."""
        step, part = (jnp.asarray(value).astype(jnp.uint32) for value in (step, part))
        found = JaxLowOps(self.base, self.precision, self.low, self.seed)
        found.clock = mix(mix(step) + part * np.uint32(0x9E3779B9))
        return found

    def served(self, weight: Array) -> Array:
        """See LowOps; the gradient as if it were the weight."""
        seen = _as_served(weight, self.format).astype(weight.dtype)
        return weight - lax.stop_gradient(weight) + lax.stop_gradient(seen)

    def product(self, name: str, x: Array, weight: Array) -> Array:
        """See LowOps."""
        how = _How(self.products, self.seed)
        out = _linear(how, x.reshape(-1, x.shape[-1]), weight, self._key(name))
        return out.reshape(*x.shape[:-1], -1)

    def grouped_product(self, name: str, rows: Array, weight: Array, plan: Any) -> Array:
        """See LowOps."""
        how = _How(self.products, self.seed, self.base.grouped_matmul)
        return _grouped(how, rows, weight, self._key(name), plan)

    def _key(self, name: str) -> Array:
        first, second = words(self.seed, name)
        clock = jnp.asarray(self.clock, jnp.uint32)
        return jnp.stack([mix(clock ^ np.uint32(first)), jnp.uint32(second)])


@dataclass(frozen=True)
class _How:
    """What the gradients need and never changes within a run."""

    products: Products
    seed: int
    multiply: Any = None

    def draws(self, key: Array, of_weight: bool = False) -> Array | None:
        """The key of a gradient's draws, None where it is rounded to nearest."""
        if not self.products.stochastic:
            return None
        return key ^ np.array([0, WEIGHT_ROLE], np.uint32) if of_weight else key

    def summed_rows(self, x: Array) -> Array:
        """xᵀ as an operand of the weight's gradient; behind the transform in float32."""
        if not self.products.hadamard:
            return x.T
        signs: Any = hadamard_signs(self.seed)
        return hadamard(jnp.pad(x.T, ((0, 0), (0, -len(x) % SIZE))), signs)


def _as_served(weight: Array, served: Served) -> Array:
    if served.kind != "nvfp4":
        return fake(weight, int(served.kind.removeprefix("int")), served.group)
    if weight.ndim == 3:
        return jax.vmap(lambda matrix: _as_served(matrix, served))(weight)
    values, scale = rounded(weight, NVFP4)
    return values * scale


def describe(products: Products, device: Any) -> str:
    """What computes on the device, in words."""
    if not has_units(products.activation, device):
        reason = "" if device.platform == "cpu" else ", which has no units for it"
        return f"emulated on {device.platform}{reason}"
    unit = "FP8 dot_general" if products.activation.scale == "tensor" else "scaled_matmul"
    return f"jax {unit} on {device.device_kind} (products of experts emulated)"


def has_units(layout: Layout, device: Any) -> bool:
    """Whether the device multiplies matrices of this layout itself."""
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return False
    try:
        capability = tuple(int(part) for part in str(device.compute_capability).split("."))
    except ValueError:  # ROCm names its chips here
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
    """a[M, K] · b[N, K]ᵀ in `dtype`, each rounded in its layout, a stochastically with a key.

    units: whether the chip multiplies the codes; None asks the device.
    """
    if has_units(a_layout, jax.devices()[0]) if units is None else units:
        return multiplied(a, a_layout, b, b_layout, dtype, key)
    values_a, scale_a = rounded(a, a_layout, key)
    values_b, scale_b = rounded(b, b_layout)
    out = _dot(values_a.astype(dtype), values_b.astype(dtype))
    return (out * (scale_a * scale_b)).astype(dtype)


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def multiplied(
    a: Array, a_layout: Layout, b: Array, b_layout: Layout, dtype: Any, key: Array | None = None
) -> Array:
    """`product` of codes, by the chip."""
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


def _block_scaled(found: Any, layout: Layout) -> tuple[Array, Array]:
    """(E2M1 [1, R, C], E4M3 scales [1, R, C/16]), filled up with zeros to multiples of 128."""
    rows, columns = found.codes.shape
    tiles = jnp.repeat(found.tiles, layout.tile[0], 0)[:rows] if layout.tile else found.tiles
    down, across = -rows % 128, -columns % 128
    codes = jnp.pad(found.codes, ((0, down), (0, across)))
    tiles = jnp.pad(tiles, ((0, down), (0, codes.shape[1] // 16 - tiles.shape[1])))
    elements = lax.bitcast_convert_type(codes.astype(jnp.uint4), jnp.float4_e2m1fn)
    return elements[None], lax.bitcast_convert_type(tiles, jnp.float8_e4m3fn)[None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(how: _How, x: Array, weight: Array, key: Array) -> Array:
    return product(x, how.products.activation, weight, how.products.weight, x.dtype)


def _linear_forward(how: _How, x: Array, weight: Array, key: Array) -> tuple[Array, Any]:
    return _linear(how, x, weight, key), (x, weight, key)


def _linear_backward(how: _How, kept: Any, grad: Array) -> tuple[Array, Array, Any]:
    x, weight, key = kept
    products = how.products
    layouts = products.gradient, weight.T, products.weight
    dx = product(grad, *layouts, x.dtype, how.draws(key))
    left, right = how.summed_rows(grad), how.summed_rows(x)
    layouts = products.gradient, right, products.activation
    dw = product(left, *layouts, x.dtype, how.draws(key, of_weight=True))
    return dx, dw.astype(weight.dtype), _no_gradient(key)


_linear.defvjp(_linear_forward, _linear_backward)


def _no_gradient(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(jnp.shape(leaf), jax.dtypes.float0), tree)


def _rounded_stack(weight: Array, products: Products) -> tuple[Array, Array]:
    """Values [E, out, in] and the scale of a stack of matrices; no tile spans two of them."""
    height = products.weight.tile[0] if products.weight.tile else 1
    count, rows, columns = weight.shape
    filled = jnp.pad(weight, ((0, 0), (0, -rows % height), (0, 0)))
    values, scale = rounded(filled.reshape(-1, columns), products.weight)
    return values.reshape(count, -1, columns)[:, :rows], scale


def _apart(x: Array, plan: Any, group: int) -> tuple[Array, Any]:
    """Rows with each expert's beginning at a multiple of `group`, zeros between; their plan."""
    room = (plan.counts + group - 1) // group * group
    moved = (jnp.cumsum(room) - room) - (jnp.cumsum(plan.counts) - plan.counts)
    index = jnp.arange(len(x)) + moved[plan.experts]
    total = -(-len(x) // group) * group + len(room) * group
    found = jnp.zeros((total, x.shape[1]), x.dtype).at[index].set(x)
    rest = total - room.sum()
    return found, plan._replace(counts=room.at[-1].add(rest))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(how: _How, x: Array, weight: Array, key: Array, plan: Any) -> Array:
    values, scale = rounded(x, how.products.activation)
    matrices, matrix_scale = _rounded_stack(weight, how.products)
    out = how.multiply(values.astype(x.dtype), matrices.astype(x.dtype), plan)
    return (out.astype(jnp.float32) * (scale * matrix_scale)).astype(x.dtype)


def _grouped_forward(
    how: _How, x: Array, weight: Array, key: Array, plan: Any
) -> tuple[Array, Any]:
    return _grouped(how, x, weight, key, plan), (x, weight, key, plan)


def _grouped_backward(how: _How, kept: Any, grad: Array) -> tuple[Any, ...]:
    x, weight, key, plan = kept
    values, scale = rounded(grad, how.products.gradient, how.draws(key))
    matrices, matrix_scale = _rounded_stack(weight, how.products)
    turned = matrices.swapaxes(1, 2).astype(x.dtype)
    dx = how.multiply(values.astype(x.dtype), turned, plan).astype(jnp.float32)
    dx = (dx * (scale * matrix_scale)).astype(x.dtype)
    dw = _grouped_weight_gradient(how, x, weight, key, plan, grad).astype(weight.dtype)
    return dx, dw, _no_gradient(key), _no_gradient(plan)


def _grouped_weight_gradient(
    how: _How, x: Array, weight: Array, key: Array, plan: Any, grad: Array
) -> Array:
    spread, room = _apart(x, plan, how.products.group)
    left = how.summed_rows(_apart(grad, plan, how.products.group)[0])
    values, scale = rounded(left, how.products.gradient, how.draws(key, of_weight=True))
    others, other_scale = rounded(how.summed_rows(spread), how.products.activation)
    others = others.T.astype(x.dtype)
    stack = jax.ShapeDtypeStruct(weight.shape, x.dtype)
    transpose = jax.linear_transpose(lambda matrices: how.multiply(others, matrices, room), stack)
    (dw,) = transpose(values.T.astype(x.dtype))
    return dw.astype(jnp.float32) * (scale * other_scale)


_grouped.defvjp(_grouped_forward, _grouped_backward)
