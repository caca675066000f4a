"""Checkpoints at a URL: retried, at most one on its way, resumed from on a fresh machine."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from waiting import HANG_S, until

from sabia.core.errors import BadData, Failed, MissingBackend, UsageError
from sabia.core.shards.stores import objects
from sabia.core.train.checkpoint import local, remote
from sabia.core.train.checkpoint.pieces import whole_pieces as whole
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import Saver, wait_for

URL = "flaky://bucket/run"


class Flaky(MemoryFileSystem):
    """An object store that can be told to fail, to wait and to count."""

    protocol = "flaky"
    cachable = False
    store: dict = {}
    pseudo_dirs = [""]
    failures = 0  # that many opens for writing fail
    gate: threading.Event | None = None  # writing waits for it
    log: list[str] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **settings):
        if "w" in mode:
            if Flaky.failures:
                Flaky.failures -= 1
                raise ConnectionError("connection reset")
            if Flaky.gate is not None:
                Flaky.gate.wait(HANG_S)
            Flaky.log.append(path.rpartition("run/")[2])
        return super()._open(path, mode, **settings)


@pytest.fixture(autouse=True)
def store(monkeypatch) -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store, Flaky.pseudo_dirs, Flaky.log = {}, [""], []
    Flaky.failures, Flaky.gate = 0, None
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(objects, "LONGEST_WAIT_S", 0.002)
    return Flaky


def state(step: int) -> dict[str, np.ndarray]:
    return {"param/w": np.full((3, 5), step, np.float32), "count": np.array(step)}


def save(saver: Saver, *steps: int) -> None:
    for step in steps:
        saver.save(step, whole(state(step)), {})
        wait_for(saver._commit)


def holds(found, step: int) -> bool:
    return found.step == step and bool((Reader(found).read("param/w") == step).all())


@pytest.mark.parametrize("url", [URL, "memory://somewhere/run", "file"])
def test_fresh_machine_resumes_from_the_url(tmp_path: Path, url: str) -> None:
    url = f"file://{tmp_path}/store" if url == "file" else url
    with Saver(tmp_path / "old", url) as saver:
        save(saver, 4)
    found = latest(tmp_path / "new", url)
    assert holds(found, 4)
    assert found.path == tmp_path / "new" / "step-00000004"
    assert found.checked
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["step-00000004"]


def test_mark_is_uploaded_last(tmp_path: Path, store) -> None:
    with Saver(tmp_path, URL) as saver:
        save(saver, 1)
    assert store.log[-2:] == ["step-00000001/manifest.json", "step-00000001/COMMITTED"]


def test_upload_is_tried_again(tmp_path: Path, store) -> None:
    store.failures = 5
    with Saver(tmp_path, URL) as saver:
        save(saver, 1)
    assert holds(latest(tmp_path / "new", URL), 1)
    assert saver.upload_s > 0


def test_upload_that_fails_for_good_is_said_at_the_next_step(tmp_path: Path, store) -> None:
    store.failures = 10**9
    saver = Saver(tmp_path, URL)
    save(saver, 1)
    with pytest.raises(Failed, match=r"flaky://bucket/run/.*connection reset"):
        until(saver.poll)
    assert holds(latest(tmp_path), 1)  # the spool has it
    assert latest(tmp_path / "new", URL) is None
    store.failures = 0
    save(saver, 2)
    saver.close()
    assert holds(latest(tmp_path / "new", URL), 2)


def test_one_upload_at_a_time_and_the_last_is_not_lost(tmp_path: Path, store) -> None:
    store.gate = threading.Event()
    saver = Saver(tmp_path, URL, keep=1)
    save(saver, 1, 2, 3)  # 1 is on its way, 2 and 3 wait in the spool only
    assert local.steps(tmp_path) == [3, 2, 1]  # nothing goes before a newer one is uploaded
    until(lambda: saver.upload_s >= 0.02)  # it is measured while it goes on
    store.gate.set()
    saver.close()
    folders = {name.partition("/")[0] for name in store.log}
    assert folders == {"step-00000001", "step-00000003"}
    assert local.steps(tmp_path) == [3]
    assert remote.Remote(URL).steps() == [3]


def test_retention_at_the_url(tmp_path: Path) -> None:
    with Saver(tmp_path, URL, keep=2, keep_every=4) as saver:
        for step in range(2, 13, 2):
            save(saver, step)
            wait_for(saver._upload)
            saver.poll()
    assert remote.Remote(URL).steps() == [12, 10, 8, 4]
    assert local.steps(tmp_path) == [12, 10, 8, 4]


@pytest.mark.parametrize("how", ["no mark", "flipped", "lost file", "cut manifest"])
def test_damaged_one_at_the_url_is_passed_over(tmp_path: Path, store, how: str, capfd) -> None:
    with Saver(tmp_path / "old", URL) as saver:
        save(saver, 1)
        wait_for(saver._upload)
        saver.poll()
        save(saver, 2)
    root, files = "/bucket/run/step-00000002/", fsspec.filesystem("flaky")
    file = next(name for name in store.store if root in name and "safetensors" in name)
    if how == "no mark":
        files.rm(root + "COMMITTED")
    elif how == "flipped":
        files.pipe_file(file, files.cat_file(file)[:-1] + b"?")
    elif how == "lost file":
        files.rm(file)
    else:
        files.pipe_file(root + "manifest.json", b"{")
    assert holds(latest(tmp_path / "new", URL), 1)
    warned = capfd.readouterr().err.count("warning:")
    assert warned == (how != "no mark")  # an upload that was cut off is no surprise


def test_bad_here_and_good_there(tmp_path: Path) -> None:
    with Saver(tmp_path, URL) as saver:
        save(saver, 7)
    (tmp_path / "step-00000007" / "manifest.json").write_text("")
    assert holds(latest(tmp_path, URL), 7)
    assert holds(latest(tmp_path), 7)  # and mended here


def test_here_is_preferred_and_newer_is_preferred(tmp_path: Path) -> None:
    with Saver(tmp_path / "a", URL) as saver:
        save(saver, 5)
    with Saver(tmp_path / "b") as saver:
        save(saver, 6)
    assert holds(latest(tmp_path / "b", URL), 6)
    with Saver(tmp_path / "c") as saver:
        save(saver, 4)
    assert holds(latest(tmp_path / "c", URL), 5)


def test_void_future_goes_there_too(tmp_path: Path) -> None:
    """A run that went back to step 3 and saves 4 takes 5 from the store."""
    with Saver(tmp_path, URL) as saver:
        save(saver, 3, 5)
    with Saver(tmp_path, URL) as saver:
        save(saver, 4)
    assert remote.Remote(URL).steps()[0] == 4
    assert local.steps(tmp_path)[0] == 4


def seen(store: Path) -> tuple:
    """Names and sizes of the files that are there."""
    with contextlib.suppress(FileNotFoundError):  # one went meanwhile
        return tuple((path, path.stat().st_size) for path in sorted(store.rglob("*")))
    return ()


def test_killed_while_uploading(tmp_path: Path, capfd) -> None:
    """After each kill the URL gives a whole checkpoint, without a word, to a fresh machine."""
    url, draw, last = f"file://{tmp_path}/store", random.Random(5), 0
    for life in range(8):
        child = os.fork()
        if not child:
            try:
                with Saver(tmp_path / "run", url, keep=1) as saver:
                    for step in range(last + 1, 10**6):
                        saver.save(step, whole(state(step)), {})
                        wait_for(saver._upload)
            finally:
                os._exit(1)
        states: set[tuple] = set()
        wanted = draw.randrange(3, 30)  # so many states of the store are seen, then it is killed
        until(lambda s=states, n=wanted: s.add(seen(tmp_path / "store")) or len(s) >= n)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = latest(tmp_path / f"new{life}", url)
        if found is not None:
            assert holds(found, found.step)
            assert found.step >= last
            last = found.step
    assert last > 8
    assert "warning" not in capfd.readouterr().err


def test_none_good_anywhere(tmp_path: Path) -> None:
    with Saver(tmp_path, URL) as saver:
        save(saver, 1)
    (tmp_path / "step-00000001" / "COMMITTED").unlink()
    fsspec.filesystem("flaky").pipe_file("/bucket/run/step-00000001/manifest.json", b"")
    with pytest.raises(BadData, match="none of 1 checkpoints is valid"):
        latest(tmp_path, URL)


def test_urls_that_cannot_be_opened() -> None:
    with pytest.raises(UsageError, match="--checkpoint-url: nothing://x"):
        remote.Remote("nothing://x")
    with pytest.raises(MissingBackend, match="needs a package"):
        remote.Remote("s3://bucket/run") if not _has("s3fs") else pytest.skip("s3fs is here")


def _has(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
