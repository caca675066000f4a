"""Torch tensors as arrays of pieces. Rows come to the host a block at a time, so a tensor on a GPU
needs no copy of itself there.
"""

import numpy as np
import torch

from sabia.core.model.ops import dtype_name
from sabia.core.model.ops_torch import host_array
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.model.storage.safetensors_file import numpy_dtype


def lazy(tensor: torch.Tensor) -> LazyArray:
    """A tensor as an array whose rows come to the host when asked for."""
    tensor = tensor.detach()

    def fetch(start: int, stop: int) -> np.ndarray:
        return host_array(tensor[start:stop] if tensor.dim() else tensor)

    return LazyArray(tuple(tensor.shape), numpy_dtype(dtype_name(tensor)), fetch)
