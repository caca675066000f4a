"""The `scores` column: named numbers of each row, read and extended without Python rows.

It is a struct of doubles, or of the type null while there are no scores (`shards.arrow_arrays`).
Null means that a row does not have the score.
"""

import difflib
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.shards.arrow_arrays import column_of, from_columns, names_of, type_of

LISTED = 8  # names in an error; a scored document has about fifty


def alike(name: str, known: Iterable[str]) -> str:
    """The end of an error on an unknown name: the most similar known names, else some of them."""
    names = sorted(known)
    if near := difflib.get_close_matches(name, names, n=3, cutoff=0.7):
        return f"; did you mean {' or '.join(near)}?"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f" (expected one of {', '.join(names[:LISTED])}{more})" if names else " (there is none)"


def label_column(batch: pa.RecordBatch, name: str, where: str) -> pa.Array:
    """The column of `--label`. UsageError where the batch, named `where`, has no such column."""
    if name not in batch.schema.names:
        raise UsageError(f"--label: no column {name!r} in {where}{alike(name, batch.schema.names)}")
    return batch.column(name)


def score_names(scores: pa.Array) -> set[str]:
    """Names of the scores that at least one row has."""
    return {name for name in _names(scores) if column_of(scores, name).null_count < len(scores)}


def score_values(scores: pa.Array, name: str) -> np.ndarray:
    """float64[n] of one score; NaN where a row does not have it."""
    if name not in _names(scores):
        return np.full(len(scores), np.nan)
    return column_of(scores, name).to_numpy(zero_copy_only=False)


def with_scores(scores: pa.Array, new: Mapping[str, np.ndarray]) -> pa.Array:
    """The column with new scores added or replaced; new[name] float64[n], NaN writes null."""
    columns = {name: column_of(scores, name) for name in _names(scores)}
    for name, values in new.items():
        numbers = np.asarray(values, float)
        columns[name] = pa.array(numbers, mask=np.isnan(numbers))
    return from_columns(columns, len(scores), type_of(columns))


def _names(scores: pa.Array) -> list[str]:
    names = names_of(scores.type)
    assert names is not None, "scores are a map until their batch is made to conform"
    return names
