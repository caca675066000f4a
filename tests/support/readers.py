"""An output read by pyarrow, datasets, polars and DuckDB, which must give the same rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def read_by_all(out: Path, cache: Path) -> list[dict[str, Any]]:
    """The rows of an output directory, of each of its readers the same ones in the same order.

    pyarrow and datasets are given the directory, polars and DuckDB its `*.parquet`; `cache` is for
    what datasets makes. Also checks that all shards have the same columns.
    """
    datasets = pytest.importorskip("datasets")
    duckdb = pytest.importorskip("duckdb")
    polars = pytest.importorskip("polars")
    check_names(out)
    pattern = f"{out}/*.parquet"
    found = {
        "pyarrow": pq.read_table(out),
        "datasets": datasets.load_dataset(str(out), split="train", cache_dir=str(cache)).data.table,
        "polars": polars.read_parquet(pattern, glob=True).to_arrow(),
        "DuckDB": duckdb.sql(f"SELECT * FROM read_parquet('{pattern}')").to_arrow_table(),
        "DuckDB, directory": duckdb.sql(f"SELECT * FROM read_parquet('{out}')").to_arrow_table(),
    }
    rows = {name: table.to_pylist() for name, table in found.items()}
    for name in found:
        assert rows[name] == rows["pyarrow"], name
    return rows["pyarrow"]


def check_names(out: Path) -> None:
    """Shards of one schema, and beside them nothing that a reader of Parquet files opens."""
    shards = sorted(out.glob("*.parquet"))
    assert shards == sorted(out.rglob("*.parquet"))
    others = {path.name for path in out.iterdir()} - {path.name for path in shards}
    seen = {name for name in others if not name.startswith(".")}  # a killed run leaves dot-files
    assert seen <= {"_manifest.json", "_tokenizer"}, seen
    schemas = [pq.read_schema(path).remove_metadata() for path in shards]
    assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
    assert not any(_has_map(field.type) for field in schemas[0])


def _has_map(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(
        _has_map(kind.field(i).type) for i in range(kind.num_fields)
    )
