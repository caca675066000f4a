"""Save during training: a short blocking copy, then commit and upload in the background.

    save()            the leader makes the directory, barrier, each process writes its files
    background        fsync, the other processes' entries, manifest, COMMITTED, rename, retention
    background, long  upload of files, manifest, COMMITTED; retention at the URL

`save` returns when all bytes are in files: then the step may change its arrays in place. There is
at most one upload at a time: a checkpoint that is saved during an upload is committed locally and
not uploaded, but `close` uploads the last one. An error in the background is raised by the next
`poll` or `save`. Nothing is deleted before a newer checkpoint is committed and, with a URL,
uploaded. Processes share the directory (see `local`); `barrier` is called once per save, in the
calling thread.

`Interval` says when to save: every N steps, every N seconds, or (`auto`) by core.save_interval with
the blocking and upload times that are measured in the run; the latter with a tenth more, so that a
save never begins before the last upload has ended. The default mean time between failures is that
of the published Llama 3 405B run (arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in
54 days on 16,384 GPUs, so 50,700 device-hours each) divided by the number of devices, and at most a
week.

The processes meet by small files, without collectives: a checkpoint is saved in a thread while the
main thread trains, and a collective in that thread could be interleaved with those of the steps.
Each process writes a note with a name and its rank; the leader waits for all notes. A process that
fails writes the reason, so that the leader does not wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sabia.core import notes, units
from sabia.core.errors import BadData, Failed
from sabia.core.parallel.world import World
from sabia.core.save_interval import best_interval_s
from sabia.core.train.checkpoint import local
from sabia.core.train.checkpoint.pieces import Piece, sync, write_pieces

if TYPE_CHECKING:
    from sabia.core.train.checkpoint.remote import Remote

_POLL_S, _SLOWEST_POLL_S = 0.01, 0.5


def write_note(
    directory: Path, kind: str, rank: int, content: object = None, error: str = ""
) -> None:
    """Write the note `kind` of process `rank`: its content, or why the process failed."""
    waiting = directory / f".{kind}-{rank:05d}.tmp"
    waiting.write_text(json.dumps({"said": content, "error": error}))
    # atomic, so that a note is never read half-written
    os.replace(waiting, directory / _name(kind, rank))


def read_notes(directory: Path, kind: str, world: World, timeout_s: float) -> list[Any]:
    """Wait for the notes of all processes but the first; removes them, returns them by rank.

    Raises Failed if one of them failed or has written no note in time.
    """
    deadline = time.monotonic() + timeout_s
    return [_wait(directory / _name(kind, r), r, deadline, timeout_s) for r in range(1, world.size)]


def _wait(path: Path, rank: int, deadline: float, timeout_s: float) -> Any:
    pause = _POLL_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise Failed(f"checkpoint: process {rank} has not answered within {timeout_s:.0f} s")
        time.sleep(pause)
        # poll with exponential backoff
        pause = min(pause * 1.5, _SLOWEST_POLL_S)
    note = json.loads(path.read_text())
    path.unlink()
    if note["error"]:
        raise Failed(f"checkpoint: process {rank} failed: {note['error']}")
    return note["said"]


def _name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.json"


_UPLOAD = "UPLOAD"  # a file by which the leader tells the other processes to upload
_UPLOAD_TIMEOUT_S = 86400.0


@dataclass
class _Job:
    """One checkpoint that is being saved; uploaded: it is, or will be, uploaded."""

    step: int
    meta: Mapping[str, Any]
    entry: dict[str, Any] = field(default_factory=dict)
    uploaded: bool = False


class Saver:
    """Saves the checkpoints of one run in `directory` and, if given, at `remote_url`.

    keep, keep_every, best: see local.steps_to_delete. grace_s: seconds between SIGTERM and SIGKILL
    (0: unknown); there is a warning if a save takes longer. blocking_s, commit_s, upload_s: seconds
    of the last save (None before the first), of which only blocking_s stop the training.
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
        self.remote: Remote | None = None
        if remote_url:
            from sabia.core.train.checkpoint import remote

            self.remote = remote.Remote(remote_url)
        self.best = 0
        self.blocking_s: float | None = None
        self.commit_s: float | None = None
        self._upload_s = 0.0
        self._upload_started = 0.0
        self._committer = ThreadPoolExecutor(1, "checkpoint-commit")
        self._uploader = ThreadPoolExecutor(1, "checkpoint-upload")
        self._commit: Future[None] | None = None
        self._upload: Future[None] | None = None
        self._uploading = -1  # the step that is being uploaded
        self._last: _Job | None = None

    @property
    def upload_s(self) -> float:
        """Seconds of the last upload, or so far of the current one if that is more."""
        if self._upload is None or self._upload.done():
            return self._upload_s
        return max(self._upload_s, time.monotonic() - self._upload_started)

    def save(self, step: int, pieces: Iterable[Piece], meta: Mapping[str, Any]) -> None:
        """Save this process's `pieces`; all processes call it for the same step.

        `meta` (JSON) becomes part of the manifest. A checkpoint of the same step is replaced.
        Raises Failed if the files cannot be written or the background failed before.
        """
        json.dumps(meta)  # fails here if meta is not JSON, before any file is written
        wait_for(self._commit)
        if self._uploading >= step:  # after a rewind, the upload is of a step that is undone
            wait_for(self._upload)
        self.poll()
        started_at = time.monotonic()
        job = _Job(step, meta)
        saving = local.saving_path(self.directory, step)
        mark = saving / _UPLOAD
        if self.world.leads:
            shutil.rmtree(saving, ignore_errors=True)
            saving.mkdir(parents=True)
            # no upload is running: this one will be uploaded
            if self.remote is not None and self._upload is None:
                mark.touch()
        # the directory and the mark exist for all processes after the barrier
        self._barrier()
        job.uploaded = mark.exists()
        with self._removes_on_failure(saving):
            job.entry = write_pieces(saving, self.world.rank, pieces)
        self.blocking_s = time.monotonic() - started_at
        self._last = job
        # from here on everything runs in the background
        self._commit = self._committer.submit(self._finish, job)
        if job.uploaded:
            self._uploading, self._upload_started = step, time.monotonic()
            self._upload = self._uploader.submit(self._send, job, self._commit)

    def poll(self) -> None:
        """Raise the errors of the background since the last call."""
        commit, upload = self._commit, self._upload
        if commit is not None and commit.done():
            self._commit = None
            commit.result()
        if upload is not None and upload.done():
            self._upload, self._uploading = None, -1
            upload.result()

    def wait_for_commit(self) -> None:
        """Wait until the last checkpoint is committed in the directory."""
        wait_for(self._commit)
        self.poll()

    def close(self) -> None:
        """Wait until the last checkpoint is committed and, with a URL, uploaded."""
        try:
            wait_for(self._commit)
            wait_for(self._upload)
            self.poll()
            # the last checkpoint was saved during another upload
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

    @contextlib.contextmanager
    def _removes_on_failure(self, saving: Path) -> Iterator[None]:
        """Remove an incomplete checkpoint if the work on it fails."""
        try:
            yield
        except BaseException as error:
            if self.world.leads:
                shutil.rmtree(saving, ignore_errors=True)
            else:
                _report_failure(saving, "entry", self.world.rank, error)
            if isinstance(error, OSError):
                reason = f"{error.strerror or error} (free disk space, then run again)"
                raise Failed(f"checkpoint: cannot write {saving.parent}: {reason}") from error
            raise

    def _finish(self, job: _Job) -> None:
        """Make this process's files durable; the leader then waits for all and commits."""
        started_at = time.monotonic()
        saving = local.saving_path(self.directory, job.step)
        with self._removes_on_failure(saving):
            sync(saving / name for name in job.entry["files"])
            if self.world.leads:
                self._commit_all(saving, job)
            else:
                write_note(saving, "entry", self.world.rank, job.entry)
        self.commit_s = time.monotonic() - started_at
        took = (self.blocking_s or 0.0) + self.commit_s
        if self.grace_s and took > self.grace_s and self.world.leads:
            notes.warn(
                f"a save takes {units.format_duration(took)}, more than the grace time of "
                f"{units.format_duration(self.grace_s)} after a stop signal: a stopped run would "
                "lose the steps since the previous checkpoint (expected a longer grace time)"
            )

    def _commit_all(self, saving: Path, job: _Job) -> None:
        others = read_notes(saving, "entry", self.world, self.world.timeout_s)
        (saving / _UPLOAD).unlink(missing_ok=True)
        local.commit(self.directory, job.step, [job.entry, *others], job.meta)
        steps = local.steps(self.directory)
        if self.remote is not None:  # older ones are deleted after the upload
            old = [step for step in steps if step > job.step]
        else:
            old = local.steps_to_delete(steps, job.step, self.keep, self.keep_every, self.best)
        for step in old:
            local.discard(local.path_of(self.directory, step))

    def _send(self, job: _Job, commit: Future[None] | None) -> None:
        """Upload this process's files; the leader then waits for all, commits, deletes old ones."""
        if commit is not None:
            commit.result()
        path = local.path_of(self.directory, job.step)
        assert self.remote is not None
        try:
            self._await_commit(path, job)
            if self.world.leads:
                # an upload of this step may exist from before a rewind
                self.remote.withdraw(job.step)
            self.remote.upload(job.step, [path / name for name in job.entry["files"]])
        except BaseException as error:
            if not self.world.leads:
                _report_failure(path, "uploaded", self.world.rank, error)
            raise
        if not self.world.leads:
            write_note(path, "uploaded", self.world.rank)
            return
        read_notes(path, "uploaded", self.world, _UPLOAD_TIMEOUT_S)
        self.remote.commit(job.step, path)
        self._upload_s = time.monotonic() - self._upload_started
        # delete the checkpoints that are not needed any more
        rule = self.keep, self.keep_every, self.best
        for old in local.steps_to_delete(self.remote.steps(), job.step, *rule):
            self.remote.discard(old)
        # newer local ones may have been committed during the upload: keep them all
        steps = local.steps(self.directory)
        for old in local.steps_to_delete(steps, max(steps), *rule):
            if old < job.step:
                local.discard(local.path_of(self.directory, old))

    def _await_commit(self, path: Path, job: _Job) -> None:
        """Wait until the leader has committed the files of this save, not of an earlier one."""
        deadline = time.monotonic() + self.world.timeout_s
        while not self._is_committed(path, job):
            if time.monotonic() > deadline:
                raise Failed(f"checkpoint {path.name}: the leader has not committed it")
            time.sleep(0.05)

    def _is_committed(self, path: Path, job: _Job) -> bool:
        try:
            files = local.open_checkpoint(path).manifest["files"]
        except BadData:
            return False
        return all(files.get(name) == file_entry for name, file_entry in job.entry["files"].items())


