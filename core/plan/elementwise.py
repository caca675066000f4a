"""`max`, `min`, `if` and `ceil` for numbers and for NumPy arrays.

Every formula of the planner is written once. Its arguments are numbers for one layout, and NumPy
arrays (one entry per candidate) in a search. Arithmetic works on both; these functions replace what
does not. NumPy is imported only for arrays.
"""

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

# a number, or a NumPy array with one entry per candidate
Number = Any


def _numpy(*values: Number) -> Any:
    """NumPy where one of the values is an array, else None."""
    if not any(hasattr(value, "shape") for value in values):
        return None
    import numpy as np

    return np


def larger(a: Number, b: Number) -> Number:
    """The larger value of each pair."""
    np = _numpy(a, b)
    return np.maximum(a, b) if np else max(a, b)


def largest(values: Iterable[Number]) -> Number:
    """The largest of some values above 0; 0 of none."""
    return reduce(larger, values, 0)


def smaller(a: Number, b: Number) -> Number:
    """The smaller value of each pair."""
    np = _numpy(a, b)
    return np.minimum(a, b) if np else min(a, b)


def choose(condition: Number, yes: Number, no: Number) -> Number:
    """`yes` where the condition holds, else `no`; both are evaluated."""
    np = _numpy(condition, yes, no)
    return np.where(condition, yes, no) if np else yes if condition else no


def rounded_up(value: Number) -> Number:
    """The value rounded up, with a tolerance for the last bits of a division."""
    lowered = value * (1 - 1e-12)
    return (_numpy(lowered) or math).ceil(lowered)


def logarithm(value: Number) -> Number:
    """The natural logarithm."""
    return (_numpy(value) or math).log(value)
