"""The format of an output follows from its ending; other readers open what is written."""

import gzip
import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from sabia.core.errors import BadData, UsageError
from sabia.core.shards.atomic import is_abandoned, sweep
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import FORMATS, Job, check_ending, file_ending
from sabia.core.shards.mapping import run_map
from sabia.core.shards.outputs import ParquetRows, open_file, read_metadata

TABLE = pa.table({
    "id": [str(i) for i in range(5_000)], "text": [f"ação {i}\n\"x\"" for i in range(5_000)],
    "n": list(range(5_000)),
})  # fmt: skip


def keep(batches, _context):
    yield from batches


def read_elsewhere(path: Path) -> list[dict]:
    """The rows as libraries without sabia read them."""
    data = path.read_bytes()
    if path.suffix == ".parquet":
        return pq.read_table(io.BytesIO(data)).to_pylist()
    if path.suffix == ".arrow":
        return pa.ipc.open_file(data).read_all().to_pylist()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    return [json.loads(line) for line in data.decode().splitlines()]


@pytest.mark.parametrize("ending", [*FORMATS, ".JSONL.GZ", ".Parquet"])
def test_a_file_has_the_format_of_its_ending(ending: str, tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    out = tmp_path / f"out{ending}"
    job = Job("classify", inputs=(str(tmp_path / "in.parquet"),), out=str(out))
    assert run_map(job, keep).rows_out == 5_000
    json_lines = FORMATS[ending.lower()] == "jsonl"
    record = [f".out{ending}.sabia.json"] if json_lines else []
    assert out.is_file() and [path.name for path in tmp_path.glob(".*")] == record
    lower = out.rename(tmp_path / f"lower{ending.lower()}")
    rows = read_elsewhere(lower)
    assert [(row["id"], row["text"], row["n"]) for row in rows] == [
        (row["id"], row["text"], row["n"]) for row in TABLE.to_pylist()
    ]
    back = [row for s in from_path(str(lower), "document") for b in s.batches() for row in b["id"]]
    assert len(back) == 5_000
    if not json_lines:
        assert read_metadata(str(lower))["command"] == "classify"


def test_only_columns_that_repeat_have_a_dictionary() -> None:
    """Texts that differ and token ids are smaller without one."""
    ids = pa.array([[i % 7, i % 5] for i in range(5_000)], pa.list_(pa.int32()))
    table = TABLE.append_column("input_ids", ids).append_column("source", [["web"] * 5_000])
    target = io.BytesIO()
    rows = ParquetRows(target, table.schema)
    for batch in table.to_batches():
        rows.write(batch)
    rows.close()
    written = pq.ParquetFile(io.BytesIO(target.getvalue()))
    group = written.metadata.row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    having = {c.path_in_schema for c in chunks if "RLE_DICTIONARY" in c.encodings}
    assert having == {"n", "source"}
    assert written.read().equals(table)


def test_an_arrow_file_is_skipped_when_it_is_complete(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    out = str(tmp_path / "out.arrow")
    job = Job("classify", inputs=(str(tmp_path / "in.parquet"),), out=out)
    run_map(job, keep)
    again = run_map(job, keep)
    assert (again.shards_skipped, again.rows_out) == (1, 5_000)


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    for ending in FORMATS:
        with (
            pytest.raises(RuntimeError, match="stop"),
            open_file(str(tmp_path / f"a{ending}"), TABLE.schema) as writer,
        ):
            writer.write(TABLE.to_batches()[0])
            raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", ["a.csv", "a.json", "a.parquet.zst", "x/a.TSV", "a.ndjson", "a.gz"]
)
def test_other_data_formats_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match=r"--out: .*\.parquet, \.arrow, \.jsonl, .*a directory"):
        check_ending(path, "--out")


@pytest.mark.parametrize("path", ["out", "out/", "v1.2", "a.csv/", "s3://b/out", None, "-"])
def test_other_names_are_directories(path: str | None) -> None:
    check_ending(path, "--out")
    assert not file_ending(path or "")


def test_a_directory_with_the_name_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"is a directory; write .*a\.jsonl/ for"):
        check_ending(str(tmp_path / "a.jsonl"), "--out")


def test_a_truncated_arrow_file_is_bad_data(tmp_path: Path) -> None:
    with open_file(str(tmp_path / "a.arrow"), TABLE.schema) as writer:
        writer.write(TABLE.to_batches()[0])
    data = (tmp_path / "a.arrow").read_bytes()
    for size in range(6, len(data) - 1, len(data) // 7):
        (tmp_path / "a.arrow").write_bytes(data[:size])
        with pytest.raises(BadData):
            [b for s in from_path(str(tmp_path / "a.arrow"), "document") for b in s.batches()]


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl", "pipe.jsonl.gz", "pipe.parquet"])
def test_a_fifo_is_written_as_a_stream(name: str, tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    fifo, copy = tmp_path / name, tmp_path / f"copy{Path(name + '.parquet').suffixes[0]}"
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: copy.write_bytes(fifo.read_bytes()))
    reader.start()
    run_map(Job("classify", inputs=(str(tmp_path / "in.parquet"),), out=str(fifo)), keep)
    reader.join(10)
    source = from_path(str(copy), "document")[0]
    assert sum(batch.num_rows for batch in source.batches()) == 5_000


def test_streams_of_the_shell(tmp_path: Path) -> None:
    pq.write_table(TABLE.slice(0, 50), tmp_path / "in.parquet")
    sabia = f"{sys.executable} -m sabia.cli.main classify --no-quality"
    lines = (
        f"{sabia} in.parquet -o /dev/stdout > a.parquet",
        f"{sabia} in.parquet -o /dev/stdout | cat > b.parquet",
        f"{sabia} in.parquet --to jsonl -o >(cat > c.jsonl); sleep 1",
    )
    for line in lines:
        subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    for name in ("a.parquet", "b.parquet", "c.jsonl"):
        source = from_path(str(tmp_path / name), "document")[0]
        assert sum(batch.num_rows for batch in source.batches()) == 50
    assert sorted(os.listdir(tmp_path)) == ["a.parquet", "b.parquet", "c.jsonl", "in.parquet"]


def test_temporary_files_whose_writer_ended_are_abandoned(tmp_path):
    """Also where another process has the writer's number now."""
    host = socket.gethostname().partition(".")[0]
    running = tmp_path / f".x.parquet.{host}-{os.getpid()}-0a1b.tmp"
    ended = tmp_path / f".x.parquet.{host}-99999999-0a1b.tmp"
    elsewhere = tmp_path / f".x.parquet.{host}2-99999999-0a1b.tmp"
    for path in (running, ended, elsewhere):
        path.touch()
    assert [is_abandoned(path) for path in (running, ended, elsewhere)] == [False, True, False]
    os.utime(running, (1e9, 1e9))  # before the process that has the number began
    assert is_abandoned(running)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [elsewhere]
