"""`max`, `min`, `if` and `ceil` for numbers and for NumPy arrays.

Every formula of the planner is written once. Its arguments are numbers for one layout, and NumPy
arrays (one entry per candidate) in a search. Arithmetic works on both; these functions replace what
does not. NumPy is imported only for arrays.
"""

import math
from typing import Any

# a number, or a NumPy array with one entry per candidate
Number = Any


def _some_array(*values: Number) -> bool:
    return any(hasattr(value, "shape") for value in values)


def larger(a: Number, b: Number) -> Number:
    """The larger value of each pair."""
    if _some_array(a, b):
        import numpy as np

        return np.maximum(a, b)
    return max(a, b)


def smaller(a: Number, b: Number) -> Number:
    """The smaller value of each pair."""
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
    """The value rounded up, with a tolerance for the last bits of a division."""
    lowered = value * (1 - 1e-12)
    if _some_array(lowered):
        import numpy as np

        return np.ceil(lowered)
    return math.ceil(lowered)
