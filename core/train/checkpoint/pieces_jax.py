"""Pieces of JAX arrays: the shards that this process writes.

A shard on several devices is written by its replica 0. `np.asarray` caches a host copy in the
device array as long as the array exists, which would need host memory for the whole state; so
arrays on accelerators are first sliced on the device (one compiled function per shape), and the
slice is freed when its bytes are written.
"""

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from numpy.typing import DTypeLike

from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.train.checkpoint.pieces import Piece


def jax_pieces(name: str, array: jax.Array, dtype: DTypeLike | None = None) -> Iterator[Piece]:
    """The pieces of an array that this process writes, cast to `dtype` if given."""
    numpy_dtype = np.dtype(dtype or array.dtype)
    for shard in array.addressable_shards:
        # each shard is written once, by its first device
        if shard.replica_id == 0:
            offset = tuple(cut.start or 0 for cut in shard.index)
            fetch = partial(_fetch, shard.data, numpy_dtype)
            lazy = LazyArray(shard.data.shape, numpy_dtype, fetch)
            yield Piece(name, lazy, offset, array.shape)


def _fetch(data: jax.Array, numpy_dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    if next(iter(data.devices())).platform == "cpu":
        host = np.asarray(data)  # a view of the array's memory
        return (host[start:stop] if host.ndim else host).astype(numpy_dtype, copy=False)
    return np.asarray(_rows(data, start, stop - start)).astype(numpy_dtype, copy=False)


@partial(jax.jit, static_argnums=2)
def _rows(data: jax.Array, start: int, count: int) -> jax.Array:
    """A copy of some rows; of the whole array if it has no axes."""
    if not data.ndim:
        return data + 0
    return jax.lax.dynamic_slice_in_dim(data, start, count)
