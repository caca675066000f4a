"""Digests of what commands write: damage that is found, files of others, readers that check."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core import digests
from sabia.core.bench.task_data.data_files import read_rows
from sabia.core.digests import BLOCK, ParquetWriter, check_parquet
from sabia.core.errors import BadData
from sabia.core.plan.runs import _parquet
from sabia.core.shards.inputs import from_path
from sabia.core.shards.outputs import open_file, read_metadata


def documents(rows: int, seed: int = 0) -> pa.RecordBatch:
    """Random documents with an extra column, nulls and named scores."""
    draw = random.Random(seed)
    words = ["uma", "corpus", "língua", "the", "of", "model", "東京", "data"]
    texts = [" ".join(draw.choices(words, k=draw.randrange(1, 80))) for _ in range(rows)]
    columns = {
        "id": pa.array([f"{seed}-{n}" for n in range(rows)]),
        "text": pa.array(texts),
        "url": pa.array([None if n % 3 else f"http://a.example/{n}" for n in range(rows)]),
        "source": pa.array(["web"] * rows),
        "scores": pa.array([{"edu": draw.random(), "lid": None} for _ in range(rows)]),
        "votes": pa.array([draw.randrange(99) if n % 5 else None for n in range(rows)]),
    }
    return pa.RecordBatch.from_pydict(columns)


def write(path: Path, batch: pa.RecordBatch) -> None:
    with open_file(str(path), batch.schema, {"fingerprint": "a"}) as file:
        for start in range(0, batch.num_rows, 1_000):
            file.write(batch.slice(start, 1_000))


def rows_of(path: Path) -> list[Any]:
    """All rows of a source and their columns."""
    [source] = from_path(str(path), "document")
    batches = list(source.batches())
    return [source.rows(), *({"names": b.schema.names, "rows": b.to_pylist()} for b in batches)]


def stream(path: Path, batch: pa.RecordBatch) -> None:
    """An Arrow stream, as on a pipe."""
    with path.open("wb") as file:
        writer = digests.ArrowRows(file, batch.schema)
        for start in range(0, batch.num_rows, 97):
            writer.write(batch.slice(start, 97))
        writer.close()


def test_an_output_with_a_damaged_footer_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, documents(300))
    assert read_metadata(str(path)) == {"fingerprint": "a"}
    whole = path.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    for at in range(len(whole) - 8 - length, len(whole) - 8, 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert read_metadata(str(path)) is None


@pytest.mark.parametrize("where", ["footer", "page header"])
def test_every_reader_of_parquet_finds_damage(tmp_path: Path, where: str) -> None:
    """Also those of tasks and of lists of runs, which are no sources of a stage."""
    path = tmp_path / "a.parquet"
    write(path, documents(300))
    whole = bytearray(path.read_bytes())
    whole[-30 if where == "footer" else 5] ^= 1
    path.write_bytes(whole)
    readers: list[Callable[[], Any]] = [
        lambda: rows_of(path),
        lambda: read_rows(path, "--task"),
        lambda: list(_parquet(str(path))),
        lambda: check_parquet(str(path)),
    ]
    for reader in readers:
        with pytest.raises(BadData, match=r"as (it was|they were) written"):
            reader()


def test_a_damaged_output_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.parquet", tmp_path / "o"
    write(source, documents(300))
    given: dict[str, Any] = {"inputs": [str(source)], "out": out, "method": "url"}
    stage("dedup", **given)
    part = out / "part-00000.parquet"
    before = part.read_bytes()
    part.write_bytes(before[:999] + bytes([before[999] ^ 16]) + before[1000:])
    capsys.readouterr()
    stage("dedup", **given)
    assert part.read_bytes() == before
    assert "part-00000.parquet: damaged bits; it is written again" in capsys.readouterr().err
    stage("dedup", **given)
    assert "already done" in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 1_000, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_any_range_of_a_file_is_read_as_it_is(tmp_path: Path, size: int) -> None:
    """Reads that begin and end anywhere, as those of columns do."""
    draw = random.Random(size)
    path, text = tmp_path / "a.parquet", draw.randbytes(size)
    batch = pa.RecordBatch.from_pydict({"a": [text]})
    with path.open("wb") as file:
        writer = ParquetWriter(file, batch.schema, compression="none", use_dictionary=False)
        writer.write_table(pa.Table.from_batches([batch]))
        writer.close()
    whole = path.read_bytes()
    with path.open("rb") as file:
        checked = digests._checked(file, "a")
        assert checked
        for _ in range(200):
            start = draw.randrange(len(whole))
            checked.seek(start)
            count = draw.choice([1, 7, 100, BLOCK, len(whole)])
            assert bytes(checked.read(count)) == whole[start : start + count]
            assert checked.tell() == min(start + count, len(whole))
        checked.seek(0)
        assert bytes(checked.read()) == whole


def test_other_programs_read_what_is_written(tmp_path: Path) -> None:
    batch = documents(700)
    table = pa.Table.from_batches([batch])
    path, arrows = tmp_path / "a.parquet", tmp_path / "a.arrows"
    write(path, batch)
    stream(arrows, batch)
    assert pq.read_table(path).equals(table)
    assert polars.read_parquet(path).to_arrow()["text"].to_pylist() == table["text"].to_pylist()
    texts = duckdb.sql(f"SELECT text FROM '{path}'").fetchall()
    assert [text for (text,) in texts] == table["text"].to_pylist()
    loaded = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert loaded["text"][:] == table["text"].to_pylist()
    assert pa.ipc.open_stream(arrows.read_bytes()).read_all().equals(table)
    assert polars.read_ipc_stream(arrows).height == 700
    assert datasets.Dataset.from_file(str(arrows))["text"][:] == table["text"].to_pylist()


def test_files_of_other_programs_are_read_with_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(digests._seen, "undigested", False)
    (tmp_path / "head.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadData), digests.parquet_at(tmp_path / "head.parquet"):
        pass
    assert capsys.readouterr().err == ""  # its one line is the error
    table = pa.Table.from_batches([documents(50)])
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(table, tmp_path / name)
        assert rows_of(tmp_path / name)[0] == 50
    assert capsys.readouterr().err.count("has no digests") == 1


def test_parquet_without_rows_has_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, documents(3).slice(0, 0))
    assert digests.MARK in path.read_bytes()
    assert pq.read_table(path).num_rows == 0
