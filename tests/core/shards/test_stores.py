"""Files and folders at URLs, in a store in memory: whole or not there, and read once."""

import io
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from sabia.core.errors import ExitCode, Failed, MissingBackend, UsageError
from sabia.core.shards import layout
from sabia.core.shards.inputs import expand, from_path
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import run_map
from sabia.core.shards.stores import listed, mirrors, objects


class _Upload(MemoryFile):
    def close(self) -> None:
        """It is there after `commit`."""


class Store(MemoryFileSystem):
    """An object store that counts what is read, and can be told to fail."""

    protocol = "shop"
    cachable = False
    store: dict = {}
    pseudo_dirs = [""]
    failures: list[Exception] = []  # of the next operations
    opened: list[str] = []  # for reading

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("shop://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **settings):
        if Store.failures:
            raise Store.failures.pop(0)
        if mode == "wb":
            return _Upload(self, path)
        Store.opened.append(path)
        return super()._open(path, mode, **settings)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Store]]:
    fsspec.register_implementation("shop", Store, clobber=True)
    Store.store, Store.pseudo_dirs, Store.failures, Store.opened = {}, [""], [], []
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(objects, "LONGEST_WAIT_S", 2.0)
    yield Store


def shards(folder: Path, count: int = 3, rows: int = 20) -> Path:
    folder.mkdir()
    for n in range(count):
        table = {
            "id": [f"{n}-{i}" for i in range(rows)],
            "text": [f"text {i}" for i in range(rows)],
        }
        pq.write_table(pa.table(table), folder / f"s{n}.parquet")
    return folder


def upper(batches, context):
    for batch in batches:
        texts = pa.array([text.upper() for text in batch.column("text").to_pylist()])
        yield batch.set_column(batch.schema.get_field_index("text"), "text", texts)


def rows_at(url: str) -> list[dict]:
    sources = from_path(url, "document")
    return [row for one in sources for batch in one.batches() for row in batch.to_pylist()]


def test_an_object_reads_as_a_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "TAIL_BYTES", 100)
    draw = random.Random(1)
    data = draw.randbytes(1_000)
    objects.put("shop://bucket/a", data)
    plain = io.BytesIO(data)
    with objects.open_object("shop://bucket/a") as file:
        for _ in range(500):
            where, size = draw.randrange(1_100), draw.choice([-1, 0, 1, 50, 300])
            assert file.seek(where) == plain.seek(where)
            assert file.read(size) == plain.read(size)
            assert file.tell() == min(plain.tell(), max(where, 1_000)) or where > 1_000
    assert Store.opened == ["/bucket/a"]
    objects.put("memory://bucket/a", data)
    assert objects.read_object("memory://bucket/a") == data


@pytest.mark.parametrize("error", [ConnectionError("cut"), OSError(16, "SlowDown")])
def test_what_may_pass_is_tried_again(error: Exception, capfd) -> None:
    Store.failures = [error] * (objects.ATTEMPTS - 1)
    objects.put("shop://bucket/a", b"x")
    assert Store.store["/bucket/a"].getvalue() == b"x"
    assert capfd.readouterr().err.count("tried again in") == objects.ATTEMPTS - 1
    Store.failures = [error] * objects.ATTEMPTS
    with pytest.raises(Failed, match=r"^shop://bucket/b: "):
        objects.put("shop://bucket/b", b"x")
    assert "/bucket/b" not in Store.store


def test_the_server_says_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Exception):
        response = {"ResponseMetadata": {"HTTPHeaders": {"retry-after": "1.5"}}}

    waits: list[float] = []
    monkeypatch.setattr(objects, "_sleep", waits.append)
    error = OSError(16, "SlowDown")
    error.__cause__ = Busy()
    Store.failures = [error, ConnectionError("cut")]
    objects.put("shop://bucket/a", b"x")
    assert waits[0] == 1.5
    assert waits[1] <= 0.01


class NoCredentialsError(Exception):
    """As that of botocore."""


PERMANENT = [PermissionError("no"), FileNotFoundError("no bucket"), NoCredentialsError("none")]


@pytest.mark.parametrize("error", PERMANENT)
def test_what_cannot_pass_fails_at_once(error: Exception) -> None:
    Store.failures = [error, ConnectionError("not reached")]
    with pytest.raises(Failed) as caught:
        objects.put("shop://bucket/a", b"x")
    assert caught.value.exit_code == ExitCode.FAILED
    assert len(Store.failures) == 1


