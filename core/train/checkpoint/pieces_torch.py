"""Pieces of torch tensors: plain ones, and DTensors of which this process has a shard.

A DTensor's shard is written by the first of the processes that hold the same one. Rows come to
the host a block at a time, so a tensor on a GPU needs no copy of itself there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from sabia.core.model.safetensors_file import numpy_dtype
from sabia.core.train.checkpoint.pieces import LazyArray, Piece

# dtypes that NumPy knows through ml_dtypes only: their bits travel as integers
_BITS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def torch_pieces(name: str, tensor: torch.Tensor, writes: bool = True) -> Iterator[Piece]:
    """The pieces of a tensor that this process writes.

    writes: for a plain tensor, which every process may hold, whether this one writes it.
    """
    if hasattr(tensor, "placements"):
        yield from _shard(name, tensor)
    elif writes:
        yield Piece(name, lazy(tensor))


def _shard(name: str, tensor: Any) -> Iterator[Piece]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    place = (tensor.shape, tensor.device_mesh, tensor.placements)
    shape, offset = compute_local_shape_and_global_offset(*place)
    position = tensor.device_mesh.get_coordinate()
    if position is None or 0 in shape:
        return
    copies = zip(position, tensor.placements, strict=True)
    if any(number for number, placement in copies if not placement.is_shard()):
        return
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{name}: a partial sum is no state (expected shards or replicas)")
    yield Piece(name, lazy(tensor.to_local()), tuple(offset), tuple(tensor.shape))


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
