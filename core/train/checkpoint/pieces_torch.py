"""Torch tensors as arrays of pieces. Rows come to the host a block at a time, so a tensor on a GPU
needs no copy of itself there.
"""

from functools import partial

import numpy as np
import torch

from sabia.core.model.safetensors_file import numpy_dtype
from sabia.core.train.checkpoint.pieces import LazyArray

# dtypes that NumPy knows through ml_dtypes only: their bits travel as integers
_BITS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def lazy(tensor: torch.Tensor) -> LazyArray:
    """A tensor as an array whose rows come to the host when asked for."""
    kind = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    return LazyArray(tuple(tensor.shape), kind, partial(_fetch, tensor.detach(), kind))


def _fetch(tensor: torch.Tensor, kind: np.dtype, start: int, stop: int) -> np.ndarray:
    part = (tensor[start:stop] if tensor.dim() else tensor).cpu()
    bits = _BITS.get(part.dtype)
    if bits is None:
        return part.numpy()
    return part.contiguous().view(bits).numpy().view(kind)
