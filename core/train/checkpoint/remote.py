"""Checkpoints at a URL that fsspec supports: s3://, gs://, memory://, file://.

An object store has no rename, so a checkpoint is valid if it has a COMMITTED mark, which is
uploaded last and removed first. A few files are copied at the same time; each is seen when it is
whole, and is tried again before the upload fails (`shards.stores`).
"""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sabia.core.errors import BadData, MissingBackend, UsageError
from sabia.core.shards.stores import objects
from sabia.core.train.checkpoint.local import COMMITTED, MANIFEST, name_of, read_manifest, step_of

STREAMS = 4


def discard_all(url: str) -> None:
    """Remove all checkpoints under a URL ('': none); raises Failed."""
    if not url:
        return
    remote = Remote(url)
    for step in remote.steps():
        remote.discard(step)


def stored_identity(url: str) -> dict[str, object]:
    """The identity of the run whose checkpoints are under a URL; {} without any; raises Failed."""
    remote = Remote(url)
    for step in remote.steps():
        with contextlib.suppress(BadData):  # passed over, as by a run
            return dict(remote.manifest(step)[0]["identity"])
    return {}


class Remote:
    """The checkpoints under a URL; every operation raises Failed after its last retry."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            objects.locate(self.url)
        except (MissingBackend, UsageError) as error:
            raise type(error)(f"--checkpoint-url: {error}") from error

    def steps(self) -> list[int]:
        """Steps with a commit mark, newest first."""
        folders = {name.removesuffix(f"/{COMMITTED}") for name in objects.objects_below(self.url)
                   if name.endswith(f"/{COMMITTED}")}  # fmt: skip
        return sorted((s for s in map(step_of, folders) if s is not None), reverse=True)

    def manifest(self, step: int) -> tuple[dict[str, Any], bytes, bytes]:
        """(manifest, its text, the commit mark); BadData if its hash is not that of the mark."""
        text, mark = (objects.read_object(self._of(step, n)) for n in (MANIFEST, COMMITTED))
        try:
            return read_manifest(f"{self.url}/{name_of(step)}", text, mark), text, mark
        except ValueError as error:
            raise BadData(f"checkpoint {self.url}/{name_of(step)}: {error}") from error

    def withdraw(self, step: int) -> None:
        """Remove the commit mark of a step, before its files are replaced or removed."""
        objects.remove(self._of(step, COMMITTED))

    def upload(self, step: int, paths: Iterable[Path]) -> None:
        """Copy files into the step's folder."""
        _in_parallel(lambda path: objects.upload(path, self._of(step, path.name)), paths)

    def commit(self, step: int, path: Path) -> None:
        """Upload the manifest, then the commit mark."""
        for name in (MANIFEST, COMMITTED):
            objects.upload(path / name, self._of(step, name))

    def download(self, step: int, names: Iterable[str], into: Path) -> None:
        """Copy files of a step into a local directory."""
        _in_parallel(lambda name: objects.download(self._of(step, name), into / name), names)

    def discard(self, step: int) -> None:
        """Remove a checkpoint, its commit mark first."""
        self.withdraw(step)
        folder = f"{self.url}/{name_of(step)}"
        _in_parallel(lambda name: objects.remove(f"{folder}/{name}"), objects.objects_below(folder))

    def _of(self, step: int, name: str) -> str:
        return f"{self.url}/{name_of(step)}/{name}"


def _in_parallel(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(work, items))
