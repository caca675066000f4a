"""`--redis`: datasketch's own MinHashLSH reads the index, and is the judge of what is in it."""

import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasketch
import numpy as np
import pyarrow.parquet as pq
import pytest
from in_process import stage
from planted import VOCABULARY, make_texts, write
from waiting import until

from sabia.core.errors import BadData, Failed, MissingBackend, UsageError
from sabia.core.options.dedup import DedupOptions
from sabia.core.text.dedup import lsh
from sabia.core.text.dedup.redis_index import RedisIndex, readable
from sabia.kernels.minhash.definitions import SketchConfig
from sabia.kernels.minhash.interface import sketch as sketch_documents

CONFIG = {"engine": "numpy", "signatures": "datasketch"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a Redis of our own."""
    redis = pytest.importorskip("redis", reason="the client is an extra")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = str(tmp_path_factory.mktemp("redis"))
    words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", place, "--save", ""]
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    try:
        until(lambda: answers(redis, port), process)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def answers(redis: Any, port: int) -> bool:
    """Whether the server listens by now."""
    try:
        return bool(redis.Redis(port=port).ping())
    except redis.ConnectionError:
        return False


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest) -> str:
    """An index that no other test has."""
    return f"redis://{server}/0?name={abs(hash(request.node.nodeid))}"


def run(paths: list[str], out: Path, url: str, **given: Any) -> Path:
    stage("dedup", inputs=paths, out=out, redis=url, **CONFIG | given)
    return out


def sketch(**given: Any) -> SketchConfig:
    return lsh.sketch_of(DedupOptions(**CONFIG | given), 0)


def ids(out: Path) -> list[str]:
    return pq.read_table(out)["id"].to_pylist()


def basename(url: str) -> bytes:
    return url.rpartition("=")[2].encode()


def theirs(url: str) -> Any:
    """datasketch's own index over the same basename."""
    made, (host, port) = sketch(), url.split("/")[2].split(":")
    return datasketch.MinHashLSH(
        num_perm=made.permutations, params=(made.bands, made.rows),
        storage_config={"type": "redis", "basename": basename(url),
                        "redis": {"host": host, "port": int(port)}},
    )  # fmt: skip


def their_signature(text: str) -> Any:
    data = np.frombuffer(text.encode(), np.uint8)
    sketches = sketch_documents(data, np.array([0, len(data)]), SketchConfig(bands=0))
    signature = datasketch.MinHash(num_perm=128, seed=0, hashfunc=int)
    for shingle in sketches.shingles.tolist():
        signature.update(shingle)
    return signature


def words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(VOCABULARY, k=count))


def corpus(path: Path, texts: list[str], prefix: str) -> list[str]:
    path.mkdir()
    return write(path, texts, id=[f"{prefix}{i}" for i in range(len(texts))])


def test_datasketch_sees_and_queries_what_was_kept(tmp_path: Path, url: str) -> None:
    texts, _ = make_texts(random.Random(1), 60, 40)
    kept = ids(run(write(tmp_path, texts), tmp_path / "o.parquet", url))
    index = theirs(url)
    assert sorted(map(readable, index.keys)) == sorted(kept)
    assert all(len(index.keys[key]) == sketch().bands for key in index.keys)
    for name in kept:
        assert name in index
        assert name in index.query(their_signature(texts[int(name[1:])]))
    index.remove(kept[0])  # their way of taking out finds all that we put in
    assert kept[0] not in index.query(their_signature(texts[int(kept[0][1:])]))


def test_the_layout_is_theirs_to_the_byte(tmp_path: Path, url: str, server: str) -> None:
    import redis

    texts, _ = make_texts(random.Random(2), 20, 0)
    kept = ids(run(write(tmp_path, texts), tmp_path / "o.parquet", url))
    other = url + "theirs"
    index = theirs(other)
    for name in kept:
        index.insert(name, their_signature(texts[int(name[1:])]))
    client = redis.Redis(port=int(server.split(":")[1]))

    def held(name: bytes) -> dict[bytes, object]:
        keys = [key for key in client.scan_iter(name + b"_*") if not key.startswith(name + b"_s")]
        readers = {b"hash": client.hgetall, b"list": lambda k: client.lrange(k, 0, -1),
                   b"set": client.smembers}  # fmt: skip
        plain = {key: readers[client.type(key)](key) for key in keys}
        return {
            key.removeprefix(name): {k: v.removeprefix(name) for k, v in value.items()}
            if isinstance(value, dict) else value
            for key, value in plain.items()
        }  # fmt: skip

    ours = held(basename(url))
    assert len(ours) > 20
    assert ours == held(basename(other))


