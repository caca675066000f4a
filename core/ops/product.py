"""Matrix products of a model, and the chain of rules that each of them passes.

A product multiplies one input by one or several named matrices. `core.parallel.build_ops` declares
the order of the rules: record, adapter, tensor parallel, precision; the last link is the backend's
kernel. A rule changes the product, asks the rest of the chain for the results (`proceed`), and
returns one array per matrix. A rule keeps nothing from one product to the next.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

Array = Any
A, B = ".lora_a", ".lora_b"  # ends of the names of an adapter's matrices


class Matrix(NamedTuple):
    """weight[out, in], of experts [E, out, in], its bias[out] or [E, out], and its name in
    `ModelSpec.tensors()`; adapter: the matrices A[rank, in] and B[out, rank] of a LoRA."""

    name: str
    weight: Array
    bias: Array | None = None
    adapter: "tuple[Matrix, Matrix] | None" = None


class Product(NamedTuple):
    """x · weightᵀ + bias for each matrix; x[..., in] or, with the plan of a dispatch, rows[M, in]
    sorted by expert."""

    x: Array
    matrices: tuple[Matrix, ...]
    plan: Any = None


Multiply = Callable[[Product], list[Array]]


class Rule(Protocol):
    """One link of the chain."""

    def apply(self, product: Product, proceed: Multiply) -> list[Array]:
        """The results of a product; `proceed` computes those of the rest of the chain."""

    def at(self, step: Array, part: Array) -> "Rule":
        """The rule for a part of a step; differs where random bits do."""
        return self


def chained(rules: Sequence[Rule], kernel: Multiply) -> Multiply:
    """The function of all rules in their order, then the kernel."""
    for rule in reversed(rules):
        kernel = partial(rule.apply, proceed=kernel)
    return kernel


class Recorder(Rule):
    """Keeps the result of each product by the name of its matrix: activations, for bisecting."""

    def __init__(self) -> None:
        self.outputs: dict[str, Array] = {}

    def apply(self, product: Product, proceed: Multiply) -> list[Array]:
        """See Rule.apply."""
        results = proceed(product)
        names = (matrix.name for matrix in product.matrices)
        self.outputs.update(zip(names, results, strict=True))
        return results


class LowRankAdapter(Rule):
    """Adds alpha/rank · (x Aᵀ) Bᵀ to the products of matrices that have an adapter."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self, product: Product, proceed: Multiply) -> list[Array]:
        """See Rule.apply."""
        if all(matrix.adapter is None for matrix in product.matrices):
            return proceed(product)
        results = []
        for matrix in product.matrices:
            (y,) = proceed(product._replace(matrices=(matrix,)))
            if matrix.adapter is not None:
                a, b = matrix.adapter
                (inner,) = proceed(Product(product.x, (a,)))  # [..., rank]
                (change,) = proceed(Product(self.scale * inner, (b,)))
                y = y + change
            results.append(y)
        return results
