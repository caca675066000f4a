"""RMSNorm as Pallas kernels for TPU, the residual added on the way.

A step takes a block of rows with all their columns. dw is one block that stays on the core while
the steps of the backward pass add to it. Block sizes are untuned. Compiled for v5e with libtpu,
never run on a TPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sabia.kernels.runtime.dispatch import pallas_interpret

Array = jax.Array
BLOCK_ELEMENTS = 1 << 18


def _forward_kernel(x, residual, weight, y, h, inverse, *, eps, plus_one):
    value = x[...]
    if residual is not None:
        value = value + residual[...]
        h[...] = value
    wide = value.astype(jnp.float32)
    # [rows, 1]: 1 / sqrt(mean(h^2) + eps), arXiv 1910.07467, equation 4
    r = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    y[...] = (wide * r * (weight[...].astype(jnp.float32) + plus_one)).astype(y.dtype)  # y = h r W
    inverse[...] = r


def _backward_kernel(grad, grad_h, h, weight, inverse, dx, dw, *, plus_one):
    @pl.when(pl.program_id(0) == 0)
    def _begin() -> None:
        dw[...] = jnp.zeros_like(dw)

    g, r = grad[...].astype(jnp.float32), inverse[...]
    unit = h[...].astype(jnp.float32) * r  # u = h r: [rows, D]
    dw[...] += jnp.sum(g * unit, 0, keepdims=True)  # [1, D]: the sum over rows of g u
    scaled = g * (weight[...].astype(jnp.float32) + plus_one)  # g W
    # dh = r (g W - u mean(g W u))
    d = r * (scaled - unit * jnp.mean(scaled * unit, -1, keepdims=True))
    if grad_h is not None:
        d = d + grad_h[...].astype(jnp.float32)
    dx[...] = d.astype(dx.dtype)


def _block(columns: int) -> int:
    """Rows of a block: a multiple of 16, the rows of a bfloat16 tile."""
    return max(16, min(256, BLOCK_ELEMENTS // columns) // 16 * 16)


def _call(
    kernel: Callable[..., None], inputs: dict[str, Any], outputs: dict[str, Any]
) -> list[Array]:
    """Run over blocks of rows; [1, D] arrays are whole in every step, None ones are left out."""
    rows, columns = inputs["h"].shape
    block = _block(columns)
    names = [n for n, x in inputs.items() if x is not None]
    made = [n for n, x in outputs.items() if x is not None]

    def spec(x: jax.Array) -> pl.BlockSpec:
        if x.shape[0] == 1 and rows != 1:
            return pl.BlockSpec(x.shape, lambda i: (0, 0))
        return pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))

    def run(*refs: object) -> None:
        given = dict(zip([*names, *made], refs, strict=True))
        kernel(*(given.get(n) for n in [*inputs, *outputs]))

    return pl.pallas_call(
        run,
        grid=(rows // block,),
        in_specs=[spec(inputs[n]) for n in names],
        out_specs=[spec(outputs[n]) for n in made],
        out_shape=[outputs[n] for n in made],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=pallas_interpret(),
    )(*(inputs[n] for n in names))


def _shape(x: Array, columns: int | None = None, dtype: object = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], columns or x.shape[1]), dtype or x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _norm(x, weight, residual, eps, plus_one):
    return _norm_forward(x, weight, residual, eps, plus_one)[0]


def _norm_forward(x, weight, residual, eps, plus_one):
    added = None if residual is None else _shape(x)
    results = _call(
        functools.partial(_forward_kernel, eps=eps, plus_one=plus_one),
        {"h": x, "residual": residual, "weight": weight[None]},
        {"y": _shape(x), "sum": added, "inverse": _shape(x, 1, jnp.float32)},
    )
    h = x if residual is None else results[1]
    return (results[0], None if residual is None else h), (h, weight, residual, results[-1])


def _norm_backward(eps, plus_one, saved, grads):
    h, weight, residual, inverse = saved
    dx, dw = _call(
        functools.partial(_backward_kernel, plus_one=plus_one),
        {"grad": grads[0], "grad_h": grads[1], "h": h, "weight": weight[None], "inverse": inverse},
        {"dx": _shape(h), "dw": jax.ShapeDtypeStruct((1, h.shape[1]), jnp.float32)},
    )
    return dx, dw[0].astype(weight.dtype), None if residual is None else dx


_norm.defvjp(_norm_forward, _norm_backward)


def rms_norm(x: Array, weight: Array, eps: float, residual: Array | None, plus_one: bool) -> Any:
    """See sabia.kernels.rms_norm.interface.rms_norm."""
    columns = x.shape[-1]
    count = x.size // columns
    spare = -count % _block(columns)

    def flat(a: Array) -> Array:
        return jnp.pad(a.astype(x.dtype).reshape(count, columns), ((0, spare), (0, 0)))

    other = None if residual is None else flat(residual)
    y, h = _norm(flat(x), weight, other, eps, plus_one)
    y = y[:count].reshape(x.shape)
    return y if residual is None else (y, h[:count].reshape(x.shape))
