"""Token shards as row files, which are made once on a host and mapped by all of its processes.

A row file (`row_file`) of each shard is kept under the shard's fingerprint. That of an uncompressed
Arrow shard is an index of a few bytes per row, and the ids stay in the shard. Other shards
(compressed Parquet, JSON lines, stdin, URLs) are unpacked, 4 bytes a token. The processes of a host
share the work: each makes the files that no other one is making (a lock on a file, which a kill
releases), and a later start reads only footers. Files that no run has opened for KEPT_DAYS are
removed when others are made.

The fingerprint is that of the digests which the shard has: of a Parquet footer, or of the record
batches of an Arrow stream. A shard without digests is hashed once.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sabia.core import notes, stop
from sabia.core.digests import footer_digest, note_missing
from sabia.core.errors import BadData
from sabia.core.file_hashes import content_hash, remembered
from sabia.core.progress import progress, waiting
from sabia.core.shards.atomic import atomic_path, sweep
from sabia.core.shards.executor import run_tasks
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.arrow_in_place import MappedArrow, NotInPlace
from sabia.core.shards.token_rows.row_file import COLUMNS, ENDING, RowFile, RowWriter

KEPT_DAYS = 30
LOOK_S = 0.1  # interval at which a process looks for files that others are making
RejectRow = Callable[[dict[str, Any], str, str], None]  # (row, reason, shard)


def fingerprint(source: Source) -> str:
    """A hash of a shard's content, by the digests that it has, and of how it is read."""
    about = repr((source.form, source.keys, source.text_column, _content(source)))
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def _content(source: Source) -> str:
    with source.reading():
        if source.form == "parquet":
            with source.open() as file:
                if digest := footer_digest(file, source.name):
                    return f"footer {digest}"
        elif _is_mapped(source):
            # how many digests there are grows with the rows, so the hash of them is kept
            return remembered(os.path.realpath(source.name), "arrow", _arrow_content)
        return content_hash(source.name, source.open)


def _arrow_content(path: str) -> str:
    arrow = MappedArrow(path)
    if arrow.has_digests:
        return f"batches {arrow.digest()}"
    note_missing(path)
    return content_hash(path)


def _is_mapped(source: Source) -> bool:
    """Whether the shard is a local Arrow file, whose ids may be read in place."""
    return source.form == "arrow" and source.stream is None and os.path.isfile(source.name)


def open_row_files(
    sources: Sequence[Source], folder: Path, jobs: int, reject: RejectRow
) -> Iterator[RowFile]:
    """The row file of each shard, made by at most `jobs` processes where it is missing.

    `reject` gets the rows that cannot be used. Raises BadData for a shard that is corrupt.
    """
    paths = [
        folder / f"{fingerprint(source)}{'-in-place' * _is_mapped(source)}{ENDING}"
        for source in sources
    ]
    shards = dict(zip(paths, sources, strict=True))
    if not all(path.exists() for path in paths):
        _remove_unused(folder)
    make_missing(_make, list(shards.items()), jobs)
    for path, source in zip(paths, sources, strict=True):
        try:
            file = RowFile.open(path, source.name)
        except BadData as error:
            notes.warn(f"{error}")
            path.unlink(missing_ok=True)
            make_missing(_make, [(path, source)])
            file = RowFile.open(path, source.name)
        with contextlib.suppress(OSError):  # of another user
            os.utime(path)  # when it was last used
        for row, reason, _ in file.rejects():
            reject(row, reason, source.name)
        yield file


def make_missing(
    make: Callable[..., None], tasks: Iterable[tuple[Any, ...]], jobs: int = 1
) -> None:
    """Call make(path, …) for each task whose file `path` is missing, unless another process makes
    it; returns when all are there. `make` writes the file atomically."""
    missing = {task[0]: task for task in tasks if not task[0].exists()}
    if not missing:
        return
    for path in missing:
        path.parent.mkdir(parents=True, exist_ok=True)
    with progress(len(missing), "reading token rows", "shards") as bar:
        while missing:
            paths = list(missing)
            calls = [(make, *missing[path]) for path in paths]
            for path, made in zip(paths, run_tasks(_make_alone, calls, jobs), strict=True):
                if made:
                    del missing[path]
                    bar.advance(1)
            if missing:
                stop.check()
                with waiting():
                    time.sleep(LOOK_S)


def _make_alone(make: Callable[..., None], path: Path, *more: Any) -> bool:
    """Make a file; False if another process is making it."""
    lock = path.with_name(f".{path.name}.lock")
    with open(lock, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if path.exists():
            return True
        if not os.fstat(handle.fileno()).st_nlink:
            return False  # the lock of a process that has just ended
        try:
            make(path, *more)
        finally:
            lock.unlink()
    return True


def _remove_unused(folder: Path) -> None:
    """Remove row files that no run has opened for KEPT_DAYS, and those of processes that died."""
    sweep(folder)
    for path in folder.glob(f"*{ENDING}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_DAYS * 86400:
                path.unlink()


def _make(path: Path, source: Source) -> None:
    with source.reading(), atomic_path(path) as temporary:
        if _is_mapped(source):
            with contextlib.suppress(NotInPlace), open(temporary, "wb") as file:
                writer = RowWriter(file, in_place=True)
                arrow = MappedArrow(source.name)
                for batch, positions in arrow.token_batches(dict(source.keys).get("source")):
                    stop.check()
                    writer.add(batch, positions)
                writer.close()
                return
        with open(temporary, "wb") as file:
            writer = RowWriter(file)
            for batch in source.batches(columns=list(COLUMNS), reject=writer.reject):
                stop.check()
                writer.add(batch)
            writer.close()