def test_later_runs_drop_what_earlier_ones_hold(tmp_path: Path, url: str) -> None:
    source = random.Random(3)
    old, new = [words(source, 100) for _ in range(20)], [words(source, 100) for _ in range(20)]
    first = corpus(tmp_path / "a", old, "a")
    near = [f"changed {text}" for text in old[:5]]
    near[0] += " " + words(source, 24)
    chained = [f"{near[0]} {words(source, 30)}"]  # goes with the copy that it is like
    second = corpus(tmp_path / "b", new + old[5:10] + near + chained, "b")
    assert len(ids(run(first, tmp_path / "a.parquet", url))) == 20
    gone = tmp_path / "gone.parquet"
    out = run(second, tmp_path / "b.parquet", url, removed=gone)
    assert ids(out) == [f"b{i}" for i in range(20)]
    rows = pq.read_table(gone).to_pylist()
    assert [row["kept_id"] for row in rows] == [f"a{i}" for i in [*range(5, 10), *range(5), 0]]
    assert {row["reason"] for row in rows} == {"near"}
    assert [row["similarity"] for row in rows[:5]] == [1.0] * 5
    assert all(row["similarity"] >= 0.7 for row in rows[5:10])
    assert rows[10]["similarity"] is None
    assert {readable(key) for key in theirs(url).keys} == {
        *(f"a{i}" for i in range(20)), *(f"b{i}" for i in range(20))
    }  # fmt: skip


@pytest.mark.parametrize("verify", [True, False])
def test_the_same_go_as_against_an_index_on_disk(tmp_path: Path, url: str, verify: bool) -> None:
    texts, _ = make_texts(random.Random(4), 80, 120)
    first = corpus(tmp_path / "a", texts[:100], "a")
    second = corpus(tmp_path / "b", texts[100:], "b")
    for disk in (True, False):
        for part, paths in (("a", first), ("b", second)):
            out = tmp_path / f"{part}{disk}.parquet"
            place = {"index": tmp_path / "i"} if disk else {}
            place |= {"against": tmp_path / "i"} if disk and part == "b" else {}
            run(paths, out, "" if disk else url, verify=verify, **place)
    assert ids(tmp_path / "aTrue.parquet") == ids(tmp_path / "aFalse.parquet")
    assert 0 < len(ids(tmp_path / "bTrue.parquet")) < 100
    disk, redis = (set(ids(tmp_path / f"b{disk}.parquet")) for disk in (True, False))
    assert len(disk ^ redis) <= (4 if verify else 0), "an estimate errs only near the threshold"


def test_documents_of_other_programs_count_too(tmp_path: Path, url: str) -> None:
    """Behind those of earlier runs, and where enough slots are equal."""
    source = random.Random(5)
    texts = [words(source, 80) for _ in range(5)]
    run(corpus(tmp_path / "a", texts[:1], "a"), tmp_path / "a.parquet", url)
    theirs(url).insert("a second", their_signature(texts[0]))
    theirs(url).insert("theirs", their_signature(texts[1]))
    unlike = their_signature(texts[2])
    unlike.hashvalues[6:] ^= 1  # shares the first of 21 bands
    theirs(url).insert("unlike", unlike)
    gone = tmp_path / "gone.parquet"
    out = run(corpus(tmp_path / "b", texts, "b"), tmp_path / "b.parquet", url, removed=gone)
    assert ids(out) == ["b2", "b3", "b4"]
    assert pq.read_table(gone)["kept_id"].to_pylist() == ["a0", "theirs"]


def test_running_again_changes_nothing(tmp_path: Path, url: str) -> None:
    texts, _ = make_texts(random.Random(6), 30, 30)
    first, second = (corpus(tmp_path / n, texts[i::2], n) for i, n in enumerate("ab"))
    outs = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    run(first, outs[0], url)
    run(second, outs[1], url)
    made, index = [out.read_bytes() for out in outs], sorted(theirs(url).keys)
    for paths, out, before in zip((first, second), outs, made, strict=True):
        stamp = out.stat().st_mtime_ns
        run(paths, out, url)
        assert out.stat().st_mtime_ns == stamp, "a finished output was made again"
        out.unlink()
        assert run(paths, out, url).read_bytes() == before
    assert sorted(theirs(url).keys) == index


