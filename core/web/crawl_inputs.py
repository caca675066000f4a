"""The inputs of `sabia crawl`: seed URLs, or files that contain pages.

WARC files, HTML, text, JSON lines, Parquet, and folders of these are read instead of the network; a
text file that contains only URLs is a list of seeds. Small files are read in groups, so that a
folder with many pages has few shards.
"""

import codecs
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.shards import schemas
from sabia.core.shards.inputs import (
    READABLE,
    STDIN,
    files_below,
    form_of,
    from_path,
    is_hidden,
    open_binary,
    say_left_out,
    spool,
)
from sabia.core.shards.job import Job, is_stream
from sabia.core.shards.json_lines import decompressed
from sabia.core.shards.schemas import Reject
from sabia.core.shards.sources import BATCH_ROWS, Source, ignore_reject, origin_of
from sabia.core.urls import canonical
from sabia.core.web.archives.warc_reader import ENDINGS as WARC_ENDINGS
from sabia.core.web.archives.warc_reader import Decompressed, read_pages
from sabia.core.web.documents import ARCHIVED, WarcRecord, archived_columns

HTML_ENDINGS = (".html", ".htm", ".xhtml")
TEXT_ENDINGS = (".txt", ".md")
RECORD_ENDINGS = tuple(ending for ending in READABLE if ending != ".json")  # often settings
GROUP_FILES = 500
BATCH_PAGES = 50
SNIFFED_LINES = 50
SNIFFED_BYTES = 8192
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# a page before extraction; documents have `text` instead of `body`
PAGE = pa.schema(
    [("url", pa.string()), ("source", pa.string()), ("content_type", pa.string()),
     ("body", pa.binary()), ("crawl_time", pa.timestamp("us", tz="UTC")), ("cut", pa.bool_()),
     *ARCHIVED]
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Either seeds (canonical URLs, and the lines that are not URLs) or sources of pages."""

    seeds: tuple[str, ...] = ()
    bad_seeds: tuple[str, ...] = ()
    sources: tuple[Any, ...] = ()


@dataclass(frozen=True)
class PageFiles:
    """A shard: one WARC file, or HTML and text files of one folder."""

    name: str
    paths: tuple[str, ...]
    max_bytes: int
    warc: bool = False

    def fingerprint(self) -> str:
        """A hash of names, sizes and contents."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self.paths:
            with open_binary(path) as file:
                digest.update(path.encode() + b"\0")
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    @property
    def origin(self) -> str:
        """A hash of the path of the file, or of the folder of HTML and text files."""
        grouped = not self.warc and not isinstance(self, FolderRecords)
        return origin_of(os.path.dirname(self.paths[0]) if grouped else self.paths[0])

    def size(self) -> int:
        """Bytes of the files together; OSError if it is unknown."""
        total = 0
        for path in self.paths:
            with open_binary(path) as file:
                total += file.seek(0, os.SEEK_END)
        return total

    def rows(self) -> int | None:
        """The number of pages if it is known in advance."""
        return None if self.warc else len(self.paths)

    def batches(
        self, columns: Sequence[str] | None = None, rows: int = BATCH_ROWS,
        reject: Reject = ignore_reject,
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        """Batches of PAGE; pages that cannot be read are passed to `reject`."""
        pages = self._pages(reject)
        while rows_of_batch := list(islice(pages, min(rows, BATCH_PAGES))):
            batch = pa.RecordBatch.from_pylist(rows_of_batch, schema=PAGE)
            yield batch if columns is None else batch.select(columns)

    def _pages(self, reject: Reject) -> Iterator[dict[str, Any]]:
        for path in self.paths:
            try:
                yield from self._pages_of(path, reject)
            except (BadData, OSError, EOFError) as error:
                reason = str(error).removeprefix(f"{path}: ")
                reject({"url": path}, reason)

    def _pages_of(self, path: str, reject: Reject) -> Iterator[dict[str, Any]]:
        with open_binary(path) as file:
            if self.warc:
                for page in read_pages(file, self.max_bytes):
                    if page.refused:
                        reject({"url": page.url}, page.refused)
                        continue
                    source = os.path.basename(self.name)
                    row = _page(page.url, source, page.content_type, page.body)
                    kept = WarcRecord.of("" if self.name == STDIN else self.name, page.record)
                    row |= archived_columns(kept) if kept else {}
                    yield row | {"crawl_time": page.time, "cut": page.cut}
                return
            body = decompressed(file).read(self.max_bytes + 1)
        if len(body) > self.max_bytes:
            reject({"url": path}, f"larger than {self.max_bytes} bytes")
            return
        if b"\0" in body[:SNIFFED_BYTES] and not body.startswith(_UTF16):
            reject({"url": path}, "not text (contains zero bytes)")
            return
        html = path.lower().removesuffix(".gz").endswith(HTML_ENDINGS)
        yield _page(path, self.name, "text/html" if html else "text/plain", body)


@dataclass(frozen=True)
class FolderRecords(PageFiles):
    """A file of records in a folder; it is rejected if it cannot be read."""

    def rows(self) -> int | None:
        return None

    def records(self) -> list[Source]:
        """The documents in the file; raises BadData for one that cannot be read."""
        return from_path(self.name, "document")

    def batches(
        self, columns: Sequence[str] | None = None, rows: int = BATCH_ROWS,
        reject: Reject = ignore_reject,
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        try:
            for source in self.records():
                yield from source.batches(columns, rows, reject)
        except BadData as error:
            reject({"url": self.name}, str(error).removeprefix(f"{self.name}: "))


def _page(url: str, source: str, content_type: str, body: bytes) -> dict[str, object]:
    return {"url": url, "source": source, "content_type": content_type, "body": body, "cut": False}


def open_crawl_inputs(job: Job, max_bytes: int, exclude: Sequence[str] = ()) -> Inputs:
    """Sort the job's inputs; raises UsageError for a mix of seeds and files.

    `exclude`: globs of paths, relative to a given folder, that are not read.
    """
    if not job.inputs or job.inputs == ("-",):
        return _from_stream(spool(STDIN), max_bytes)
    lines: list[str] = []
    sources: list[Any] = []
    for given in job.inputs:
        if is_stream(given):
            streamed = _from_stream(spool(given), max_bytes)
            lines += [*streamed.seeds, *streamed.bad_seeds]
            sources += streamed.sources
        elif given.startswith(("http://", "https://")):
            lines.append(given)
        elif os.path.isfile(given) and _is_seed_list(given):
            lines += Path(given).read_text("utf-8", "replace").splitlines()
        else:
            sources += list(_from_path(given, max_bytes, exclude))
    if lines and sources:
        raise UsageError("INPUT has both seed URLs and files of pages (expected one of the two)")
    return _seeds(lines) if lines else Inputs(sources=tuple(sources))


def _seeds(lines: Sequence[str]) -> Inputs:
    given = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not given:
        raise BadData("no seed URL in the input")
    urls = {line: canonical(line) for line in given}
    good = dict.fromkeys(url for url in urls.values() if url)
    if not good:
        raise BadData(f"no seed URL in the input ({given[0]!r:.60} is not a URL)")
    return Inputs(tuple(good), tuple(line for line, url in urls.items() if not url))


def _is_seed_list(path: str) -> bool:
    """A text file whose first lines are URLs or comments."""
    if not path.lower().endswith((*TEXT_ENDINGS, ".urls", ".seeds", ".list")):
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in islice(file, SNIFFED_LINES)]
    given = [line for line in lines if line and not line.startswith("#")]
    return bool(given) and all(line.startswith(("http://", "https://")) for line in given)


def _from_stream(path: str, max_bytes: int) -> Inputs:
    with open(path, "rb") as file:
        head = Decompressed(file).read(512)
    if head.startswith(b"WARC/"):
        return Inputs(sources=(PageFiles(STDIN, (path,), max_bytes, warc=True),))
    opener: Any = partial(open, path, "rb")
    if form := form_of(opener):
        return Inputs(sources=(Source(STDIN, "document", form, opener),))
    with open(path, "rb") as file:
        return _seeds(decompressed(file).read().decode("utf-8", "replace").splitlines())


def _from_path(given: str, max_bytes: int, exclude: Sequence[str]) -> Iterator[Any]:
    """Sources of a file, a glob, or a folder and the folders in it."""
    folder = os.path.isdir(given)
    paths = (
        _walk(given, exclude) if folder else (sorted(glob.glob(given, recursive=True)) or [given])
    )
    loose: dict[str, list[str]] = {}
    readable = False
    for path in paths:
        kind = _kind(path, folder)
        if kind == "loose":
            loose.setdefault(os.path.dirname(path), []).append(path)
        elif kind == "archive":
            yield PageFiles(path, (path,), max_bytes, warc=True)
        elif kind == "records" and folder:
            yield FolderRecords(path, (path,), max_bytes)
        elif kind == "records":
            yield from from_path(path, "document")
        elif not folder:
            raise UsageError(_unknown(path))
        readable = readable or kind != "other"
    for directory, members in loose.items():
        for start in range(0, len(members), GROUP_FILES):
            name = os.path.basename(directory) or "files"
            yield PageFiles(name, tuple(members[start : start + GROUP_FILES]), max_bytes)
    if not readable:
        raise UsageError(_unknown(given))


def _kind(path: str, in_folder: bool) -> str:
    """archive, loose (HTML or text), records or other, by the ending."""
    lower = path.lower()
    if lower.endswith(WARC_ENDINGS):
        return "archive"
    if lower.removesuffix(".gz").endswith((*HTML_ENDINGS, *TEXT_ENDINGS)):
        return "loose"
    records = lower.endswith(RECORD_ENDINGS if in_folder else READABLE)
    return "records" if records or "://" in path else "other"


def _walk(folder: str, exclude: Sequence[str]) -> list[str]:
    """The files of a folder and its subfolders; a note lists those that are ignored by name."""
    below = sorted(os.path.split(path.rstrip("/")) for path in files_below(folder))
    paths = [os.path.join(parent, name) for parent, name in below]
    hidden = {path for path in paths if any(is_hidden(part) for part in path.split("/"))}
    say_left_out(folder, sorted(hidden))
    return [
        str(Path(folder) / path)
        for path in paths
        if path not in hidden and not _excluded(path, exclude)
    ]


def _excluded(path: str, globs: Sequence[str]) -> bool:
    """True if a glob matches the path or a folder that contains it."""
    parts = path.split("/")
    heads = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(fnmatchcase(head, form.rstrip("/")) for head in heads for form in globs)


def _unknown(given: str) -> str:
    known = " ".join((*WARC_ENDINGS, *HTML_ENDINGS, *TEXT_ENDINGS, ".jsonl", ".parquet"))
    missing = "No such file or directory, and not a URL"
    what = "contains no pages" if os.path.exists(given) else missing
    return f"{given}: {what} (expected http(s)://…, a folder, or a file ending in {known})"


def is_document(batch: pa.RecordBatch) -> bool:
    """True for batches of documents, False for batches of PAGE."""
    return batch.schema.names[: len(schemas.document().names)] == schemas.document().names