def wait_for(future: Future[None] | None) -> None:
    """Wait for work in the background; `Saver.poll` raises its error."""
    if future is not None:
        future.exception()


def _report_failure(directory: Path, kind: str, rank: int, error: BaseException) -> None:
    """Report a failure to the leader; if this fails too, the leader's wait times out."""
    with contextlib.suppress(OSError):
        write_note(directory, kind, rank, error=f"{type(error).__name__}: {error}")


DEVICE_MTBF_S = 54 * 86400 * 16384 / 419
LONGEST_MTBF_S = 7 * 86400.0
FIRST_SAVE_S = 120.0
UPLOAD_SLACK = 1.1


def default_mtbf_s(devices: int) -> float:
    """Expected seconds between failures of a run on this number of devices."""
    return min(DEVICE_MTBF_S / max(1, devices), LONGEST_MTBF_S)


@dataclass(frozen=True)
class Interval:
    """One of `steps`, `seconds` or `auto` (none of them: never); mtbf_s: 0 for the default."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False
    mtbf_s: float = 0.0
    devices: int = 1

    def due(
        self, step: int, waited_s: float, blocking_s: float | None = None, upload_s: float = 0.0
    ) -> bool:
        """Whether to save after step `step` (counted from 1), `waited_s` after the last save.

        blocking_s: of the last save; None before the first. upload_s: see Saver.upload_s; 0
        without a URL.
        """
        if self.steps:
            return step % self.steps == 0
        wanted = self.wanted_s(blocking_s, upload_s)
        return bool(wanted) and waited_s >= wanted

    def wanted_s(self, blocking_s: float | None, upload_s: float = 0.0) -> float:
        """Seconds from the last save to the next; 0 if there is no limit of time."""
        if not self.auto:
            return self.seconds
        if blocking_s is None:
            return FIRST_SAVE_S
        mtbf_s = self.mtbf_s or default_mtbf_s(self.devices)
        return best_interval_s(blocking_s, UPLOAD_SLACK * upload_s, mtbf_s)


def parse_interval(text: str, mtbf_s: float = 0.0, devices: int = 1) -> Interval:
    """'500' steps, '10m' by time, 'auto' (0 `mtbf_s`: not known). Raises UsageError for others."""
    if text == "auto":
        return Interval(auto=True, mtbf_s=mtbf_s, devices=devices)
    if text.isdigit():
        return Interval(steps=int(text))
    return Interval(seconds=units.parse_duration(text, "--save-every"))
