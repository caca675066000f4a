"""Torch tensors as lazy arrays: rows are copied to the host block by block."""

import numpy as np
import torch

from sabia.core.model.ops import dtype_name
from sabia.core.model.ops_torch import host_array
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.model.storage.safetensors_file import numpy_dtype


def lazy(tensor: torch.Tensor) -> LazyArray:
    """A tensor as an array whose rows are copied to the host when they are read."""
    tensor = tensor.detach()

    def fetch(start: int, stop: int) -> np.ndarray:
        return host_array(tensor[start:stop] if tensor.dim() else tensor)

    return LazyArray(tuple(tensor.shape), numpy_dtype(dtype_name(tensor)), fetch)
