"""Pieces of JAX arrays: this process's shards, each of which one process alone writes.

A shard that several devices hold is written by its replica 0. A host copy of a device array stays
with the array as long as it lives (`np.asarray` keeps it), which for a whole state would be the
state once more in host memory; so what is not on a CPU is sliced on its device first, by one
compiled slice a shape, and the slice goes when its bytes are written.
"""

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from numpy.typing import DTypeLike

from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.train.checkpoint.pieces import Piece


def jax_pieces(name: str, array: jax.Array, dtype: DTypeLike | None = None) -> Iterator[Piece]:
    """The pieces of an array that this process writes, cast to `dtype` where it is given."""
    kind = np.dtype(dtype or array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            offset = tuple(cut.start or 0 for cut in shard.index)
            lazy = LazyArray(shard.data.shape, kind, partial(_fetch, shard.data, kind))
            yield Piece(name, lazy, offset, array.shape)


def _fetch(data: jax.Array, kind: np.dtype, start: int, stop: int) -> np.ndarray:
    if next(iter(data.devices())).platform == "cpu":
        host = np.asarray(data)  # shares the array's memory
        return (host[start:stop] if host.ndim else host).astype(kind, copy=False)
    return np.asarray(_rows(data, start, stop - start)).astype(kind, copy=False)


@partial(jax.jit, static_argnums=2)
def _rows(data: jax.Array, start: int, count: int) -> jax.Array:
    """A new array of some rows; of all of it where it has no axes."""
    if not data.ndim:
        return data + 0
    return jax.lax.dynamic_slice_in_dim(data, start, count)
