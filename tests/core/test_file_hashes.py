"""Hashes of all bytes of files, and their cache."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from xxhash import xxh3_128_hexdigest

from sabia.core import file_hashes
from sabia.core.file_hashes import content_hash
from sabia.core.generate.model_directory import model_fingerprint, weights_fingerprint
from sabia.core.shards.inputs import from_path
from sabia.core.shards.outputs import open_file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test, and files of any size and age are cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_hashes, "CACHED_BYTES", 0)
    monkeypatch.setattr(file_hashes, "SETTLED_NS", -1)
    return tmp_path / "cache" / "sabia" / "hashes"


def flip(path: Path, at: int) -> None:
    """Change one byte, and keep size and modification time."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_a_change_in_the_middle_changes_the_fingerprint(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    texts = [str(random.Random(n).random()) * 20 for n in range(3_000)]
    batch = pa.RecordBatch.from_pydict({"id": [str(n) for n in range(3_000)], "text": texts})
    with open_file(str(path), batch.schema) as file:
        file.write(batch)
    assert path.stat().st_size > 200_000 or ending == "parquet"
    [source] = from_path(str(path), "document")
    before = source.fingerprint()
    assert source.fingerprint() == before
    flip(path, path.stat().st_size // 2)
    assert source.fingerprint() != before


def test_a_change_in_the_middle_of_weights_changes_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(random.Random(0).randbytes(400_000))
    before = model_fingerprint(tmp_path), weights_fingerprint(tmp_path)
    flip(weights, 200_000)
    after = model_fingerprint(tmp_path), weights_fingerprint(tmp_path)
    assert before[0] != after[0] and before[1] != after[1]


def test_a_hash_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(100_001))
    expected = xxh3_128_hexdigest(path.read_bytes())
    assert content_hash(str(path)) == expected
    with monkeypatch.context() as without:
        without.setattr(file_hashes, "_digest", lambda _file: pytest.fail("read again"))
        assert content_hash(str(path)) == expected
    flip(path, 7)
    assert content_hash(str(path)) == xxh3_128_hexdigest(path.read_bytes()) != expected


def test_a_damaged_entry_is_computed_again(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(5_000))
    expected = content_hash(str(path))
    [entry] = own_cache.iterdir()
    whole, draw = entry.read_bytes(), random.Random(1)
    for damaged in (b"", b"[]", b"\xff", whole[:-9], *(bytearray(whole) for _ in range(200))):
        if isinstance(damaged, bytearray):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        entry.write_bytes(damaged)
        assert content_hash(str(path)) == expected


def test_a_file_that_was_just_written_is_not_cached(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "SETTLED_NS", 10**10)
    (tmp_path / "a").write_bytes(b"text")
    content_hash(str(tmp_path / "a"))
    assert not own_cache.exists()


def test_many_threads_and_a_cache_that_cannot_be_written(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(3_000_000))
    expected = xxh3_128_hexdigest(path.read_bytes())
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(content_hash, [str(path)] * 40)) == {expected}
    for entry in own_cache.iterdir():
        entry.unlink()
    own_cache.rmdir()
    own_cache.write_text("not a folder")
    assert content_hash(str(path)) == expected


def test_an_object_is_named_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe("/bucket/a", b"x" * 1_000)
    about: dict[str, Any] = {"size": 1_000}
    monkeypatch.setattr(type(files), "info", lambda _self, _path, **_: dict(about))

    def opened() -> Any:
        return files.open("/bucket/a", "rb")

    assert content_hash("memory://bucket/a", opened) == xxh3_128_hexdigest(b"x" * 1_000)
    about["ETag"] = '"1"'
    file_hashes.forget_objects()
    first = content_hash("memory://bucket/a")
    about["ETag"] = '"2"'
    assert first == content_hash("memory://bucket/a")  # in one run it is asked for once
    file_hashes.forget_objects()
    assert first != content_hash("memory://bucket/a")


def test_the_cache_keeps_the_newest_entries(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "KEPT_ENTRIES", 5)
    monkeypatch.setattr(file_hashes, "SWEPT_AFTER", 1)
    for number in range(20):
        path = tmp_path / f"f{number}"
        path.write_bytes(b"%d" % number)
        content_hash(str(path))
        newest = max(own_cache.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
        os.utime(newest, ns=(number * 10**9, number * 10**9))
    assert len(list(own_cache.iterdir())) == 5
    assert {round(e.stat().st_mtime) for e in own_cache.iterdir()} == set(range(15, 20))