KILLED = """
import os, signal, sys
from sabia.cli.main import main
from sabia.core.text.dedup import redis_index
redis_index.BATCH = 8
insert, calls = redis_index.RedisIndex.insert, []
def failing(self, ids, slots=None):
    calls.extend([] if slots is None else [ids])
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    insert(self, ids, slots)
redis_index.RedisIndex.insert = failing
sys.argv = ["sabia", "dedup", *sys.argv[1:]]
main()
"""


def test_a_run_that_was_killed_is_finished_by_itself(tmp_path: Path, url: str) -> None:
    texts = [words(random.Random(i), 60) for i in range(30)]
    paths = write(tmp_path, [*texts, *texts[:3]])
    options = ["--signatures", "datasketch", "--engine", "numpy", "--redis"]

    def command(*head: str, url: str) -> int:
        out = str(tmp_path / f"{basename(url).decode()}.parquet")
        line = [sys.executable, *head, *paths, *options, url, "-o", out]
        return subprocess.run(line, check=False, stderr=subprocess.DEVNULL).returncode

    assert command("-c", KILLED, url=url) == -9
    index, out = theirs(url), tmp_path / f"{basename(url).decode()}.parquet"
    assert not out.exists()
    assert len(list(index.keys)) == 16
    assert all(len(index.query(their_signature(texts[i]))) == 1 for i in range(16))
    for place in (url, url + "whole"):
        assert command("-m", "sabia.cli.main", "dedup", url=place) == 0
    assert len(ids(out)) == 30
    assert ids(out) == ids(tmp_path / f"{basename(url).decode()}whole.parquet")
    assert all(len(index.keys[key]) == sketch().bands for key in index.keys)
    assert len(list(index.keys)) == 30


def test_what_another_program_left_behind_is_replaced(
    tmp_path: Path, url: str, server: str
) -> None:
    import redis

    client, key = redis.Redis(port=int(server.split(":")[1])), pickle.dumps("d0", 4)
    client.rpush(basename(url) + b"_keys" + key, b"of a document that was removed in part")
    run(write(tmp_path, [words(random.Random(14), 40)]), tmp_path / "o.parquet", url)
    assert len(theirs(url).keys[key]) == sketch().bands


def test_an_id_that_another_run_takes_at_the_same_time(url: str) -> None:
    """It is refused when it is its turn; the document that was first stays whole."""
    here, there = (RedisIndex(url, DedupOptions(**CONFIG), 0, key) for key in ("a", "b"))
    for index in (here, there):
        index.register()
        index.insert(["both"])  # to look: it is free
    ours, other = (np.full((2, 126), n, np.uint32) for n in (1, 2))
    here.insert(["first", "both"], ours)
    with pytest.raises(BadData, match="the id 'both' belongs to another document"):
        there.insert(["free", "both"], other)
    here.insert(["first", "both"], other)  # inserted before: stays as it is
    assert sorted(map(readable, theirs(url).keys)) == ["both", "first", "free"]
    assert theirs(url).keys[pickle.dumps("both", 4)] == [b"\0\0\0\1" * 6] * 21
    for table in theirs(url).hashtables:
        assert sorted(table.itemcounts().values()) == [1, 2]


def test_phases_and_a_dry_run(tmp_path: Path, url: str) -> None:
    paths = write(tmp_path, make_texts(random.Random(8), 20, 20)[0], parts=2)
    whole = run(paths, tmp_path / "dry", url, dry_run=True)
    assert not whole.exists()
    assert not list(theirs(url).keys)
    for phase in ("sketch", "compare", "write"):
        run(paths, tmp_path / "o", url, scratch=tmp_path / "s", phase=phase)
    kept = [i for path in sorted((tmp_path / "o").glob("*.parquet")) for i in ids(path)]
    assert sorted(map(readable, theirs(url).keys)) == sorted(kept)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"ngram": 4}, "ngram=5.*, this run .*ngram=4"), ({"permutations": 64}, "permutations=128"),
     ({"threshold": 0.71}, "threshold=0.7 .*threshold=0.71 "), ({"verify": False}, "bands=21")],
)  # fmt: skip
def test_other_parameters_are_refused(tmp_path: Path, url: str, changed: dict, said: str) -> None:
    paths = write(tmp_path, [words(random.Random(9), 40)])
    run(paths, tmp_path / "o.parquet", url)
    with pytest.raises(UsageError, match=said):
        run(paths, tmp_path / "p.parquet", url, **changed)
    with pytest.raises(UsageError, match=r"seed=0.*, this run .*seed=3"):
        run(paths, tmp_path / "p.parquet", url, seed=3)


