"""Named numbers of rows, such as the column `scores`: a struct of doubles, its names in order.

A row without a number has null there; to every reader this means that the name is absent. A column
without any name has the type null (a Parquet file cannot hold a struct without fields). Files of
earlier versions hold a map from names to numbers, which is read in the same way.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import BadData
from sabia.core.shards.arrow_arrays import cast

MAP = pa.map_(pa.string(), pa.float64())
MOST_NAMES = 1_000


def type_of(names: Iterable[str]) -> pa.DataType:
    """The type of a column with these names; raises BadData for more than MOST_NAMES."""
    ordered = sorted(set(names))
    if len(ordered) > MOST_NAMES:
        raise BadData(
            f"more than {MOST_NAMES:,} names of scores, such as {ordered[0]!r} (expected names that"
            " documents have in common)"
        )
    return pa.struct([(name, pa.float64()) for name in ordered]) if ordered else pa.null()


def names_of(kind: pa.DataType) -> list[str] | None:
    """The names of a type; None for a map, whose names are in the rows."""
    if pa.types.is_struct(kind):
        return [kind.field(i).name for i in range(kind.num_fields)]
    return None if pa.types.is_map(kind) else []


def keys_of(column: pa.Array) -> set[str]:
    """The names that occur in a column of maps."""
    return set(pc.unique(_entries(_as_map(column))[1]).to_pylist())


def fit(column: pa.Array, names: Sequence[str] | None = None) -> pa.Array:
    """A column of structs, maps or nulls as one of `type_of(names)`; None: of its own names.

    Raises BadData for any other type, or for numbers with another name.
    """
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), type_of(names or ()))
    if pa.types.is_map(column.type):
        return _from_map(_as_map(column), names)
    if not pa.types.is_struct(column.type):
        raise BadData(f"column 'scores' is {column.type} (expected a struct of numbers)")
    own = names_of(column.type) or []
    wanted = type_of(own if names is None else names)
    if column.type == wanted:
        return column
    _refuse_others(set(own), names)
    values = {
        name: cast(column_of(column, name), pa.float64(), f"score {name!r}", "a number")
        for name in own
    }
    return from_columns(values, len(column), wanted, np.asarray(column.is_null()))


def column_of(column: pa.StructArray, name: str) -> pa.Array:
    """The numbers of one name, null where a row is null."""
    return pc.struct_field(column, [column.type.get_field_index(name)])


def from_columns(
    values: dict[str, pa.Array], rows: int, wanted: pa.DataType, mask: np.ndarray | None = None
) -> pa.Array:
    """A column of type `wanted` (of `type_of`) from float64[rows] arrays by name.

    mask: bool[rows], true where a row is null as a whole.
    """
    if pa.types.is_null(wanted):
        return pa.nulls(rows)
    fields = [wanted.field(i) for i in range(wanted.num_fields)]
    nothing = pa.nulls(rows, pa.float64())
    return pa.StructArray.from_arrays(
        [values.get(field.name, nothing) for field in fields],
        fields=fields,
        mask=None if mask is None or not mask.any() else pa.array(mask),
    )


def as_dict(value: Any) -> dict[str, float]:
    """A row's names and numbers, from a Python dict or list of pairs; without nulls."""
    pairs = value.items() if isinstance(value, dict) else value or ()
    return {name: number for name, number in pairs if number is not None}


def _as_map(column: pa.Array) -> pa.MapArray:
    return cast(column, MAP, "column 'scores'", "a struct of numbers")


def _refuse_others(present: set[str], names: Sequence[str] | None) -> None:
    odd = sorted(present.difference(names)) if names is not None else []
    if odd:
        raise BadData(
            f"score {odd[0]!r} does not occur in the first rows of the shards, all that a slice"
            " reads of the others (expected Parquet files whose scores are a struct: write them by"
            " sabia classify, in one job)"
        )


def _entries(column: pa.MapArray) -> tuple[np.ndarray, pa.Array, pa.Array]:
    """(row of each entry int64[m], keys, values) of the rows that are not null."""
    offsets = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    counts = np.diff(offsets)
    low, high = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    keys, values = column.keys.slice(low, high - low), column.items.slice(low, high - low)
    live = np.asarray(column.is_valid())[rows] if len(rows) else np.zeros(0, bool)
    if live.all():
        return rows, keys, values
    return rows[live], keys.filter(pa.array(live)), values.filter(pa.array(live))


def _from_map(column: pa.MapArray, names: Sequence[str] | None) -> pa.Array:
    """If a row has several entries of one name, the last counts."""
    rows, keys, values = _entries(column)
    present = set(pc.unique(keys).to_pylist())
    _refuse_others(present, names)
    wanted = type_of(present if names is None else names)
    ordered = names_of(wanted) or []
    indices = np.asarray(pc.index_in(keys, pa.array(ordered, pa.string())).fill_null(0))
    table = np.zeros((len(ordered), len(column)))
    there = np.zeros(table.shape, bool)
    if len(rows):
        table[indices, rows] = values.fill_null(0).to_numpy(zero_copy_only=False)
        there[indices, rows] = np.asarray(values.is_valid())
    made = {n: pa.array(table[i], mask=~there[i]) for i, n in enumerate(ordered)}
    return from_columns(made, len(column), wanted, np.asarray(column.is_null()))
