"""Save while training goes on: a short blocking copy, then commit and upload in the background.

    save()            the leader makes the directory, all meet, each writes its pieces as files
    background        fsync, the other processes' entries, manifest, COMMITTED, rename, retention
    background, long  upload of files, manifest, COMMITTED; retention at the URL

`save` returns when all bytes are in files: from then on the step may change its arrays in place.
At most one upload is under way. What is saved meanwhile is committed here and not uploaded
(skipped, not queued), but `close` uploads the last one. What fails in the background is raised by
the next `poll` or `save`. Nothing is deleted before a newer checkpoint is committed, and uploaded
where there is a URL, so the directory holds what is saved during an upload, too. Processes share
the directory (see `layout`); `barrier` is called once in a save, in the calling thread.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sabia.core import notes, units
from sabia.core.errors import BadData, Failed
from sabia.core.parallel.world import World
from sabia.core.train.checkpoint import file_barrier, local
from sabia.core.train.checkpoint.pieces import Piece
from sabia.core.train.checkpoint.remote import Remote
from sabia.core.train.checkpoint.writer import sync, write_pieces

_UPLOAD = "UPLOAD"  # a mark by which the leader tells the others that this one is uploaded
_UPLOAD_TIMEOUT_S = 86400.0


@dataclass
class _Job:
    """One checkpoint on its way."""

    step: int
    meta: Mapping[str, Any]
    entry: dict[str, Any] = field(default_factory=dict)
    uploaded: bool = False


class Saver:
    """Saves the checkpoints of one run in `directory`, and at `remote_url` where it is given.

    keep, keep_every: see layout.doomed. grace_s: how long a process lives on after SIGTERM (0: not
    known); a save that takes longer is warned of. blocking_s, commit_s, upload_s: of the last save
    (None before the first; the rest of the commit is in the background).
    """

    def __init__(
        self,
        directory: Path,
        remote_url: str = "",
        *,
        world: World | None = None,
        barrier: Callable[[], None] = lambda: None,
        keep: int = 2,
        keep_every: int = 0,
        grace_s: float = 0.0,
    ) -> None:
        self.directory, self.world, self._barrier = directory, world or World(), barrier
        self.keep, self.keep_every, self.grace_s = keep, keep_every, grace_s
        self.remote = Remote(remote_url) if remote_url else None
        self.blocking_s: float | None = None
        self.commit_s: float | None = None
        self._upload_s = 0.0
        self._upload_started = 0.0
        self._committer = ThreadPoolExecutor(1, "checkpoint-commit")
        self._uploader = ThreadPoolExecutor(1, "checkpoint-upload")
        self._commit: Future[None] | None = None
        self._upload: Future[None] | None = None
        self._uploading = -1  # the step on its way up
        self._last: _Job | None = None

    @property
    def upload_s(self) -> float:
        """Seconds of the last upload, or the age of the one under way where that is more."""
        if self._upload is None or self._upload.done():
            return self._upload_s
        return max(self._upload_s, time.monotonic() - self._upload_started)

    def save(self, step: int, pieces: Iterable[Piece], meta: Mapping[str, Any]) -> None:
        """Take a checkpoint of this process's `pieces`; all processes call it for the same step.

        `meta` (JSON) goes into the manifest. One of the same step is replaced. Raises Failed when
        the files cannot be written or something failed in the background before.
        """
        json.dumps(meta)  # what cannot be written must not leave half a checkpoint
        self._wait_for_commit()
        if self._uploading >= step:  # the run went back: what it is uploading will be void
            self._wait_for_upload()
        self.poll()
        since = time.monotonic()
        job = _Job(step, meta)
        saving = self._begin(job)
        with self._giving_up(saving):
            job.entry = write_pieces(saving, self.world.rank, pieces)
        self.blocking_s = time.monotonic() - since
        self._last = job
        self._commit = self._committer.submit(self._finish, job)
        if job.uploaded:
            self._uploading, self._upload_started = step, time.monotonic()
            self._upload = self._uploader.submit(self._send, job, self._commit)

    def poll(self) -> None:
        """Raise what has failed in the background since the last call."""
        commit, upload = self._commit, self._upload
        if commit is not None and commit.done():
            self._commit = None
            commit.result()
        if upload is not None and upload.done():
            self._upload, self._uploading = None, -1
            upload.result()

    def settle(self) -> None:
        """Wait until the last checkpoint is committed in the directory."""
        self._wait_for_commit()
        self.poll()

    def close(self) -> None:
        """Wait until the last checkpoint is committed, and uploaded where there is a URL."""
        try:
            self._wait_for_commit()
            self._wait_for_upload()
            self.poll()
            if self.remote is not None and self._last is not None and not self._last.uploaded:
                self._last.uploaded = True
                self._upload_started = time.monotonic()
                self._send(self._last, None)
        finally:
            self._committer.shutdown()
            self._uploader.shutdown()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, job: _Job) -> Path:
        """The directory to write to, made by the leader, who also decides on the upload."""
        saving = local.saving_path(self.directory, job.step)
        mark = saving / _UPLOAD
        if self.world.leads:
            shutil.rmtree(saving, ignore_errors=True)
            saving.mkdir(parents=True)
            if self.remote is not None and self._upload is None:
                mark.touch()
        self._barrier()
        job.uploaded = mark.exists()
        return saving

    @contextlib.contextmanager
    def _giving_up(self, saving: Path) -> Iterator[None]:
        """Around work on a checkpoint, which is given up where that fails."""
        try:
            yield
        except BaseException as error:
            if self.world.leads:
                shutil.rmtree(saving, ignore_errors=True)
            else:
                _try_to_say(saving, "entry", self.world.rank, error)
            if isinstance(error, OSError):
                raise Failed(_no_room(saving, error)) from error
            raise

    def _finish(self, job: _Job) -> None:
        """Make one's own files durable; as the leader, commit when all have."""
        since = time.monotonic()
        saving = local.saving_path(self.directory, job.step)
        with self._giving_up(saving):
            sync(saving / name for name in job.entry["files"])
            if self.world.leads:
                self._commit_all(saving, job)
            else:
                file_barrier.leave(saving, "entry", self.world.rank, job.entry)
        self.commit_s = time.monotonic() - since
        self._compare_with_grace()

    def _commit_all(self, saving: Path, job: _Job) -> None:
        entries = [
            job.entry,
            *file_barrier.gather(saving, "entry", self.world, self.world.timeout_s),
        ]
        (saving / _UPLOAD).unlink(missing_ok=True)
        local.commit(self.directory, job.step, entries, job.meta)
        later = [step for step in local.steps(self.directory) if step > job.step]
        gone = later if self.remote is not None else self._doomed(self.directory, job.step)
        for step in gone:
            local.discard(local.path_of(self.directory, step))

    def _doomed(self, directory: Path, step: int) -> list[int]:
        return local.doomed(local.steps(directory), step, self.keep, self.keep_every)

    def _send(self, job: _Job, commit: Future[None] | None) -> None:
        """Upload one's own files; as the leader, commit there when all have, and tidy up."""
        if commit is not None:
            commit.result()
        path = local.path_of(self.directory, job.step)
        assert self.remote is not None
        try:
            self._await_commit(path, job)
            if self.world.leads:
                self.remote.withdraw(job.step)
            self.remote.upload(job.step, [path / name for name in job.entry["files"]])
        except BaseException as error:
            if not self.world.leads:
                _try_to_say(path, "uploaded", self.world.rank, error)
            raise
        if not self.world.leads:
            file_barrier.leave(path, "uploaded", self.world.rank)
            return
        file_barrier.gather(path, "uploaded", self.world, _UPLOAD_TIMEOUT_S)
        self.remote.commit(job.step, path)
        self._upload_s = time.monotonic() - self._upload_started
        self._tidy(job.step)

    def _await_commit(self, path: Path, job: _Job) -> None:
        """Wait until the leader has committed what this process wrote (not one of before)."""
        until = time.monotonic() + self.world.timeout_s
        while not self._holds(path, job):
            if time.monotonic() > until:
                raise Failed(f"checkpoint {path.name}: the leader has not committed it")
            time.sleep(0.05)

    def _holds(self, path: Path, job: _Job) -> bool:
        try:
            files = local.open_checkpoint(path).manifest["files"]
        except BadData:
            return False
        return all(files.get(name) == said for name, said in job.entry["files"].items())

    def _tidy(self, step: int) -> None:
        """Delete what the upload of `step` has made needless, there and here."""
        assert self.remote is not None
        there = local.doomed(self.remote.steps(), step, self.keep, self.keep_every)
        for old in there:
            self.remote.discard(old)
        here = local.steps(self.directory)
        wanted = set(local.doomed(here, max(here), self.keep, self.keep_every))
        for old in wanted & {s for s in here if s < step}:
            local.discard(local.path_of(self.directory, old))

    def _compare_with_grace(self) -> None:
        took = (self.blocking_s or 0.0) + (self.commit_s or 0.0)
        if self.grace_s and took > self.grace_s and self.world.leads:
            notes.warn(
                f"a save takes {units.format_duration(took)}, more than the "
                f"{units.format_duration(self.grace_s)} left after a stop signal; a stopped run "
                "would go back to the checkpoint before (expected a longer grace time)"
            )

    def _wait_for_commit(self) -> None:
        if self._commit is not None:
            self._commit.exception()

    def _wait_for_upload(self) -> None:
        if self._upload is not None:
            self._upload.exception()


def _no_room(place: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"checkpoint: {place.parent} cannot be written: {reason} (make room, then run again)"


def _try_to_say(place: Path, kind: str, rank: int, error: BaseException) -> None:
    """Tell the leader of a failure; where even that fails, the leader's waiting ends by itself."""
    with contextlib.suppress(OSError):
        file_barrier.leave(place, kind, rank, error=f"{type(error).__name__}: {error}")
