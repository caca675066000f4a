"""Of many candidates those that no other beats: the choices that are left to a person.

A candidate is beaten where another is at most as large in every column and smaller in one; of equal
ones the first is kept. The lexicographically least of a set is never beaten, so taking it, dropping
what it beats and going on costs one pass over the rest for each that is kept.
"""

from typing import Any

import numpy as np


def front(*columns: Any) -> Any:
    """Numbers of the entries that no other beats, in order of the first column (then the second…).

    columns: arrays of equal length, smaller being better, without NaN.
    """
    table = np.column_stack(columns).astype(np.float64)
    order = np.lexsort(tuple(table[:, n] for n in reversed(range(table.shape[1]))))
    left, kept = order, []
    while len(left):
        first = left[0]
        kept.append(first)
        better = (table[left] < table[first]).any(1)
        left = left[better]
    return np.array(kept, np.int64)
