"""Commands on a bucket of an S3 server that fails, stalls and cuts requests.

They need moto and s3fs, which are no part of the `dev` extra because moto brings 200 MB of packages
of its own: `pip install --target DIR 'moto[server]' s3fs` and PYTHONPATH=DIR.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command
from waiting import until

pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

from bucket_server import Proxy, bucket_server, environment

from sabia.core.shards.stores import objects

ROWS = 100
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with bucket_server() as proxy:
        yield proxy


@pytest.fixture
def bucket(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    server.clear()
    yield server
    server.share, server.most, server.gate, server.retry_after = 0.0, 10**9, None, "0"
    server.kinds = ("fail", "stall", "cut")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("pages"), random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 8))) for _ in range(2000)]
    for n in range(3):
        texts = [" ".join(draw.choices(words, k=60)) for _ in range(ROWS)]
        texts[10], texts[20] = texts[3], f"{texts[4]} more"
        ids = [f"{n}-{i}" for i in range(ROWS)]
        pq.write_table(pa.table({"id": ids, "text": texts}), folder / f"s{n}.parquet")
    return folder


def sabia(*words: str, code: int = 0) -> str:
    done = subprocess.run([*Command(*words)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def sent(pages: Path) -> str:
    for path in pages.iterdir():
        objects.upload(path, f"s3://bucket/pages/{path.name}")
    return "s3://bucket/pages"


def fetched(url: str, to: Path) -> Path:
    for name in objects.objects_below(url):
        objects.download(f"{url}/{name}", to / name)
    return to


STAGES = {
    "classify": ("classify",),
    "dedup": ("dedup",),
    "removed": ("dedup", "--removed", "OUT.removed"),
    "workers": ("dedup", "-j", "2"),
    "tokenize": ("tokenize", "--vocab-size", "500", "--length", "64"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_outputs_equal_local_ones_with_failures_and_a_second_run_reads_no_shard(
    stage: str, bucket: Proxy, pages: Path, tmp_path: Path
) -> None:
    given, here, there = sent(pages), tmp_path / "here", f"s3://bucket/{stage}"
    bucket.clear()
    bucket.share = 0.05
    sabia(*(word.replace("OUT", str(here)) for word in STAGES[stage]), str(pages), "-o", str(here))
    words = [word.replace("OUT", there) for word in STAGES[stage]]
    sabia(*words, given, "-o", there)
    assert len(bucket.faults) >= 1
    bucket.share = 0.0
    got = fetched(there, tmp_path / "there")
    shards = sorted(path.name for path in here.glob("part-*"))
    assert shards == sorted(path.name for path in got.glob("part-*"))
    for name in shards:
        one, other = (pq.read_table(folder / name) for folder in (here, got))
        assert one.replace_schema_metadata().equals(other.replace_schema_metadata())
    if stage == "tokenize":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            mine, its = (folder / "_tokenizer" / name for folder in (here, got))
            assert mine.read_bytes() == its.read_bytes()
    if stage == "removed":
        removed = fetched(f"{there}.removed", tmp_path / "there.removed")
        assert len(list(removed.glob("part-*"))) == 3
        for path in (tmp_path / "here.removed").glob("part-*"):
            one, other = pq.read_table(path), pq.read_table(removed / path.name)
            assert one.replace_schema_metadata().equals(other.replace_schema_metadata())
    bucket.clear()
    assert "3 shards already done" in sabia(*words, given, "-o", there)
    read = [path for path in bucket.read_objects() if "/part-" in path]
    assert not read
    if stage != "removed":  # its record holds the columns of all inputs, which footers tell
        assert not [path for path in bucket.read_objects() if "/pages/" in path]


def test_rows_on_a_bucket_are_streamed_into_pipes_and_files(
    bucket: Proxy, pages: Path, tmp_path: Path
) -> None:
    given = sent(pages)
    sabia("dedup", given, "-o", "s3://bucket/one/o.jsonl.zst")
    sabia("dedup", "s3://bucket/one/o.jsonl.zst", "-o", str(tmp_path / "o.parquet"))
    sabia("dedup", str(pages), "-o", str(tmp_path / "p.parquet"))
    one, other = (pq.read_table(tmp_path / f"{n}.parquet", columns=["id", "text"]) for n in "op")
    assert one.equals(other)
    found = objects.objects_below("s3://bucket/one")
    assert list(found) == [".o.jsonl.zst.sabia.json", "o.jsonl.zst"]


def test_the_wait_that_the_server_asks_for(bucket: Proxy) -> None:
    bucket.share, bucket.most, bucket.kinds, bucket.retry_after = 1.0, 1, ("fail",), "1.5"
    objects.put("s3://bucket/x", b"1")
    (_, _, first), (_, _, second) = bucket.requests
    assert bucket.faults == ["fail"]
    assert second - first >= 1.5


def test_a_stall_longer_than_the_time_limit(bucket: Proxy, pages: Path, monkeypatch) -> None:
    monkeypatch.setenv("FSSPEC_S3", json.dumps({"config_kwargs": {"read_timeout": 1}}))
    given = sent(pages)
    bucket.clear()
    bucket.share, bucket.most, bucket.kinds, bucket.stall_s = 1.0, 1, ("stall",), 4.0
    sabia("dedup", given, "-o", "s3://bucket/stalled")
    assert bucket.faults == ["stall"]
    assert len(objects.objects_below("s3://bucket/stalled")) == 4


def test_an_upload_that_is_killed_shows_nothing(bucket: Proxy, tmp_path: Path) -> None:
    import threading

    big = tmp_path / "big"
    big.write_bytes(random.Random(2).randbytes(objects.PART_BYTES * 2 + 5))
    bucket.gate = threading.Event()
    code = (
        "from sabia.core.shards.stores.objects import upload\n"
        f"upload({str(big)!r}, 's3://bucket/killed/big')"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: any("partNumber" in path for _, path, _ in bucket.requests))
    child.send_signal(signal.SIGKILL)
    child.wait()
    bucket.gate.set()
    assert not objects.objects_below("s3://bucket/killed")
    bucket.gate = None
    objects.upload(big, "s3://bucket/killed/big")
    assert any("partNumber=3" in path for _, path, _ in bucket.requests)
    assert objects.read_object("s3://bucket/killed/big") == big.read_bytes()


def one_line(text: str) -> str:
    (line,) = (line for line in text.splitlines() if "error:" in line)
    return line


def test_no_credentials_and_no_bucket_are_said_in_one_line(
    bucket: Proxy, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = one_line(sabia("dedup", "s3://none/pages", "-o", "s3://bucket/o", code=2))
    assert "s3://none/pages: no such object, folder or bucket" in said
    said = one_line(sabia("dedup", str(pages), "-o", "s3://none/o", code=1))
    assert "s3://none/o" in said
    assert "bucket does not exist" in said
    given = sent(pages)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    said = one_line(sabia("dedup", given, "-o", "s3://bucket/o", code=1))
    assert "Unable to locate credentials" in said
    assert os.environ.get("AWS_ACCESS_KEY_ID") is None


def test_a_server_that_stays_busy_is_an_error(bucket: Proxy, monkeypatch) -> None:
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(objects, "LONGEST_WAIT_S", 0.02)
    bucket.share, bucket.kinds = 1.0, ("fail",)
    with pytest.raises(objects.Failed, match=r"^s3://bucket/x: .*reduce your request rate"):
        objects.put("s3://bucket/x", b"1")
    assert len(bucket.faults) >= objects.ATTEMPTS * objects.REQUEST_ATTEMPTS
