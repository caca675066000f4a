"""Tensors for sabia.kernels.row_products, and where these products are the faster ones."""

import torch

from sabia.kernels.runtime.torch_support import FEW_THREADS

Tensor = torch.Tensor
LEAST_BYTES = 1 << 19  # less is read from a cache of the processor


def reads_in_order(x: Tensor, nbytes: int) -> bool:
    """Whether this many bytes of numbers like x are read faster by these loops."""
    return nbytes >= LEAST_BYTES and serves(x)


def serves(x: Tensor) -> bool:
    """Whether numbers like x are read by these loops where there are many."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and torch.get_num_threads() <= FEW_THREADS
        and not torch.is_grad_enabled()
        and (torch.is_inference_mode_enabled() or not torch.compiler.is_compiling())
    )
