"""Checks of array shapes by the names of their axes, whose failures name the axis.

The partitioner of a mesh gives every dimension a logical name (`core.parallel.sharding_rules`); a
missing or wrong exchange between two layouts leaves an array with a part of an axis where all of it
is expected, or the other way round. These checks find that where it begins.
"""

from collections.abc import Mapping
from typing import Any

from sabia.core.ops.product import Array

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
