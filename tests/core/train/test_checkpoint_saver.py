"""Saving: safe against changes, kills, full disks and other processes' failures."""

import os
import random
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from interrupted import arm
from waiting import HANG_S, until

from sabia.core.errors import Failed
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.parallel.world import World
from sabia.core.train.checkpoint import local, saver
from sabia.core.train.checkpoint import saver as saver_module
from sabia.core.train.checkpoint.pieces import Piece
from sabia.core.train.checkpoint.pieces import whole_pieces as whole
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import Saver


def state(step: int, size: int = 1000) -> dict[str, np.ndarray]:
    """A state that says of which step it is, in every number."""
    return {f"param/{i}": np.full((4, size), step + i / 8, np.float32) for i in range(4)}


def complete(found) -> bool:
    reader, wanted = Reader(found), state(found.step)
    return all((reader.read(n)[:, :1] == a[:, :1]).all() for n, a in wanted.items())


def test_arrays_may_change_when_save_returns(tmp_path: Path) -> None:
    held = state(1)
    with Saver(tmp_path) as saver:
        saver.save(1, whole(held), {})
        for array in held.values():
            array.fill(-1)
    found = latest(tmp_path)
    assert all(np.array_equal(Reader(found).read(n), a) for n, a in state(1).items())
    assert saver.blocking_s > 0
    assert saver.commit_s > 0


def save_for_ever(place: Path) -> None:
    """A run that saves and saves; it is killed from outside."""
    with Saver(place, keep=2) as saver:
        for step in range(1, 10**6):
            saver.save(step, whole(state(step, 20_000)), {})


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """After each kill, at some file operation, the newest checkpoint is whole; over all kills some
    hit a save midway."""
    draw, halves, last = random.Random(3), 0, 0
    for _ in range(20):
        moment, child = draw.randrange(40), os.fork()
        if not child:
            try:
                arm("file", moment, "SIGKILL")
                save_for_ever(tmp_path)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        halves += any(p.name.startswith(".step") for p in tmp_path.iterdir())
        found = latest(tmp_path)
        last = max(last, found.step if found else 0)
        if found is not None:
            reader = Reader(found)
            assert all(
                np.array_equal(reader.read(n), a) for n, a in state(found.step, 20_000).items()
            )
    assert last >= 3
    assert halves >= 5


