"""Checkpoints at a URL that fsspec supports: s3://, gs://, memory://, file://.

An object store has no rename, so a checkpoint is valid if it has a COMMITTED mark, which is
uploaded last and removed first. Files are copied in chunks of several MiB, so that the training
step rarely waits for the interpreter lock, a few files at the same time. Each file is retried with
exponential backoff before the upload fails.
"""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sabia.core.errors import BadData, Failed, MissingBackend, UsageError
from sabia.core.train.checkpoint.local import COMMITTED, MANIFEST, name_of, read_manifest, step_of

ATTEMPTS = 6
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
STREAMS = 4
CHUNK_BYTES = 8 << 20  # so that the interpreter lock changes hands rarely
T = TypeVar("T")


def discard_all(url: str) -> None:
    """Remove all checkpoints under a URL ('': none); raises Failed."""
    if not url:
        return
    remote = Remote(url)
    for step in remote.steps():
        remote.discard(step)


def stored_identity(url: str) -> dict[str, Any]:
    """The identity of the run whose checkpoints are under a URL; {} without any; raises Failed."""
    remote = Remote(url)
    for step in remote.steps():
        with contextlib.suppress(BadData):  # passed over, as by a run
            return dict(remote.manifest(step)[0]["identity"])
    return {}


class Remote:
    """The checkpoints under a URL; every operation raises Failed after its last retry."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            self.files, root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise MissingBackend(f"--checkpoint-url: {url} needs a package ({error})") from error
        except ValueError as error:
            raise UsageError(f"--checkpoint-url: {url} ({error})") from error
        self.root = root.rstrip("/")

    def steps(self) -> list[int]:
        """Steps with a commit mark, newest first."""
        paths, exists = self._retry(self._list, self.root), self.files.exists
        steps = [s for s in {step_of(path.rpartition("/")[2]) for path in paths} if s is not None]
        committed = (step for step in steps if self._retry(exists, self._key(step, COMMITTED)))
        return sorted(committed, reverse=True)

    def manifest(self, step: int) -> tuple[dict[str, Any], bytes, bytes]:
        """(manifest, its text, the commit mark); BadData if its hash is not that of the mark."""
        read = self.files.cat_file
        text, mark = (bytes(self._retry(read, self._key(step, n))) for n in (MANIFEST, COMMITTED))
        try:
            return read_manifest(f"{self.url}/{name_of(step)}", text, mark), text, mark
        except ValueError as error:
            raise BadData(f"checkpoint {self.url}/{name_of(step)}: {error}") from error

    def withdraw(self, step: int) -> None:
        """Remove the commit mark of a step, before its files are replaced or removed."""
        self._retry(self._remove, self._key(step, COMMITTED), False)

    def upload(self, step: int, paths: Iterable[Path]) -> None:
        """Copy files into the step's folder."""
        self._retry(self.files.makedirs, f"{self.root}/{name_of(step)}", exist_ok=True)
        # (local file, remote key)
        jobs = [(path, self._key(step, path.name)) for path in paths]
        self._in_parallel(lambda job: self._retry(self._put, *job), jobs)

    def commit(self, step: int, path: Path) -> None:
        """Upload the manifest, then the commit mark, atomically."""
        self._retry(self._put, path / MANIFEST, self._key(step, MANIFEST))
        mark = self._key(step, COMMITTED)
        if "file" in self.files.protocol:  # uploads to object stores are atomic
            self._retry(self._put, path / COMMITTED, f"{mark}.part")
            self._retry(self.files.mv, f"{mark}.part", mark)
        else:
            self._retry(self._put, path / COMMITTED, mark)

    def download(self, step: int, names: Iterable[str], into: Path) -> None:
        """Copy files of a step into a local directory."""
        jobs = [(self._key(step, name), into / name) for name in names]
        self._in_parallel(lambda job: self._retry(self._get, *job), jobs)

    def discard(self, step: int) -> None:
        """Remove a checkpoint, its commit mark first."""
        self.withdraw(step)
        self._retry(self._remove, f"{self.root}/{name_of(step)}", True)

    def _in_parallel(self, work: Callable[[Any], None], jobs: list[Any]) -> None:
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(work, jobs))

    def _retry(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        import tenacity

        # errors that a retry cannot change
        permanent = (PermissionError, NotImplementedError, FileNotFoundError)
        attempts = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            # exponential backoff with jitter
            wait=tenacity.wait_random_exponential(FIRST_WAIT_S, LONGEST_WAIT_S),
            retry=tenacity.retry_if_exception(
                lambda e: isinstance(e, Exception) and not isinstance(e, permanent)
            ),
            reraise=True,
        )
        try:
            return attempts(work, *args, **named)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise Failed(f"checkpoint: {self.url} failed after all retries ({reason})") from error

    def _key(self, step: int, name: str) -> str:
        return f"{self.root}/{name_of(step)}/{name}"

    def _list(self, path: str) -> list[str]:
        self.files.invalidate_cache()
        try:
            return [name.rstrip("/") for name in self.files.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _remove(self, path: str, recursive: bool) -> None:
        if self.files.exists(path):
            self.files.rm(path, recursive=recursive)

    def _put(self, local: Path, path: str) -> None:
        with open(local, "rb", buffering=0) as source, self.files.open(path, "wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)

    def _get(self, path: str, local: Path) -> None:
        with self.files.open(path, "rb") as source, open(local, "wb", buffering=0) as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
