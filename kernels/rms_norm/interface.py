"""RMSNorm with the residual addition before it in one pass: definition and implementations.

With h = x + residual (rounded to x's dtype; x itself without one) and r = 1 / sqrt(mean(h²) + eps)
over the last axis, y = h · r · w, or h · r · (1 + w) in the families that store w - 1 (Gemma,
Qwen3-Next); fp32 throughout, rounded once. Gradients, with u = h · r and W the factor:
    dh = r · (g·W - u · mean(g·W·u)) + the gradient of h itself,    dw = Σ over rows of g · u
(arXiv 1910.07467). dx and the residual's gradient are both dh.

Order of choice
    torch, compiling    reference: the compiler fuses it with its neighbours.
    torch on CUDA       library (`torch.nn.functional.rms_norm`, fused both ways) where there is no
                        residual and one dtype; else the Triton kernel.
    torch on CPU        eager: a gradient by hand; else reference.
    JAX                 reference: XLA fuses it with its neighbours. pallas by name, on TPU.
"""

from typing import Any

from sabia.kernels.runtime.dispatch import Choice, framework

Array = Any


def _library_module(x: Array) -> Any:
    if framework(x) == "torch":
        from sabia.kernels.rms_norm import torch_impl

        return torch_impl
    from sabia.kernels.rms_norm import jax_impl

    return jax_impl


def choose_rms_norm(
    x: Array, weight: Array, *, residual: Array | None = None, implementation: str | None = None
) -> Choice:
    """The implementation that `rms_norm` uses for these arguments, and the reason."""
    return _library_module(x).choose_rms_norm(x, weight, residual, implementation)


def rms_norm(
    x: Array,
    weight: Array,
    eps: float,
    *,
    residual: Array | None = None,
    plus_one: bool = False,
    implementation: str | None = None,
) -> Any:
    """x[..., D], weight[D] → y[..., D]; with a residual[..., D] → (y, x + residual).

    `plus_one`: the factor is 1 + weight. Differentiable in x, residual and weight. Raises
    ValueError for shapes that do not fit, dispatch.Unavailable if the named implementation
    is unavailable.
    """
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        shapes = [tuple(a.shape) for a in (x, weight, residual) if a is not None]
        raise ValueError(f"rms_norm: {shapes} (expected [..., D], [D] and perhaps [..., D])")
    module = _library_module(x)
    name = module.choose_rms_norm(x, weight, residual, implementation).implementation
    return module.IMPLEMENTATIONS[name](x, weight, eps, residual, plus_one)
