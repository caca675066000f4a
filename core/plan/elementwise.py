"""The few operations by which a formula serves one layout and a hundred thousand alike.

Every formula of the planner is written once. Its arguments are numbers when one layout is asked
about, NumPy arrays (one entry a candidate) in a search; arithmetic works on both, and these
functions replace `max`, `min`, `if` and `ceil`. NumPy is imported only where an array came in.
"""

import math
from typing import Any

# a number, or a NumPy array with one entry a candidate
Number = Any


def _some_array(*values: Number) -> bool:
    return any(hasattr(value, "shape") for value in values)


def larger(a: Number, b: Number) -> Number:
    """The larger of each pair."""
    if _some_array(a, b):
        import numpy as np

        return np.maximum(a, b)
    return max(a, b)


def smaller(a: Number, b: Number) -> Number:
    """The smaller of each pair."""
    if _some_array(a, b):
        import numpy as np

        return np.minimum(a, b)
    return min(a, b)


def choose(condition: Number, yes: Number, no: Number) -> Number:
    """`yes` where the condition holds, else `no`; both are evaluated."""
    if _some_array(condition, yes, no):
        import numpy as np

        return np.where(condition, yes, no)
    return yes if condition else no


def rounded_up(value: Number) -> Number:
    """The least whole number that is not below, forgiving the last bits of a division."""
    forgiven = value * (1 - 1e-12)
    if _some_array(forgiven):
        import numpy as np

        return np.ceil(forgiven)
    return math.ceil(forgiven)
