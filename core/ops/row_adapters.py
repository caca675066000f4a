"""Low-rank adapters of single rows of a batch: each request of a server chooses its own.

In torch the change of an adapter is computed for its rows only, from inputs that are not rounded;
all rows share the products of the model (as in S-LoRA, arXiv 2311.03285).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.ops.base import Ops
from sabia.core.ops.product import A, Array, B, Matrix, Multiply, Product, Rule

Adapter = Mapping[str, tuple[Array, Array]]  # A[rank, in] and alpha/rank · B[out, rank] by matrix


class RowAdapters(Rule):
    """Adds (x Aᵀ) Bᵀ to the products of the rows that have an adapter.

    `rows` is set before each pass: the number of the adapter of each row of the batch, 0 for none.
    """

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        self.names = ("", *adapters)
        self._adapters: Sequence[Adapter] = ({}, *adapters.values())
        self.rows = np.zeros(0, np.int64)

    def number(self, name: str) -> int:
        """The number of an adapter, 0 of ''; raises UsageError for an unknown name."""
        if name not in self.names:
            known = ", ".join(self.names[1:])
            raise UsageError(f"generate: adapter {name} is not loaded (expected one of {known})")
        return self.names.index(name)

    def apply(self, product: Product, proceed: Multiply) -> list[Array]:
        """See Rule.apply."""
        results = [*proceed(product)]
        for number in np.unique(self.rows[self.rows > 0]).tolist():
            adapter = self._adapters[number]
            for i, matrix in enumerate(product.matrices):
                if matrix.name in adapter:
                    pair = zip((A, B), adapter[matrix.name], strict=True)
                    a, b = (Matrix(matrix.name + end, x.to(product.x.device)) for end, x in pair)
                    results[i] = self._changed(results[i], product.x, number, a, b, proceed)
        return results

    def _changed(
        self, y: Array, x: Array, number: int, a: Matrix, b: Matrix, proceed: Multiply
    ) -> Array:
        """The results y of inputs x, whose elements are in the order of the rows, with the change
        of the rows that have this adapter."""
        at = np.flatnonzero(self.rows == number)
        by_row = x.reshape(len(self.rows), -1, x.shape[-1])
        (inner,) = proceed(Product(by_row[at], (a,)))
        (change,) = proceed(Product(inner, (b,)))
        changed = y.reshape(len(self.rows), -1, y.shape[-1]).clone()
        changed[at] += change
        return changed.reshape(y.shape)


def row_adapters(ops: Ops) -> RowAdapters | None:
    """The rule of a chain; None if it has none."""
    return next((rule for rule in ops.rules if isinstance(rule, RowAdapters)), None)


def adapters_of(ops: Ops, names: Sequence[str]) -> np.ndarray:
    """The numbers of adapters by name; raises UsageError for unknown ones."""
    rule = row_adapters(ops)
    if rule is None and any(names):
        raise UsageError(f"generate: adapter {max(names)} is not loaded (there are none)")
    return np.array([rule.number(name) if rule else 0 for name in names], np.int64)
