"""Matrix products of a model, the chain of rules that each of them passes, checks of shapes.

A product multiplies one input by one or several named matrices. `core.parallel.build_ops` declares
the order of the rules: record, adapter, tensor parallel, precision; the last link is the backend's
kernel. A rule changes the product, asks the rest of the chain for the results (`proceed`), and
returns one array per matrix. A rule keeps nothing from one product to the next.

Shapes are checked by the names of their axes. The partitioner of a mesh gives every dimension a
logical name (`core.parallel.mesh`); a missing or wrong exchange between two layouts
leaves an array with a part of an axis where all of it is expected, or the other way round. The
checks find that where it begins, and name the axis.
"""

from collections.abc import Callable, Mapping, Sequence
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


Axes = tuple[str | None, ...]


class AxisMismatch(ValueError):
    """An array's shape contradicts the names of its axes: an error in a model or a mesh."""


def check_shared_axes(operation: str, **arrays: tuple[Any, str]) -> None:
    """Arrays whose axes have the same letter must have the same size there.

    arrays: name → (array or None, letters of its axes, such as "BTHN").
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, (array, letters) in arrays.items():
        if array is None:
            continue
        if len(array.shape) != len(letters):
            raise AxisMismatch(f"{operation}: {name}{list(array.shape)} (expected axes {letters})")
        for letter, size in zip(letters, array.shape, strict=True):
            expected, source = sizes.setdefault(letter, (size, name))
            if size != expected and 1 not in (size, expected):
                raise AxisMismatch(
                    f"{operation}: axis {letter} of {name} has {size} (expected {expected}, as in "
                    f"{source}): is an exchange between layouts missing?"
                )


def check_sizes(operation: str, x: Array, axes: Axes, sizes: Mapping[str, frozenset[int]]) -> None:
    """x must have one dimension per axis, of a size that `sizes` allows for its name."""
    if len(x.shape) != len(axes):
        raise AxisMismatch(f"{operation}: array{list(x.shape)} (expected axes {axes})")
    if not sizes:
        return
    by_head = "head_dim" in axes  # without it, heads and their dimensions are one flat axis
    for axis, size in zip(axes, x.shape, strict=True):
        allowed = sizes.get(axis or "") if by_head or "heads" not in (axis or "") else None
        if allowed is not None and size not in allowed:
            expected = " or ".join(map(str, sorted(allowed)))
            raise AxisMismatch(f"{operation}: axis {axis!r} has {size} elements of {list(x.shape)} "
                               f"{axes} (expected {expected})")  # fmt: skip


def check_product(name: str, x: Array, weight: Array) -> None:
    """The input x[..., in] of a product must have the width of weight[..., out, in]."""
    if x.shape[-1] != weight.shape[-1]:
        raise AxisMismatch(
            f"{name}: {x.shape[-1]} inputs for a weight{list(weight.shape)} (expected "
            f"{weight.shape[-1]}): is it split along another axis than its input?"
        )
