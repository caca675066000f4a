"""The `scores` column: a map from names to numbers, read and extended without Python rows."""

import difflib
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import UsageError

LISTED = 8  # names in an error; a scored document has about fifty


def alike(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the names most like it, else some that exist."""
    names = sorted(known)
    if near := difflib.get_close_matches(name, names, n=3, cutoff=0.7):
        return f"; did you mean {' or '.join(near)}?"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f" (expected one of {', '.join(names[:LISTED])}{more})" if names else " (there is none)"


def label_column(batch: pa.RecordBatch, name: str, where: str) -> pa.Array:
    """The column that `--label` names. UsageError where `where` has no such column."""
    if name not in batch.schema.names:
        raise UsageError(f"--label: no column {name!r} in {where}{alike(name, batch.schema.names)}")
    return batch.column(name)


def _parts(scores: pa.MapArray) -> tuple[np.ndarray, np.ndarray, pa.Array, np.ndarray]:
    """(row of each entry int64[m], entries per row int64[n], keys, values float64[m])."""
    offsets = scores.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    counts = np.diff(offsets)
    valid = np.asarray(scores.is_valid())
    keys, values = scores.keys, scores.items
    low, high = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    keys, values = keys.slice(low, high - low), values.slice(low, high - low)
    rows = np.repeat(np.arange(len(counts)), counts)
    live = valid[rows] if len(rows) else np.zeros(0, bool)
    keys, values, rows = keys.filter(pa.array(live)), values.filter(pa.array(live)), rows[live]
    numbers = values.to_numpy(zero_copy_only=False).astype(float)
    return rows, np.where(valid, counts, 0), keys, numbers


def score_names(scores: pa.MapArray) -> set[str]:
    """Names that occur in any row."""
    return set(pc.unique(_parts(scores)[2]).to_pylist())


def score_values(scores: pa.MapArray, name: str) -> np.ndarray:
    """float64[n] of one name; NaN where a row does not have it."""
    rows, counts, keys, values = _parts(scores)
    result = np.full(len(counts), np.nan)
    here = np.asarray(pc.fill_null(pc.equal(keys, name), False))
    result[rows[here]] = values[here]
    return result


def with_scores(scores: pa.MapArray, new: Mapping[str, np.ndarray]) -> pa.MapArray:
    """The column with one entry more per new name; an older entry of that name is replaced.

    new[name] float64[n]; NaN writes no entry.
    """
    rows, counts, keys, values = _parts(scores)
    n = len(counts)
    stays = np.asarray(pc.invert(pc.is_in(keys, pa.array(list(new), pa.string()))))
    added = np.stack([np.asarray(column, float) for column in new.values()], axis=1)
    there = ~np.isnan(added)
    all_rows = np.concatenate((rows[stays], np.repeat(np.arange(n), there.sum(axis=1))))
    order = np.argsort(all_rows, kind="stable")
    names = pa.array(list(new), pa.string()).take(pa.array(np.nonzero(there)[1]))
    all_keys = pa.concat_arrays([keys.filter(pa.array(stays)), names]).take(pa.array(order))
    all_values = np.concatenate((values[stays], added[there]))[order]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(all_rows, minlength=n))))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), all_keys, pa.array(all_values, pa.float64())
    )
