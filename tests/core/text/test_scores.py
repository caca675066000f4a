"""The scores column: reading, replacing and adding entries, against plain dictionaries."""

import random

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import MAP, as_dict, fit
from sabia.core.text.score_column import score_names, score_values, with_scores


def as_dicts(column: pa.Array) -> list[dict[str, float]]:
    return [as_dict(row) for row in column.to_pylist()]


def column_of(rows: list[list[tuple[str, float]] | None]) -> pa.Array:
    return fit(pa.array(rows, MAP))


def test_entries_are_added_replaced_and_left_out() -> None:
    old = column_of([[("a", 1.0), ("b", 2.0)], None, [], [("b", 5.0)]])
    new = {"b": np.array([9.0, 8.0, np.nan, np.nan]), "c": np.array([np.nan, 1.0, 2.0, 3.0])}
    got = as_dicts(with_scores(old, new))
    assert got == [{"a": 1, "b": 9}, {"b": 8, "c": 1}, {"c": 2}, {"c": 3}]


def test_agrees_with_dictionaries_on_random_and_sliced_columns() -> None:
    source = random.Random(3)
    for trial in range(60):
        rows = [
            None
            if source.random() < 0.2
            else [(k, source.random()) for k in "abcd" if source.random() < 0.5]
            for _ in range(source.randrange(12))
        ]
        column = column_of(rows)
        start = source.randrange(len(rows) + 1)
        column, rows = column.slice(start), rows[start:]
        for name in "abx":
            values = score_values(column, name)
            expected = [dict(row or []).get(name, np.nan) for row in rows]
            assert np.array_equal(values, np.array(expected, float), equal_nan=True), trial
        assert score_names(column) == {key for row in rows for key, _ in row or []}
        fresh = {
            n: np.array([source.choice([np.nan, 1.5]) for _ in rows], float) for n in ("b", "z")
        }
        expected_rows = [dict(row or []) for row in rows]
        for i, row in enumerate(expected_rows):
            row.pop("b", None)
            row.update({n: float(v[i]) for n, v in fresh.items() if not np.isnan(v[i])})
        assert as_dicts(with_scores(column, fresh)) == expected_rows


def test_a_column_of_nulls_can_be_extended() -> None:
    column = pa.nulls(2)
    assert as_dicts(with_scores(column, {"q": np.array([0.5, 1.0])})) == [{"q": 0.5}, {"q": 1.0}]
