"""Single flipped bits in what commands write: found, or without effect; never other rows."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core import digests
from sabia.core.errors import BadData
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.inputs import from_path
from sabia.core.shards.outputs import open_file, read_metadata
from sabia.core.text.dedup.signature_files import Segment, SegmentWriter
from sabia.kernels.minhash.definitions import Sketches


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


def flipped(
    path: Path, flips: int, read: Callable[[Path], Any], files: list[Path] | None = None
) -> list[str]:
    """The flips, a third of them in the last 4 kB, after which `read` gives something else."""
    draw, passed = random.Random(flips), []
    expected = read(path)
    for number in range(flips):
        file = draw.choice(files) if files else path
        whole = file.read_bytes()
        last = 0 if number % 3 else max(0, len(whole) - 4096)
        bit = draw.randrange(8 * last, 8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            if read(path) != expected:
                passed.append(f"{file.name}: bit {bit} of {8 * len(whole)}")
        except BadData as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
        finally:
            file.write_bytes(whole)
    return passed


FLIPS = pytest.mark.parametrize("flips", [100, pytest.param(1_000, marks=pytest.mark.slow)])


@FLIPS
@pytest.mark.parametrize("ending", ["parquet", "arrow", "arrows", "jsonl.zst", "jsonl.gz"])
def test_flips_in_shards_of_300_rows(tmp_path: Path, flips: int, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    if ending == "arrows":
        stream(path, documents(300))
    else:
        write(path, documents(300))
    assert not flipped(path, flips, rows_of)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["parquet", "arrow", "arrows"])
def test_flips_in_large_shards(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    batch = documents(12_000)
    stream(path, batch) if ending == "arrows" else write(path, batch)

    def read(path: Path) -> Any:
        [source] = from_path(str(path), "document")
        return pa.Table.from_batches(list(source.batches()))

    assert not flipped(path, 1_000, read)


def stream(path: Path, batch: pa.RecordBatch) -> None:
    """An Arrow stream, as on a pipe."""
    with path.open("wb") as file:
        writer = digests.ArrowRows(file, batch.schema)
        for start in range(0, batch.num_rows, 97):
            writer.write(batch.slice(start, 97))
        writer.close()


@FLIPS
def test_flips_in_json(tmp_path: Path, flips: int) -> None:
    path = tmp_path / "index.json"
    runs = [{"key": f"{n:032x}", "rows": n, "share": n / 7, "text": "é"} for n in range(40)]
    write_json(path, {"version": 1, "runs": runs})

    def read(path: Path) -> Any:
        try:
            return {n: v for n, v in read_json(path).items() if n in ("version", "runs")}
        except ValueError as error:
            raise BadData(f"{path}: {str(error).splitlines()[0]}") from error

    assert not flipped(path, flips, read)


@FLIPS
def test_flips_in_a_dedup_index(tmp_path: Path, flips: int) -> None:
    folder, draw, rows = tmp_path / "segment", np.random.default_rng(0), 500
    folder.mkdir()
    sketches = Sketches(
        draw.integers(0, 1 << 60, (rows, 16), np.uint64),
        draw.integers(0, 1 << 60, (rows, 2), np.uint64),
        np.full(rows, 3), draw.integers(0, 1 << 30, 3 * rows, np.uint32), np.full(rows, 3),
    )  # fmt: skip
    writer = SegmentWriter(16, True, folder)
    writer.add(sketches, np.zeros(rows), pa.array([f"id{n}" for n in range(rows)]))
    writer.close({"source": "a"})

    def read(folder: Path) -> Any:
        segment = Segment.open(folder)
        return (
            segment.rows,
            segment.bands,
            [c.tolist() for b in range(16) for c in segment.chunks(b)],
        )

    assert not flipped(folder, flips, read, sorted(folder.iterdir()))


def test_an_output_with_a_damaged_footer_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, documents(300))
    assert read_metadata(str(path)) == {"fingerprint": "a"}
    whole = path.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    for at in range(len(whole) - 8 - length, len(whole) - 8, 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert read_metadata(str(path)) is None


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
