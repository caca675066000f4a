"""Row files: the same rows from every form of shard, made once, read in place."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_shards import opened, records, same_batches
from sparse_rows import SCHEMA, sparse_rows

from sabia.core import file_hashes
from sabia.core.digests import ArrowRows
from sabia.core.errors import BadData
from sabia.core.shards import schemas
from sabia.core.shards.inputs import from_path
from sabia.core.shards.outputs import open_file
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows import arrow_messages, row_store
from sabia.core.shards.token_rows.row_store import fingerprint, open_row_files
from sabia.core.text.tokenize.packing import SequentialPacker, to_batch
from sabia.core.train.token_rows import read_token_rows

HOLD = """
import sys, time
from pathlib import Path
from sabia.core.shards.token_rows import row_store
from sabia.core.shards.inputs import from_path
make = row_store._make
def slow(path, source):
    print("making", flush=True)
    time.sleep(float(sys.argv[3]))
    make(path, source)
row_store._make = slow
sys.stdin.readline()
list(row_store.open_row_files(from_path(sys.argv[1], "tokens"), Path(sys.argv[2]), 1, print))
print("open", flush=True)
"""


def write(table: pa.Table, path: Path, form: str) -> Path:
    batches = table.to_batches(max_chunksize=17)
    if form == "plain parquet":
        pq.write_table(table, path := path.with_suffix(".parquet"))
    elif form in (".parquet", ".arrow", ".jsonl.gz"):
        with open_file(str(path := path.with_suffix(form)), table.schema) as writer:
            for batch in batches:
                writer.write(batch)
    else:
        with open(path := path.with_suffix(".arrow"), "wb") as file:
            parts = (batches[:2], batches[2:]) if form == "two streams" else (batches,)
            for part in parts:
                codec = pa.ipc.IpcWriteOptions(compression="zstd" if form == "zstd" else None)
                stream = ArrowRows(file, table.schema) if form == "digests" else \
                    pa.ipc.new_stream(file, table.schema, options=codec)  # fmt: skip
                for batch in part:
                    stream.write(batch)
                stream.close()
    return path


def ignore(_row: dict, _reason: str, _shard: str) -> None:
    """A reject."""


FORMS = (".parquet", "plain parquet", ".jsonl.gz", ".arrow", "stream", "two streams", "digests",
         "zstd")  # fmt: skip
IN_PLACE = (".arrow", "stream", "two streams", "digests")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masks", [True, False])
def test_every_form_gives_the_rows(tmp_path: Path, form: str, masks: bool) -> None:
    table = records(np.random.default_rng(len(form)), 150, masks)
    path = write(table, tmp_path / "rows", form)
    made = opened(path, tmp_path / "cache")
    same_batches(made, read_token_rows(table.to_batches()))
    if form in IN_PLACE:
        assert made.files[0].index.largest_id is None
    else:
        assert made.largest_id == max(map(max, table.column("input_ids").to_pylist()))


def test_rows_of_several_shards_and_processes(tmp_path: Path) -> None:
    tables = [records(np.random.default_rng(seed), 40 + seed) for seed in range(6)]
    (tmp_path / "in").mkdir()
    for number, table in enumerate(tables):
        write(table, tmp_path / "in" / f"{number}", [".parquet", "stream"][number % 2])
    made = opened(tmp_path / "in", tmp_path / "cache", jobs=2)
    same_batches(made, read_token_rows(pa.concat_tables(tables).to_batches()))


@pytest.mark.parametrize("form", [".parquet", "digests", "stream"])
def test_a_second_start_decodes_nothing(tmp_path: Path, monkeypatch, form: str) -> None:
    monkeypatch.setattr(file_hashes, "SETTLED_NS", -1)
    monkeypatch.setattr(file_hashes, "CACHED_BYTES", 0)
    path = write(records(np.random.default_rng(0), 60), tmp_path / "rows", form)
    first = opened(path, tmp_path / "cache")

    def refuse(*_args: object, **_settings: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(Source, "batches", refuse)
    monkeypatch.setattr(row_store, "scan", refuse)
    monkeypatch.setattr(file_hashes, "_digest", refuse)
    same_batches(opened(path, tmp_path / "cache"), first)


def test_ids_of_arrow_stay_where_they_are(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(r, r + 500)), "document_lengths": [500]} for r in range(200)]
    table = pa.Table.from_pylist(rows, SCHEMA).drop(["loss_mask"])
    path = write(table, tmp_path / "rows", "digests")
    made = opened(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    with open(path, "r+b") as file:  # row 7 is changed in the shard
        file.seek(int(made.files[0].batch(0).at[7]))
        file.write(b"\1\0\0\0")
    assert made.batch(np.array([7]))["input_ids"][0, :3].tolist() == [1, 8, 9]


def packed(path: Path, count: int = 60) -> Path:
    """Rows of `tokenize`, whose ids are hashes of them."""
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(0, 9_999, 32 * count), np.full(4 * count, 8)
    packer = SequentialPacker(32, 0)
    names = pa.array([f"document {n}" for n in range(len(lengths))])
    codes = np.zeros(len(lengths), np.int64)
    rows = [*packer.add(tokens, lengths, codes, names), *packer.flush()]
    table = pa.Table.from_batches([to_batch(part, ["web"]) for part in rows])
    return write(table, path, "digests")


def test_damaged_rows_are_found_when_they_are_read(tmp_path: Path) -> None:
    path = packed(tmp_path / "rows")
    made = opened(path, tmp_path / "cache")
    (file,) = made.files
    whole = made.batch(np.arange(60))
    starts = [start for number in range(60 // 17 + 1) for start in file.batch(number).at]
    at = [int(start) + 4 * (row % 32) for row, start in enumerate(starts)]
    for row in (0, 17, 59):
        with open(path, "r+b") as shard:
            shard.seek(at[row])
            bits = shard.read(1)[0]
            shard.seek(at[row])
            shard.write(bytes([bits ^ 16]))
            shard.flush()
            with pytest.raises(BadData, match=f"rows.arrow: row {row} is not as it was written"):
                made.batch(np.arange(row, 60))
            made.batch(np.delete(np.arange(60), row))
            shard.seek(at[row])
            shard.write(bytes([bits]))
    same = made.batch(np.arange(60))
    assert all(np.array_equal(same[name], whole[name]) for name in whole)


@pytest.mark.parametrize("form", [".arrow", "digests"])
def test_masks_of_padding_are_those_of_the_documents(tmp_path: Path, form: str) -> None:
    """Masks that follow from the checked lengths are not read; other masks are."""
    draw = np.random.default_rng(2)
    lengths = [draw.integers(1, 9, n).tolist() for n in draw.integers(1, 4, 200)]
    sizes = [sum(of_row) + int(draw.integers(0, 3)) for of_row in lengths]
    for number, other in enumerate((False, True)):
        masks = [
            [n < sum(of_row) for n in range(size)]
            for of_row, size in zip(lengths, sizes, strict=True)
        ]
        masks[77][0] = not other
        rows = [
            {"input_ids": [*range(size)], "document_lengths": of_row, "loss_mask": mask,
             "id": str(size), "source": "web"}
            for of_row, size, mask in zip(lengths, sizes, masks, strict=True)
        ]  # fmt: skip
        table = pa.Table.from_pylist(rows, schemas.KINDS["tokens"])
        made = opened(write(table, tmp_path / f"{number}", form), tmp_path / "cache")
        assert made.files[0].index.padding is (form == ".arrow" and not other)
        same_batches(made, read_token_rows(table.to_batches()))


def test_ids_that_are_not_hashes_are_no_digests(tmp_path: Path) -> None:
    table = records(np.random.default_rng(0), 40)
    for number, ids in enumerate(([f"{n:032x}" for n in range(40)], ["z" * 32] * 40, ["x"] * 40,
                                  [None] * 40)):  # fmt: skip
        named = table.append_column("id", pa.array(ids, pa.string()))
        made = opened(write(named, tmp_path / f"{number}", "stream"), tmp_path / "cache")
        same_batches(made, read_token_rows(table.to_batches()))


def test_rejects_are_the_same_at_each_start(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"input_ids": [1, 2], "document_lengths": [2]}\n{"input_ids": null, "document_lengths": '
        '[]}\n{"document_lengths": [1]}\nnot JSON\n{"input_ids": [3], "document_lengths": [1]}\n'
    )
    (source,) = from_path(str(path), "tokens")
    direct: list[tuple] = []
    list(source.batches(reject=lambda row, reason: direct.append((row, reason, source.name))))
    for _ in range(2):
        seen: list[tuple] = []

        def keep(*reject: object, seen: list[tuple] = seen) -> None:
            seen.append(reject)

        (file,) = open_row_files([source], tmp_path / "cache", 1, keep)
        assert len(file) == 2
        assert seen == direct
        assert len(seen) == 3


def test_four_processes_unpack_once(tmp_path: Path) -> None:
    path = write(records(np.random.default_rng(0), 60), tmp_path / "rows", ".parquet")
    words = [sys.executable, "-c", HOLD, str(path), str(tmp_path / "cache"), "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(words, **pipes) for _ in range(4)]
    outputs = [process.communicate("go\n", timeout=120)[0] for process in processes]
    assert sorted(outputs) == ["making\nopen\n", "open\n", "open\n", "open\n"]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".arrow"]


def test_a_killed_process_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    path = write(records(np.random.default_rng(0), 60), tmp_path / "rows", ".parquet")
    words = [sys.executable, "-c", HOLD, str(path), str(tmp_path / "cache"), "60"]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    assert process.stdout.readline() == "making\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    since = time.monotonic()
    assert len(opened(path, tmp_path / "cache")) == 60
    assert time.monotonic() - since < 30
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".arrow"]


def test_a_damaged_row_file_is_made_again(tmp_path: Path) -> None:
    path = write(records(np.random.default_rng(0), 60), tmp_path / "rows", ".parquet")
    first = opened(path, tmp_path / "cache")
    (row_file,) = (tmp_path / "cache").iterdir()
    whole = row_file.read_bytes()
    middle = whole.index(b'"entries"') + 20
    for damaged in (whole[:-9], whole[:middle] + b"!" + whole[middle + 1 :], b"", b"short"):
        row_file.unlink()
        row_file.write_bytes(damaged)
        same_batches(opened(path, tmp_path / "cache"), first)
        assert row_file.read_bytes() == whole


def test_unused_row_files_are_removed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = write(records(np.random.default_rng(0), 20), tmp_path / "rows", ".parquet")
    opened(path, cache)
    (old,) = cache.iterdir()
    month_ago = time.time() - 31 * 86400
    os.utime(old, (month_ago, month_ago))
    opened(path, cache)  # used again
    (other := cache / "other.rows").write_bytes(b"x")
    os.utime(other, (month_ago, month_ago))
    opened(write(records(np.random.default_rng(1), 20), tmp_path / "more", ".parquet"), cache)
    assert old.exists() and not other.exists()


def test_the_fingerprint_is_of_the_digests(tmp_path: Path, monkeypatch) -> None:
    """A shard with digests is named without reading its rows, one without by all bytes."""
    table = records(np.random.default_rng(0), 60)
    other = table.set_column(3, "source", pa.array(["x"] * 60))
    prints = set()
    for form in (".parquet", ".arrow", "digests"):
        for name, content in (("a", table), ("b", other)):
            path = write(content, tmp_path / f"{name}{form.strip('.')}", form)
            with monkeypatch.context() as patch:
                patch.setattr(row_store, "content_hash", None)
                (source,) = from_path(str(path), "tokens")
                prints.add(fingerprint(source))
    assert len(prints) == 6
    (source,) = from_path(str(write(table, tmp_path / "c", "plain parquet")), "tokens")
    assert fingerprint(source) == source.fingerprint()


@pytest.mark.parametrize("form", ["digests", ".arrow", "stream"])
def test_a_shard_that_is_cut_short(tmp_path: Path, form: str) -> None:
    whole = write(records(np.random.default_rng(0), 60), tmp_path / "rows", form).read_bytes()
    rng = np.random.default_rng(1)
    for cut in [*rng.integers(200, len(whole) - 1, 20).tolist(), len(whole) - 8]:
        path = tmp_path / f"cut{cut}.arrow"
        path.write_bytes(whole[:cut])
        with pytest.raises(BadData):
            opened(path, tmp_path / "cache")


def test_joined_arrow_files(tmp_path: Path) -> None:
    whole = write(records(np.random.default_rng(0), 60), tmp_path / "rows", ".arrow").read_bytes()
    (tmp_path / "two.arrow").write_bytes(whole + whole)
    with pytest.raises(BadData, match="joined"):
        opened(tmp_path / "two.arrow", tmp_path / "cache")


def test_a_source_from_the_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "source=news").mkdir()
    table = records(np.random.default_rng(0), 30)
    for form in ("stream", ".parquet"):
        path = write(table.drop(["source"]), folder / "rows", form)
        assert opened(path, tmp_path / "cache").source_names == ("news",)
    some = table.set_column(3, "source", pa.array([None, "web", "web"] * 10, pa.string()))
    made = opened(write(some, folder / "rows", "digests"), tmp_path / "cache")
    assert made.source_names == ("news", "web")
    assert made.source_sizes == (10, 20)


def counting(read: list[int]) -> Any:
    plain = arrow_messages.FileBytes.read_some

    def read_some(self: Any, position: int, size: int) -> bytes:
        read.append(size)
        return plain(self, position, size)

    return read_some


def test_opening_reads_a_hundredth_of_the_rows(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.arrow"
    sparse_rows(path, batches=120)
    read: list[int] = []
    monkeypatch.setattr(arrow_messages.FileBytes, "read_some", counting(read))
    for _ in range(2):
        rows = opened(path, tmp_path / "cache")
        batch = rows.batch(np.random.default_rng(0).integers(0, len(rows), 8))
        assert batch["input_ids"].shape == (8, 2048)
        assert 0 < sum(read) < path.stat().st_size / 100
        read.clear()


def test_few_open_files_are_kept(tmp_path: Path) -> None:
    count = arrow_messages.OPEN_FILES + 20
    for number in range(count):
        write(records(np.random.default_rng(number), 5), tmp_path / f"{number}", "stream")
    before = len(os.listdir("/proc/self/fd"))
    rows = opened(tmp_path, tmp_path / "_cache")
    assert rows.batch(np.arange(5 * count))["input_ids"].shape[0] == 5 * count
    assert len(os.listdir("/proc/self/fd")) <= before + arrow_messages.OPEN_FILES


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["there", "gone"])
def test_flipped_bits_of_a_row_file_are_found(tmp_path: Path, capsys: Any, inputs: str) -> None:
    """1,000 flips anywhere in the file, while it is open or before: the file is made again, or the
    error names it; no row differs."""
    path = write(records(np.random.default_rng(0), 60), tmp_path / "rows", ".parquet")
    rows = opened(path, tmp_path / "cache")
    (row_file,) = (tmp_path / "cache").iterdir()
    whole, expected = row_file.read_bytes(), rows.batch(np.arange(60))
    rng, remade = np.random.default_rng(1), 0
    make = row_store._make
    for number in range(1000):
        at = int(rng.integers(len(whole)))
        if number % 2:
            rows = opened(path, tmp_path / "cache")
        with open(row_file, "r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << int(rng.integers(8))]))
        arrow_messages._opened.cache_clear()
        if inputs == "gone":
            row_store._make = refuse_to_make
        try:
            made = rows if number % 2 else opened(path, tmp_path / "cache")
            batch = made.batch(np.arange(60))
        except BadData as error:
            assert inputs == "gone"
            assert str(row_file) in str(error) or "no inputs" in str(error)
        else:
            for name, array in expected.items():
                assert np.array_equal(array, batch[name]), (number, at, name)
        finally:
            row_store._make = make
        if not row_file.exists() or row_file.read_bytes()[at] != whole[at]:
            row_file.write_bytes(whole)
        else:
            remade += 1
        capsys.readouterr()
    assert remade > 500 or inputs == "gone"


def refuse_to_make(*_args: object) -> None:
    raise BadData("no inputs")


@pytest.mark.parametrize("form", ["digests", "stream", ".parquet"])
def test_a_shard_that_is_cut_short_during_a_run(tmp_path: Path, form: str) -> None:
    """An error with the name of the file, and no SIGBUS; a row file is made again."""
    path = write(records(np.random.default_rng(0), 600), tmp_path / "rows", form)
    rows = opened(path, tmp_path / "cache")
    expected = rows.batch(np.arange(600))
    file = next((tmp_path / "cache").iterdir()) if form == ".parquet" else path
    os.truncate(file, file.stat().st_size // 3)
    if form == ".parquet":
        again = rows.batch(np.arange(600))
        assert all(np.array_equal(again[name], array) for name, array in expected.items())
    else:
        with pytest.raises(BadData, match=f"{path}: cut short: it ends before byte"):
            rows.batch(np.arange(600))


@pytest.mark.parametrize("form", ["digests", ".arrow"])
def test_a_copy_has_the_same_fingerprint(tmp_path: Path, form: str) -> None:
    """Also where buffers are empty: no row has a mask or a source."""
    table = records(np.random.default_rng(0), 60, masks=False)
    table = table.set_column(3, "source", pa.nulls(60, pa.string()))
    path = write(table, tmp_path / "rows", form)
    (copy := tmp_path / "copy.arrow").write_bytes(path.read_bytes())
    one, other = (fingerprint(from_path(str(p), "tokens")[0]) for p in (path, copy))
    assert one == other
