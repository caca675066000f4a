"""Token shards as row files: read in place, or unpacked once on a host for all of its processes.

An uncompressed Arrow shard is read where it is (`row_file`). Its index is in it, where `tokenize`
wrote it, or made from the metadata of its batches and remembered. Other shards (compressed Parquet,
JSON lines, stdin, URLs) are unpacked into a row file under their fingerprint. The processes of a
host share the work: each makes the files that no other one is making (a lock on a file, which a
kill releases). A row file that is damaged is made again, also during a run. Files that no run has
opened for KEPT_DAYS are removed when others are made.

The fingerprint is that of the digests which the shard has: of a Parquet footer, or of the record
batches of an Arrow stream. A shard without digests is hashed once.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sabia.core import notes, stop
from sabia.core.digests import footer_digest, note_missing
from sabia.core.errors import BadData
from sabia.core.file_hashes import content_hash, remembered
from sabia.core.notes import progress, waiting
from sabia.core.shards.atomic import atomic_path, sweep
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.arrow_messages import FileBytes, NotInPlace
from sabia.core.shards.token_rows.row_file import ADDRESSES, COLUMNS, RowFile
from sabia.core.shards.token_rows.row_index import RowIndex, digest_of_batches, scan, stored_index

ENDING = ".rows.arrow"
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
        elif _is_local_arrow(source):
            index = index_in_place(source)
            if digest := index.content if index else _remembered(source, digest_of_batches):
                return f"batches {digest}"
            note_missing(source.name)
        return content_hash(source.name, source.open)


def _is_local_arrow(source: Source) -> bool:
    return source.form == "arrow" and source.stream is None and os.path.isfile(source.name)


def _remembered(source: Source, read: Callable[[FileBytes], str], more: str = "") -> str:
    """What `read` gives for an Arrow shard, '' if it is not read in place; kept until the shard
    changes. more: names what the result depends on."""

    def compute(path: str) -> str:
        with contextlib.suppress(NotInPlace):
            return read(FileBytes(path))
        return ""

    return remembered(os.path.realpath(source.name), f"{read.__name__} {more}", compute)


def index_in_place(source: Source) -> RowIndex | None:
    """The index of a local Arrow file whose rows are read in place; None for other shards."""
    if not _is_local_arrow(source):
        return None
    default = default_source(source)

    def row_index_text(shard: FileBytes) -> str:
        return scan(shard, default).to_text()

    with source.reading():
        with contextlib.suppress(NotInPlace):
            index = stored_index(FileBytes(source.name))
            sources = index.sources if index is not None else ()
            names = {default if name is None else name for name in sources}
            if index is not None and len(names) == len(sources):
                return index
        text = _remembered(source, row_index_text, default)
        return RowIndex.from_text(text) if text else None


def default_source(source: Source) -> str:
    """The source of rows without one."""
    return dict(source.keys).get("source") or ""


def open_row_files(
    sources: Sequence[Source], folder: Path, jobs: int, reject: RejectRow
) -> Iterator[RowFile]:
    """The row file of each shard, made by at most `jobs` processes where it is missing.

    `reject` gets the rows that cannot be used. Raises BadData for a shard that is corrupt.
    """
    in_place = [index_in_place(source) for source in sources]
    tasks = [
        (folder / f"{fingerprint(source)}{ENDING}", source)
        for source, index in zip(sources, in_place, strict=True)
        if index is None
    ]
    if not all(path.exists() for path, _ in tasks):
        _remove_unused(folder)
    make_missing(_make, tasks, jobs)
    unpacked = iter(tasks)
    for source, index in zip(sources, in_place, strict=True):
        if index is not None:
            with source.reading():
                yield RowFile(FileBytes(source.name), index, default_source(source))
            continue
        path, _ = task = next(unpacked)
        file = open_made(_make, task)
        with contextlib.suppress(OSError):  # of another user
            os.utime(path)  # when it was last used
        for row, reason, _ in file.rejects():
            reject(row, reason, source.name)
        yield file


def open_made(make: Callable[..., None], task: tuple[Any, ...]) -> RowFile:
    """The row file task[0], which make(*task) makes where it is missing or damaged."""
    remake = partial(make_missing, make, [task])
    remake()
    try:
        return RowFile.open(task[0], remake)
    except BadData as error:
        notes.warn(f"{error}")
        task[0].unlink(missing_ok=True)
        remake()
        return RowFile.open(task[0], remake)


def make_missing(
    make: Callable[..., None], tasks: Iterable[tuple[Any, ...]], jobs: int = 1
) -> None:
    """Call make(path, …) for each task whose file `path` is missing, unless another process makes
    it; returns when all are there. `make` writes the file atomically."""
    missing = {task[0]: task for task in tasks if not task[0].exists()}
    if not missing:
        return
    from sabia.core.shards.executors.processes import run_tasks

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


def _make_alone(make: Callable[..., None], path: Path, *more: object) -> bool:
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
    for path in (*folder.glob("*.rows"), *folder.glob(f"*{ENDING}")):  # .rows: of earlier versions
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_DAYS * 86400:
                path.unlink()


def _make(path: Path, source: Source) -> None:
    from sabia.core.shards.token_rows.row_writer import RowWriter

    with source.reading(), atomic_path(path) as temporary, open(temporary, "wb") as file:
        writer = RowWriter(file)
        for batch in source.batches(columns=[*COLUMNS, *ADDRESSES], reject=writer.reject):
            stop.check()
            writer.add(batch)
        writer.close()
