"""Low-rank adapters of single rows of a batch, in JAX.

Which adapter a row has is an argument of compiled programs, and so are the matrices: those of all
adapters are stacked by matrix, filled up with zeros to one rank, and each row multiplies by its
own. Number 0 of a stack is zero.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sabia.core.ops.product import Multiply, Product
from sabia.core.ops.row_adapters import Adapter, RowAdapters

Array = jax.Array
# A[adapters + 1, rank, in] and alpha/rank · B[adapters + 1, out, rank] by matrix
Stacked = Mapping[str, tuple[Array, Array]]


class JaxRowAdapters(RowAdapters):
    """See RowAdapters; `bind` is called in each program before its products."""

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        super().__init__(adapters)
        names = {name for adapter in adapters.values() for name in adapter}
        self.stacked: Stacked = {name: self._stacked(name) for name in sorted(names)}
        self._bound: Any = None

    def _stacked(self, name: str) -> tuple[Array, Array]:
        pairs = [adapter.get(name) for adapter in self._adapters]
        given = [pair for pair in pairs if pair is not None]
        rank = max(len(a) for a, _ in given)
        a = jnp.zeros((len(pairs), rank, given[0][0].shape[1]), given[0][0].dtype)
        b = jnp.zeros((len(pairs), len(given[0][1]), rank), given[0][1].dtype)
        for number, pair in enumerate(pairs):
            if pair is not None:
                own = len(pair[0])
                a, b = a.at[number, :own].set(pair[0]), b.at[number, :, :own].set(pair[1])
        return a, b

    def bind(self, rows: Array, stacked: Stacked) -> None:
        """Use these numbers of adapters, one of each row, and these stacks."""
        self._bound = rows, stacked

    def apply(self, product: Product, proceed: Multiply) -> list[Array]:
        """See Rule.apply."""
        rows, stacked = self._bound
        results = [*proceed(product)]
        for i, matrix in enumerate(product.matrices):
            if matrix.name in stacked:
                a, b = (of_all[rows] for of_all in stacked[matrix.name])
                # the elements of x are in the order of the rows
                x = product.x.reshape(len(rows), -1, product.x.shape[-1])
                inner = jnp.einsum("bti,bri->btr", x, a, precision=jax.lax.Precision.HIGHEST)
                change = jnp.einsum("btr,bor->bto", inner, b, precision=jax.lax.Precision.HIGHEST)
                results[i] += change.reshape(results[i].shape)
        return results
