"""Implementations of quantization in JAX: the plain arithmetic, and one kernel."""

import jax

from sabia.kernels.quantize.definitions import Layout, Quantized
from sabia.kernels.quantize.jax_arithmetic import quantize
from sabia.kernels.runtime.dispatch import Choice, Option, choose, pallas_interpret, pallas_obstacle

Array = jax.Array


def choose_quantize(x: Array, implementation: str | None) -> Choice:
    """See quantize.choose_quantize."""
    plain = Option("reference", "XLA fuses the plain expression with its neighbours")
    own = Option("pallas", "scales and codes in one pass", pallas_obstacle(), automatic=False)
    return choose("quantize", [plain, own], implementation)


def _pallas(x: Array, layout: Layout, key: object = None) -> Quantized:
    from sabia.kernels.quantize.pallas_impl import quantize as kernel

    return kernel(x, layout, key, interpret=pallas_interpret())


IMPLEMENTATIONS = {"reference": quantize, "pallas": _pallas}
