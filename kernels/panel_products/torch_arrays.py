"""Where sabia.kernels.panel_products computes the products of tensors."""

import torch

from sabia.kernels.runtime.torch_fp32 import HAS_AVX512

Tensor = torch.Tensor


def serves(x: Tensor) -> bool:
    """Whether rows like x are multiplied by matrices in panels: in one thread, with vectors of 16
    numbers, and without a gradient."""
    return (
        HAS_AVX512
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.get_num_threads() == 1
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