def test_an_upload_is_not_seen_before_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    seen = []
    write = MemoryFile.write
    monkeypatch.setattr(objects, "CHUNK_BYTES", 10)
    monkeypatch.setattr(_Upload, "write", lambda self, data: (
        seen.append(list(Store.store)), write(self, data))[1], raising=False)  # fmt: skip
    (tmp_path / "a").write_bytes(b"x" * 35)
    objects.upload(tmp_path / "a", "shop://bucket/a")
    assert seen == [[]] * 4
    assert Store.store["/bucket/a"].getvalue() == b"x" * 35


def test_an_upload_that_is_cut_leaves_what_was_there(monkeypatch, tmp_path: Path) -> None:
    objects.put("shop://bucket/a", b"old")

    def stopped(self, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(_Upload, "write", stopped, raising=False)
    with pytest.raises(KeyboardInterrupt):
        objects.put("shop://bucket/a", b"new")
    assert objects.read_object("shop://bucket/a") == b"old"


def test_outputs_equal_local_ones_and_are_not_read_again(tmp_path: Path) -> None:
    given = str(shards(tmp_path / "in"))
    here = Job("classify", inputs=(given,), out=str(tmp_path / "out"))
    there = replace(here, out="shop://bucket/out")
    run_map(here, upper)
    run_map(there, upper)
    names = [f"part-{n:05d}.parquet" for n in range(3)]
    assert list(objects.objects_below("shop://bucket/out")) == ["_manifest.json", *names]
    assert rows_at("shop://bucket/out") == rows_at(str(tmp_path / "out"))
    manifest = listed.read_json("shop://bucket/out/_manifest.json")
    assert [shard["rows"] for shard in manifest["shards"]] == [20] * 3
    Store.opened.clear()
    again = run_map(there, upper)
    assert (again.shards_skipped, again.rows_out) == (3, 60)
    assert set(Store.opened) == {"/bucket/out/_manifest.json"}
    # another input is no finished output, and an object that was changed is written again
    pq.write_table(pa.table({"text": ["new"]}), tmp_path / "in" / "s1.parquet")
    assert run_map(there, upper).shards_done == 1
    objects.put("shop://bucket/out/part-00000.parquet", b"damaged")
    assert run_map(there, upper).shards_done == 1
    assert len(rows_at("shop://bucket/out")) == 41


def test_a_damaged_manifest_is_written_again(tmp_path: Path) -> None:
    job = Job("classify", inputs=(str(shards(tmp_path / "in")),), out="shop://bucket/out")
    run_map(job, upper)
    whole = objects.read_object("shop://bucket/out/_manifest.json")
    objects.put("shop://bucket/out/_manifest.json", whole.replace(b'"rows": 20', b'"rows": 21'))
    assert run_map(job, upper).shards_skipped == 3
    assert objects.read_object("shop://bucket/out/_manifest.json") == whole


def test_fewer_inputs_leave_no_part_and_other_inputs_are_refused(tmp_path: Path) -> None:
    given = shards(tmp_path / "in")
    job = Job("classify", inputs=(str(given),), out="shop://bucket/out")
    run_map(job, upper)
    (given / "s2.parquet").unlink()
    with pytest.raises(UsageError, match="of other inputs"):
        run_map(job, upper)
    run_map(replace(job, force=True), upper)
    assert len(listed.versions("shop://bucket/out")) == 3  # two parts and the manifest
    other = replace(job, inputs=(str(shards(tmp_path / "other", 2, 7)),))
    with pytest.raises(UsageError, match="of other inputs"):
        run_map(other, upper)
    run_map(replace(other, append=True), upper)
    assert len(rows_at("shop://bucket/out")) == 54


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".jsonl.gz", ".arrow"])
def test_one_file(tmp_path: Path, ending: str) -> None:
    job = Job("classify", inputs=(str(shards(tmp_path / "in")),), out=f"shop://bucket/o{ending}")
    assert run_map(job, upper).shards_done == 3
    assert run_map(job, upper).shards_skipped == 3
    assert len(rows_at(f"shop://bucket/o{ending}")) == 60
    other = replace(job, inputs=(str(shards(tmp_path / "other", 1)),))
    with pytest.raises(UsageError, match="of other inputs"):
        run_map(other, upper)


def test_rejects_are_there_and_go_again(tmp_path: Path) -> None:
    given = tmp_path / "a.jsonl"
    given.write_text('{"text": "one"}\n{"no": 1}\n')
    job = Job("classify", inputs=(str(given),), out="shop://bucket/out")
    assert run_map(job, upper).rejected == 1
    assert list(objects.objects_below("shop://bucket/out.rejects")) == ["part-00000.parquet"]
    given.write_text('{"text": "one"}\n')
    run_map(job, upper)
    assert not objects.objects_below("shop://bucket/out.rejects")


