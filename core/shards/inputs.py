"""From command-line arguments to sources: paths, directories, globs, URLs, or stdin.

A directory is read with its subfolders (`folders` defines what is left out).

stdin (no INPUT, or `-`) is recognised by its first bytes: Parquet, Arrow stream, gzip or zstd (then
decompressed), JSON lines; any other text is a list of paths, one per line. Streams are copied to a
temporary file unless stdin is a file, so that every source can be read more than once. An empty
stdin is BadData, because its producer has failed.
"""

import glob
import os
import select
import stat
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from sabia.core import stop
from sabia.core.errors import BadData, UsageError
from sabia.core.progress import waiting
from sabia.core.shards.folders import files_below, is_hidden, keys_of, shards_among
from sabia.core.shards.job import Job
from sabia.core.shards.json_lines import decompressed
from sabia.core.shards.sources import Opener, Source

READABLE = (".parquet", ".arrow", ".arrows", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json")
_LIST_LIMIT_BYTES = 64 << 20
LOOK_S = 0.2  # interval at which a stage that waits checks for a stop signal


def open_inputs(job: Job, kind: str) -> list[Source]:
    """The job's input shards in order; raises UsageError or BadData if one cannot be read."""
    if not job.inputs:
        return from_stdin(kind)
    sources: list[Source] = []
    for given in job.inputs:
        sources += from_stdin(kind) if given == "-" else from_path(given, kind)
    return sources


def from_path(given: str, kind: str, flag: str = "") -> list[Source]:
    """Sources of a file, a directory, a glob or an fsspec URL, given by the option `flag`."""
    try:
        names = expand(given)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}" if flag else str(error)) from None
    base = given.rstrip("/") + "/"
    return [
        Source(
            name, kind, sniff(partial(open_binary, name), name), partial(open_binary, name),
            keys_of(name.removeprefix(base)) if name.startswith(base) else (),
        )
        for name in names
    ]  # fmt: skip


def is_url(name: str) -> bool:
    """True for fsspec URLs such as s3://bucket/key."""
    return "://" in name


def open_binary(name: str) -> BinaryIO:
    """Open a local path or an fsspec URL for reading; BadData if it cannot be opened."""
    try:
        return fsspec.open(name, "rb").open() if is_url(name) else open(name, "rb")
    except OSError as error:
        raise BadData(f"{name}: {error.strerror or error}") from error


def expand(given: str, endings: Sequence[str] = READABLE) -> list[str]:
    """The files of a path, directory, glob or URL, sorted; never empty."""
    if is_url(given):
        return _expand_url(given, endings)
    if os.path.isdir(given):
        names = shards_among(files_below(given), endings, given)
        paths = [os.path.join(given, name) for name in names]
        problem = f"no input files in it; expected files ending in {' '.join(endings)}"
    elif os.path.exists(given):
        return [given]
    else:  # a glob; hidden files only if the pattern names them
        hidden = is_hidden(os.path.basename(given))
        matches = [p for p in sorted(glob.glob(given)) if hidden or not is_hidden(Path(p).name)]
        paths = [f for p in matches for f in (expand(p, endings) if os.path.isdir(p) else [p])]
        problem = "No such file or directory; check the path"
    if not paths:
        raise UsageError(f"{given}: {problem}")
    return paths


def _expand_url(given: str, endings: Sequence[str]) -> list[str]:
    files, path = fsspec.core.url_to_fs(given)
    protocol = given.partition("://")[0]
    if any(c in path for c in "*?["):
        paths = sorted(files.glob(path))
    elif files.isdir(path):
        below = (name.removeprefix(path).lstrip("/") for name in files.find(path))
        paths = [f"{path.rstrip('/')}/{name}" for name in shards_among(below, endings, given)]
    else:
        paths = [path]
    if not paths:
        raise UsageError(f"{given}: no such object")
    return [p if "://" in p else f"{protocol}://{p}" for p in paths]


def sniff(opener: Opener, name: str) -> str:
    """parquet, arrow or jsonl, from the first bytes (after decompressing gzip and zstd)."""
    with opener() as file:
        head = file.read(8)
        if not head:
            raise BadData(f"{name}: empty file")
        file.seek(0)
        if head[:4] == b"PAR1":
            return "parquet"
        if head[:4] == b"\xff\xff\xff\xff" or head[:6] == b"ARROW1":
            return "arrow"
        first = decompressed(file).read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first in (b"{", b"["):
        return "jsonl"
    raise BadData(f"{name}: neither Parquet, Arrow nor JSON lines (starts with {head!r})")


def from_stdin(kind: str) -> list[Source]:
    """Sources of standard input; the text form is a list of paths."""
    path = spool_stdin()
    opener: Any = partial(open, path, "rb")
    with opener() as file:
        text = decompressed(file)
        head = text.read(4096)
    if head[:4] in (b"PAR1", b"\xff\xff\xff\xff") or head.lstrip()[:1] == b"{":
        return [Source("<stdin>", kind, sniff(opener, "<stdin>"), opener)]
    with opener() as file:
        listed = decompressed(file).read(_LIST_LIMIT_BYTES).decode("utf-8", "replace").split("\n")
    sources: list[Source] = []
    for line in filter(None, (line.strip() for line in listed)):
        if not is_url(line) and not os.path.exists(line):
            raise BadData(f"<stdin>: neither records nor a list of paths (line {line!r:.60})")
        sources += from_path(line, kind)
    if not sources:
        raise BadData("<stdin>: neither records nor a list of paths (only white space)")
    return sources


def spool_stdin() -> str:
    """A path from which stdin can be read repeatedly; BadData if it is empty.

    A regular file is read in place; anything else is copied to an unnamed temporary file, whose
    path under /proc is valid as long as this process runs (worker processes can open it too).
    """
    try:
        stdin = sys.stdin.fileno()
    except (OSError, ValueError):
        raise BadData("<stdin>: it is not open") from None
    if stat.S_ISREG(os.fstat(stdin).st_mode):
        kept = stdin
    else:
        with tempfile.TemporaryFile() as spool:
            while block := _arrived(stdin):
                stop.check()
                spool.write(block)
            spool.flush()
            kept = os.dup(spool.fileno())  # stays open, and readable, until the process ends
    if os.fstat(kept).st_size == 0:
        raise BadData("<stdin>: empty input (its producer failed?)")
    return f"/proc/{os.getpid()}/fd/{kept}"


def _arrived(file: int) -> bytes:
    """What another process has written by now; b"" at the end. Raises Interrupted."""
    with waiting():
        while not select.select([file], [], [], LOOK_S)[0]:
            stop.check()
        return os.read(file, 1 << 20)