def test_what_cannot_be_is_refused(
    tmp_path: Path, url: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(10)
    texts = [words(source, 40) for _ in range(2)]
    paths, out = write(tmp_path, texts), tmp_path / "o.parquet"
    with pytest.raises(UsageError, match="--redis: only with --signatures datasketch"):
        run(paths, out, url, signatures="sabia")
    with pytest.raises(UsageError, match="--redis: not together with --index"):
        run(paths, out, url, index=tmp_path / "i")
    with pytest.raises(UsageError, match=r"expected redis://HOST:PORT/DB\?name=NAME") as refused:
        run(paths, out, f"redis://user:secret@{server}/0")
    assert "secret" not in str(refused.value)
    with pytest.raises(UsageError, match="Invalid IPv6 URL"):
        run(paths, out, "redis://[::1")
    theirs(url).insert("x", their_signature(texts[0]))
    with pytest.raises(UsageError, match="this index was not created by sabia"):
        run(paths, out, url)
    run(paths, out, url + "ids")
    monkeypatch.setattr("sabia.core.text.dedup.redis_index.BATCH", 1)
    other = write(tmp_path, [words(source, 40) for _ in range(2)], id=["new", "d1"])
    with pytest.raises(BadData, match="the id 'd1' belongs to another document"):
        run(other, out, url + "ids")
    assert sorted(map(readable, theirs(url + "ids").keys)) == ["d0", "d1"]
    with pytest.raises(BadData, match="the id 'same' is twice"):
        run(write(tmp_path, texts, id=["same", "same"]), out, url + "twice")
    assert not list(theirs(url + "twice").keys)


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingBackend, match="pip install redis"):
        run(write(tmp_path, ["one"]), tmp_path / "o.parquet", "redis://127.0.0.1:1/0?name=web")


def test_a_server_that_is_away(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="the client is an extra")
    away = "redis://:secret@127.0.0.1:1/0?name=web"
    with pytest.raises(Failed, match=r"--redis redis://127.0.0.1:1/0\?name=web: Error") as failed:
        run(write(tmp_path, ["one"]), tmp_path / "o.parquet", away)
    assert "secret" not in str(failed.value)
    assert str(failed.value).isprintable()


def test_what_is_damaged_is_said_in_one_line(tmp_path: Path, url: str, server: str) -> None:
    import redis

    client, name = redis.Redis(port=int(server.split(":")[1])), basename(url)
    paths, out = write(tmp_path, [words(random.Random(11), 40)]), tmp_path / "o.parquet"
    client.set(name + b"_sabia", '{"bro')
    with pytest.raises(UsageError, match=r"index has b'.\"bro', this run"):
        run(paths, out, url)
    client.delete(name + b"_sabia")
    client.set(name + b"_bucket_\0\0", "no hash")
    with pytest.raises(Failed, match=r"^--redis \S+: WRONGTYPE|wrong kind of value") as failed:
        run(paths, out, url)
    assert str(failed.value).isprintable()


class _Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_keys_of_strangers_run_no_code(tmp_path: Path, url: str, server: str) -> None:
    text, trap = words(random.Random(12), 80), tmp_path / "trap"
    run(write(tmp_path, [words(random.Random(13), 80)]), tmp_path / "o.parquet", url)
    theirs(url).insert(_Planted(trap), their_signature(text))
    gone = tmp_path / "gone.parquet"
    out = run(corpus(tmp_path / "b", [text], "b"), tmp_path / "b.parquet", url, removed=gone)
    assert ids(out) == []
    kept = pq.read_table(gone)["kept_id"].to_pylist()
    assert kept == [readable(pickle.dumps(_Planted(trap)))]
    assert "mkdir" in kept[0]
    assert not trap.exists()
    theirs(url).query(their_signature(text))
    assert trap.exists(), "the trap is one"


@pytest.mark.parametrize("text", ["", "a", "é" * 100, "x" * 300, "x" * 70_000, "\n\0"])
def test_keys_that_are_strings_are_read(text: str) -> None:
    assert readable(pickle.dumps(text, 4)) == text
    assert readable(text.encode()) == text or not text