def test_full_disk_names_the_mend_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        try:
            with Saver(tmp_path) as saver:
                saver.save(1, whole(state(1)), {})
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
            with Saver(tmp_path) as saver:
                saver.save(2, whole(state(2)), {})
        except Failed as error:
            os._exit(0 if "File too large (free disk space" in str(error) else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert complete(latest(tmp_path))


def test_disk_that_fails_in_the_background_is_said_at_the_next_step(
    tmp_path: Path, monkeypatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saver_module, "sync", fail)
    saver = Saver(tmp_path)
    saver.save(1, whole(state(1)), {})
    with pytest.raises(Failed, match="Input/output error"):
        until(saver.poll)
    monkeypatch.undo()
    saver.save(2, whole(state(2)), {})
    saver.close()
    assert local.steps(tmp_path) == [2]


def test_memory_is_a_block_not_the_state(tmp_path: Path) -> None:
    """Fetched arrays are dropped before the next ones are fetched."""
    alive, most = [0], [0]

    class Counted(np.ndarray):
        def __array_finalize__(self, obj: object) -> None:
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    def fetch(start: int, stop: int) -> np.ndarray:
        return np.zeros((stop - start, 1 << 20), np.float32).view(Counted)

    shape, kind = (64, 1 << 20), np.dtype(np.float32)  # 256 MiB each, in blocks of 64 MiB
    with Saver(tmp_path) as saver:
        saver.save(1, (Piece(f"p{i}", LazyArray(shape, kind, fetch)) for i in range(2)), {})
    assert most[0] <= 4  # views of one block, and the next one


def test_save_longer_than_the_grace_time_is_warned_of(tmp_path: Path, capfd) -> None:
    with Saver(tmp_path, grace_s=1e-9) as saver:
        saver.save(1, whole(state(1)), {})
    assert "more than the grace time of 0s after a stop signal" in capfd.readouterr().err


class Processes:
    """Savers of several processes, run as threads with a real barrier."""

    def __init__(self, place: Path, size: int, url: str = "", **settings) -> None:
        barrier = threading.Barrier(size, timeout=HANG_S)
        self.savers = [
            Saver(place, url, world=World(r, size), barrier=lambda: barrier.wait() and None,
                  **settings)
            for r in range(size)
        ]  # fmt: skip

    def each(self, work) -> list[BaseException | None]:
        errors: list[BaseException | None] = [None] * len(self.savers)

        def run(rank: int) -> None:
            try:
                work(self.savers[rank], rank)
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(r,)) for r in range(len(self.savers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


def shards(rank: int, size: int, step: int) -> list[Piece]:
    """Rows of one tensor over processes, and what the first has alone."""
    whole_array = np.arange(step, step + 40, dtype=np.float32).reshape(8, 5)
    rows = len(whole_array) // size
    mine = whole_array[rank * rows : (rank + 1) * rows]
    pieces = [Piece("param/w", mine, (rank * rows, 0), whole_array.shape)]
    return pieces + ([Piece("count", np.array(step))] if rank == 0 else [])


@pytest.mark.parametrize("url", ["", "file"])
def test_processes_write_their_shards(tmp_path: Path, url: str) -> None:
    url = url and f"file://{tmp_path}/remote"
    run = Processes(tmp_path / "here", 4, url)

    def work(saver: Saver, rank: int) -> None:
        for step in (1, 2, 3):
            saver.save(step, shards(rank, 4, step), {})

    assert run.each(work) == [None] * 4
    assert run.each(lambda saver, _: saver.close()) == [None] * 4
    for found in (latest(tmp_path / "here"), url and latest(tmp_path / "elsewhere", url)):
        if found:
            wanted = np.arange(3, 43, dtype=np.float32).reshape(8, 5)
            assert found.step == 3
            assert np.array_equal(Reader(found).read("param/w"), wanted)
            files = sorted(p.name for p in found.path.iterdir())
            assert files == ["COMMITTED", "manifest.json",
                             *(f"state-{r:05d}-00000.safetensors" for r in range(4))]  # fmt: skip


def test_failure_of_one_process_reaches_the_leader(tmp_path: Path) -> None:
    run = Processes(tmp_path, 2)

    def work(saver: Saver, rank: int) -> None:
        def fetch(*_: int) -> np.ndarray:
            raise OSError(28, "No space left on device")

        lazy = LazyArray((4, 5), np.dtype(np.float32), fetch)
        bad = [Piece("param/w", lazy, (4, 0), (8, 5))]
        saver.save(1, bad if rank else shards(0, 2, 1), {})
        saver.close()

    first, second = run.each(work)
    assert "process 1 failed: OSError: [Errno 28] No space left" in str(first)
    assert "No space left on device (free disk space" in str(second)
    assert local.steps(tmp_path) == []


def test_process_that_never_answers_ends_the_waiting(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="process 1 has not answered within 0 s"):
        saver.read_notes(tmp_path, "entry", World(0, 2), 0.05)


def test_latest_shares_the_checking(tmp_path: Path, monkeypatch) -> None:
    """Each process reads its part of the files; one that finds damage is enough for all."""
    run = Processes(tmp_path, 4)
    run.each(lambda saver, rank: saver.save(1, shards(rank, 4, 1), {}))
    run.each(lambda saver, rank: saver.save(2, shards(rank, 4, 2), {}))
    run.each(lambda saver, _: saver.close())
    file = tmp_path / "step-00000002" / "state-00003-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    barrier, said = threading.Barrier(2, timeout=HANG_S), [True, True]
    found: list = [None, None]

    def work(_: object, rank: int) -> None:
        def agree(good: bool) -> bool:
            said[rank] = good
            barrier.wait()
            result = all(said)
            barrier.wait()
            return result

        found[rank] = latest(tmp_path, world=World(rank, 2), agree=agree)

    readers = Processes(tmp_path, 2)
    assert readers.each(work) == [None, None]
    assert [f.step for f in found] == [1, 1]
