"""Torch tensors as lazy arrays: rows are copied to the host block by block."""

import numpy as np
import torch

from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.numerics.floats import numpy_dtype
from sabia.core.ops.base import dtype_name
from sabia.core.ops.device_torch import host_array


def lazy(tensor: torch.Tensor) -> LazyArray:
    """A tensor as an array whose rows are copied to the host when they are read."""
    tensor = tensor.detach()

    def fetch(start: int, stop: int) -> np.ndarray:
        return host_array(tensor[start:stop] if tensor.dim() else tensor)

    return LazyArray(tuple(tensor.shape), numpy_dtype(dtype_name(tensor)), fetch)