def test_inputs_of_a_folder_a_glob_and_one_object(tmp_path: Path) -> None:
    for path in shards(tmp_path / "in").iterdir():
        objects.upload(path, f"shop://bucket/in/language=pt/{path.name}")
    objects.put("shop://bucket/in/_manifest.json", b"{}")
    found = expand("shop://bucket/in")
    assert found == [f"shop://bucket/in/language=pt/s{n}.parquet" for n in range(3)]
    assert expand("shop://bucket/in/*/s[01].parquet") == found[:2]
    assert expand(found[2]) == found[2:]
    assert {row["language"] for row in rows_at("shop://bucket/in")} == {"pt"}
    for missing in ("shop://bucket/no", "shop://none/in", "shop://bucket/in/*/x*"):
        with pytest.raises(UsageError, match="no such object"):
            expand(missing)
    objects.put("shop://bucket/odd/a.txt", b"x")
    with pytest.raises(UsageError, match="no input files in it"):
        expand("shop://bucket/odd")


def test_file_urls_are_paths(tmp_path: Path) -> None:
    shards(tmp_path / "a b")
    assert from_path(f"file://{tmp_path}/a%20b", "document")[0].name == f"{tmp_path}/a b/s0.parquet"
    objects.put(f"file://{tmp_path}/deep/x", b"1")
    assert (tmp_path / "deep" / "x").read_bytes() == b"1"
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["x"]


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, module, line in (("s3://b/k", "s3fs", "s3"), ("gs://b/k", "gcsfs", "gs")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingBackend, match=rf"pip install 'sabia\[{line}\]'") as caught:
            objects.exists(url)
        assert caught.value.exit_code == ExitCode.MISSING


def test_a_fetched_folder_is_made_once_for_each_version(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    objects.put("shop://bucket/model/config.json", b"{}")
    objects.put("shop://bucket/model/a/w.safetensors", b"1")
    with_threads: list[str] = []
    threads = [threading.Thread(target=lambda: with_threads.append(mirrors.fetched("shop://bucket/model/")))
               for _ in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = set(with_threads)
    assert Path(first).name == "model"
    assert Path(first, "a/w.safetensors").read_bytes() == b"1"
    assert sorted(Store.opened) == ["/bucket/model/a/w.safetensors", "/bucket/model/config.json"]
    objects.put("shop://bucket/model/a/w.safetensors", b"2")
    second = mirrors.fetched("shop://bucket/model")
    assert Path(second, "a/w.safetensors").read_bytes() == b"2"
    assert Path(first, "a/w.safetensors").read_bytes() == b"1"
    assert Path(mirrors.fetched("shop://bucket/model/config.json")).read_bytes() == b"{}"
    with pytest.raises(UsageError, match="no such object"):
        mirrors.fetched("shop://bucket/none")
    month_ago = time.time() - mirrors.KEPT_S - 60
    os.utime(Path(first).parent, (month_ago, month_ago))
    mirrors.fetched("shop://bucket/model")
    assert Path(second).exists() and not Path(first).exists()


def test_a_folder_gets_what_is_changed_in_it() -> None:
    for name in ("same", "changed", "gone"):
        objects.put(f"shop://bucket/f/{name}", b"old")
    log: list[str] = []
    with mirrors.folder("shop://bucket/f") as local:
        Path(local, "changed").write_bytes(b"new")
        Path(local, "gone").unlink()
        Path(local, "deep").mkdir()
        Path(local, "config.json").write_bytes(b"{}")
        Path(local, "deep", "x").write_bytes(b"x")
        assert objects.read_object("shop://bucket/f/changed") == b"old"
    found = objects.objects_below("shop://bucket/f")
    assert list(found) == ["changed", "config.json", "deep/x", "same"]
    assert list(Store.store)[-1] == "/bucket/f/config.json"  # what makes it complete comes last
    assert objects.read_object("shop://bucket/f/changed") == b"new"
    with pytest.raises(ZeroDivisionError), mirrors.folder("shop://bucket/f") as local:
        Path(local, "same").unlink()
        log.append(str(1 / 0))
    assert objects.exists("shop://bucket/f/same")
    with mirrors.folder("shop://bucket/f", keep=False) as local:
        Path(local, "same").unlink()
    assert objects.exists("shop://bucket/f/same")


def test_rejects_among_the_shards_are_refused() -> None:
    job = Job("classify", out="shop://bucket/out")
    with pytest.raises(UsageError, match="only shards"):
        layout.check_outside(job, "shop://bucket/out/rejects", "--rejects")
    layout.check_outside(job, "shop://bucket/out.rejects", "--rejects")
