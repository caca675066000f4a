"""Implementations of quantization in torch: the plain arithmetic, and one kernel."""

import torch

from sabia.kernels.quantize.definitions import Layout, Quantized
from sabia.kernels.quantize.torch_arithmetic import quantize
from sabia.kernels.runtime.dispatch import Choice, Option, choose, reference_option, triton_obstacle

Tensor = torch.Tensor


def choose_quantize(x: Tensor, implementation: str | None) -> Choice:
    """See quantize.choose_quantize."""
    own = Option("triton", "scales and codes in one pass", triton_obstacle(x), automatic=x.is_cuda)
    return choose("quantize", [own, reference_option()], implementation)


def _triton(x: Tensor, layout: Layout, key: object = None) -> Quantized:
    from sabia.kernels.quantize.triton_impl import quantize as kernel

    return kernel(x, layout, key)


IMPLEMENTATIONS = {"reference": quantize, "triton": _triton}
