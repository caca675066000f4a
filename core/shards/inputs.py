"""From command-line arguments to sources: paths, directories, globs, URLs, or stdin.

A directory is read with its subfolders (see below what is left out).

stdin (no INPUT, or `-`) is recognised by its first bytes: Parquet, Arrow stream, gzip or zstd (then
decompressed), JSON lines; any other text is a list of paths, one per line. Streams are copied to a
temporary file unless stdin is a file, so that every source can be read more than once; where it is
read only once, an Arrow stream is read as it arrives. An empty stdin is BadData, because its
producer has failed.

Which files of a folder are input: those in it and in its subfolders, except files beside rows.

Names that begin with `_` or `.` (as in pyarrow and datasets) and `*.rejects` are left out. So are
the paths of earlier versions: manifest.json, a folder `tokenizer` with a tokenizer.json, a folder
`rejects` beside shards, and files of rejects. A folder NAME=VALUE adds a column to every row in it.
"""

import glob
import os
import posixpath
import re
import select
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO
from urllib.parse import unquote

import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import BadData, UsageError
from sabia.core.file_hashes import forget_objects
from sabia.core.notes import waiting
from sabia.core.shards.job import FORMATS, Job, file_ending, is_stream, slurm_slice
from sabia.core.shards.sources import ArrowStream, Opener, Source, reading
from sabia.core.shards.stores.objects import (
    exists,
    is_url,
    matching,
    objects_below,
    open_object,
    plain_path,
)

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
SHOWN = 5
BESIDE_ROWS = ("_manifest.json", "_tokenizer", "_SUCCESS", "_metadata", "_common_metadata")
BESIDE_ARROW = ("state.json", "dataset_info.json", "dataset_dict.json")  # of datasets
_RECORD = re.compile(r"part-(\d+)\.json")  # of a part of `tokenize --format`
_PART = re.compile(r"(^|/)part-[^/]*\.parquet\Z")
_FORMER_REJECTS = re.compile(r"(.*\.rejects|sabia-.*\.rejects-\d+)\.(parquet|arrow|jsonl.*)")


def files_below(folder: str) -> Iterator[str]:
    """Relative paths of the files in a local folder and its subfolders, with `/`.

    Links to folders are followed, once each; folders that are left out by name are listed with a
    final `/` and not entered. Raises BadData for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise BadData(f"{error.filename}: {error.strerror}")

    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        here = os.path.relpath(parent, folder)
        prefix = "" if here == "." else f"{here}/"
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (f"{prefix}{name}/" for name in folders if is_hidden(name))
        folders[:] = [name for name in folders if not is_hidden(name)]
        yield from (f"{prefix}{name}" for name in names)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is left out because of its name."""
    return name.startswith(("_", ".")) or name.endswith(".rejects")


def shards_among(paths: Iterable[str], endings: Sequence[str], given: str) -> list[str]:
    """The paths that are shards, sorted; a note lists the others."""
    every = sorted(set(paths), key=lambda path: path.split("/"))
    former = _former_places(every)
    taken = [path for path in every if path.lower().endswith(tuple(endings)) and not former(path)
             and not any(is_hidden(part) for part in path.split("/"))]  # fmt: skip
    others = {_left_out(path) for path in every if not former(path)}.difference(taken)
    say_left_out(given, sorted(others))
    return taken


def _left_out(path: str) -> str:
    """A path up to the first folder that is left out by name."""
    parts = path.split("/")
    ends = [n for n, part in enumerate(parts[:-1], 1) if is_hidden(part)]
    return "/".join(parts[: ends[0]]) + "/" if ends else path


def say_left_out(given: str, paths: Sequence[str]) -> None:
    """Print a note that lists what is left out of a folder, except known files beside rows and
    hidden files."""
    names = [(path, posixpath.basename(path.rstrip("/"))) for path in paths]
    odd = [path for path, name in names if name[:1] != "." and name not in BESIDE_ROWS]
    if odd:
        more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        count = f"{len(odd)} files or folders: " if len(odd) > 1 else ""
        notes.note(f"{given}: left out {count}{', '.join(odd[:SHOWN])}{more}")


def _former_places(paths: Sequence[str]) -> Callable[[str], bool]:
    """A function that recognises what earlier versions, and datasets, wrote beside shards."""
    there = set(paths)
    shards = {posixpath.dirname(path) for path in paths if _PART.search(path)}

    def former(path: str) -> bool:
        *folders, name = path.split("/")
        if name in BESIDE_ARROW or name == "manifest.json" or _FORMER_REJECTS.fullmatch(name):
            return True
        if (record := _RECORD.fullmatch(name)) and _data_of(record[1], folders) & there:
            return True
        for depth, folder in enumerate(folders):
            parent = "/".join(folders[:depth])
            whole = "/".join(folders[: depth + 1])
            if folder == "tokenizer" and f"{whole}/tokenizer.json" in there:
                return True
            if folder == "rejects" and parent in shards:
                return True
        return False

    return former


def _data_of(part: str, folders: Sequence[str]) -> set[str]:
    """The paths that the data of a part with a record may have."""
    return {"/".join([*folders, name]) for name in (f"data-{part}.arrow", f"part-{part}.bin")}


def keys_of(path: str) -> tuple[tuple[str, str | None], ...]:
    """Columns and values from the folders NAME=VALUE of a path."""
    folders = (part.partition("=") for part in path.split("/")[:-1])
    columns = {unquote(name): unquote(value) for name, sign, value in folders if name and sign}
    return tuple((name, None if value == NO_VALUE else value) for name, value in columns.items())


_JSON = (".jsonl", ".ndjson", ".json")
READABLE = (".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc",
            *(f"{json}{packed}" for packed in ("", ".gz", ".zst") for json in _JSON))  # fmt: skip
STDIN = "<stdin>"
_LIST_LIMIT_BYTES = 64 << 20
_MOST_SCHEMA_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 16
LOOK_S = 0.2  # interval at which a stage that waits checks for a stop signal


def open_inputs(job: Job, kind: str, once: bool = False) -> list[Source]:
    """The job's input shards in order; raises UsageError or BadData if one cannot be read.

    once: the caller reads the batches of each source once, and its fingerprint after that, so an
    Arrow stream is read as it arrives. It is copied first where its fingerprint is needed before: a
    dry run, a slice, an output that may be complete, or one whose metadata is at its start.
    """
    forget_objects()
    once = once and job.inputs in ((), ("-",)) and not _needs_fingerprint_first(job)
    sources: list[Source] = []
    written = _written(job)
    for given in job.inputs or ("-",):
        sources += from_stdin(kind, once) if given == "-" else from_path(given, kind, "", written)
    own = [source.name for source in sources if _is_part_of(source.name, written)]
    if 0 < len(own) < len(sources):
        raise UsageError(f"{own[0]}: an input among the outputs of this call; leave it out")
    if kind == "document" and job.text_column:
        return [replace(source, text_column=job.text_column) for source in sources]
    return sources


def _written(job: Job) -> list[str]:
    """The files and directories that a job writes, as `_real_path` gives them."""
    paths = (job.out, job.rejects, job.scratch, *job.call.get("writes", ()))
    return [_real_path(path) for path in paths if path and path != "-" and not is_stream(path)]


def _real_path(path: str) -> str:
    return path.rstrip("/") if is_url(path) else os.path.realpath(path)


def _is_below(path: str, outputs: Sequence[str]) -> bool:
    """Whether a path is one of the outputs or lies below one."""
    real = f"{_real_path(path)}/" if outputs else ""
    return any(real.startswith(f"{one}/") for one in outputs)


def _is_part_of(path: str, outputs: Sequence[str]) -> bool:
    """Whether a file is one of the outputs or a part in such a directory."""
    real = _real_path(path) if outputs else ""
    parent, _, name = real.rpartition("/")
    return real in outputs or (parent in outputs and name.startswith("part-"))


def from_path(given: str, kind: str, flag: str = "", written: Sequence[str] = ()) -> list[Source]:
    """Sources of a file, a directory, a glob, an fsspec URL, or a FIFO or pipe such as bash passes
    for `<(…)`, given by the option `flag`. What a directory or glob has of the outputs `written` is
    left out, so that a second call does not read what the first one wrote."""
    given = plain_path(given)
    if is_stream(given):
        return _from_stream(spool(given), given, kind)
    try:
        names = expand(given)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}" if flag else str(error)) from None
    if not _is_below(given, written):
        own = {name for name in names if _is_below(name, written)}
        names = [name for name in names if name not in own]
        say_left_out(given, sorted(own))
    return [
        Source(name, kind, _form(name), partial(open_binary, name), keys_of(name)) for name in names
    ]


def _form(name: str) -> str:
    """The format of a file: of an object by its ending, where that names one, else by its bytes."""
    ending = file_ending(name)
    if is_url(name) and ending:
        return FORMATS[ending]
    return sniff(partial(open_binary, name), name)


def open_binary(name: str) -> BinaryIO:
    """Open a local path or an fsspec URL for reading; BadData or Failed if it cannot be opened."""
    if is_url(name):
        return open_object(name)
    try:
        return open(name, "rb")
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
    else:  # a glob; hidden files and folders only if the pattern names them
        hidden = any(map(is_hidden, _names(given)))
        every = sorted(glob.glob(given, recursive=True))
        matches = [p for p in every if hidden or not any(map(is_hidden, _names(p)))]
        say_left_out(given, sorted(set(every).difference(matches)))
        if "**" in given:  # it also matches the folders of the files that it matches
            matches = [p for p in matches if not os.path.isdir(p)]
        paths = [f for p in matches for f in (expand(p, endings) if os.path.isdir(p) else [p])]
        problem = "No such file or directory; check the path"
    if not paths:
        raise UsageError(f"{given}: {problem}")
    return paths


def _names(path: str) -> list[str]:
    """The names of the folders and the file in a path."""
    return [name for name in path.split("/") if name not in ("", ".", "..")]


def _expand_url(given: str, endings: Sequence[str]) -> list[str]:
    problem = "no such object, folder or bucket; check the URL"
    if any(c in given for c in "*?["):
        paths = matching(given)
    elif below := objects_below(given):
        names = shards_among(below, endings, given)
        paths = [f"{given.rstrip('/')}/{name}" for name in names]
        problem = f"no input files in it; expected files ending in {' '.join(endings)}"
    else:
        paths = [given] if exists(given) else []
    if not paths:
        raise UsageError(f"{given}: {problem}")
    return paths


def sniff(opener: Opener, name: str) -> str:
    """parquet, arrow or jsonl, from the first bytes (after decompressing gzip and zstd)."""
    with reading(name):
        form = form_of(opener)
    if form:
        return form
    with opener() as file:
        head = file.read(8)
    if not head:
        raise BadData(f"{name}: empty file")
    raise BadData(f"{name}: neither Parquet, Arrow nor JSON (starts with {head!r})")


def form_of(opener: Opener) -> str:
    """parquet, arrow or jsonl, or '' if it is neither."""
    with opener() as file:
        head = file.read(8)
        file.seek(0)
        if head[:4] == b"PAR1":
            return "parquet"
        if head[:4] == b"\xff\xff\xff\xff" or head[:6] == b"ARROW1":
            return "arrow"
        from sabia.core.shards.json_lines import decompressed

        content, first = decompressed(file), b""
        while not first and (block := content.read(_BLOCK_BYTES)):
            first = block.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    return "jsonl" if first in (b"{", b"[") else ""


def _needs_fingerprint_first(job: Job) -> bool:
    out = str(job.out)
    if job.dry_run or (job.shard or slurm_slice()) is not None:
        return True
    if job.rejects and os.path.exists(job.rejects):
        return True
    if job.to_stdout:
        return False
    if is_url(out) or file_ending(out) not in ("", ".parquet"):
        return True
    return bool(os.listdir(out)) if os.path.isdir(out) else os.path.exists(out)


def from_stdin(kind: str, once: bool = False) -> list[Source]:
    """Sources of standard input; the text form is a list of paths. once: see `open_inputs`."""
    stdin = _Arriving(STDIN)
    if once and not stdin.is_file and (stream := _arrow_stream(stdin)) is not None:
        return [Source(STDIN, kind, "arrow", _not_a_file, stream=stream)]
    return _from_stream(_spooled(stdin), STDIN, kind)


def _from_stream(path: str, name: str, kind: str) -> list[Source]:
    """Sources of a stream that is spooled at `path`: its records, or the paths that it lists."""
    opener: Any = partial(open, path, "rb")
    with reading(name):
        form = form_of(opener)
    if form:
        return [Source(name, kind, form, opener)]
    from sabia.core.shards.json_lines import decompressed

    with reading(name), opener() as file:
        listed = decompressed(file).read(_LIST_LIMIT_BYTES + 1)
    if len(listed) > _LIST_LIMIT_BYTES:
        raise BadData(f"{name}: a list of paths of more than {_LIST_LIMIT_BYTES >> 20} MiB")
    sources: list[Source] = []
    for line in filter(None, (os.fsdecode(line.strip()) for line in listed.split(b"\n"))):
        if not is_url(line) and not os.path.exists(line):
            raise BadData(f"{name}: neither records nor a list of paths (line {line!r:.60})")
        sources += from_path(line, kind)
    if not sources:
        raise BadData(f"{name}: neither records nor a list of paths (only white space)")
    return sources


def _not_a_file() -> BinaryIO:
    raise OSError("a stream is no file")


def spool(name: str) -> str:
    """A path from which stdin, a FIFO or a pipe can be read repeatedly; BadData if it is empty.

    A regular file is read in place; anything else is copied to an unnamed temporary file, whose
    path under /proc is valid as long as this process runs (worker processes can open it too).
    """
    return _spooled(_Arriving(name))


def _spooled(stream: "_Arriving") -> str:
    if stream.is_file:
        kept = stream.fileno
    else:
        with tempfile.TemporaryFile() as spool:
            while block := stream.read_some(1 << 20):
                stop.check()
                spool.write(block)
            spool.flush()
            kept = os.dup(spool.fileno())  # stays open, and readable, until the process ends
    if os.fstat(kept).st_size == 0:
        raise BadData(f"{stream.name}: empty input (its producer failed?)")
    return f"/proc/{os.getpid()}/fd/{kept}"


class _Arriving:
    """Stdin, a FIFO or a pipe; the time in which it has nothing to read counts as waiting."""

    def __init__(self, name: str) -> None:
        """Raises BadData if it cannot be opened."""
        self.name = name
        try:
            self.fileno = sys.stdin.fileno() if name == STDIN else os.open(name, os.O_RDONLY)
        except (OSError, ValueError) as error:
            raise BadData(f"{name}: it is not open ({error})") from None
        self.is_file = stat.S_ISREG(os.fstat(self.fileno).st_mode)
        self._start = b""  # what `peek` has read

    def peek(self, size: int) -> bytes:
        """The next `size` bytes (fewer at the end), which are read again."""
        while len(self._start) < size and (block := self._arrived(_BLOCK_BYTES)):
            self._start += block
        return self._start[:size]

    def read_some(self, limit: int) -> bytes:
        """At most so many bytes, as soon as there are any; b"" at the end. Raises Interrupted."""
        block, self._start = self._start[:limit], self._start[limit:]
        return block or self._arrived(limit)

    def _arrived(self, limit: int) -> bytes:
        with waiting():
            while not select.select([self.fileno], [], [], LOOK_S)[0]:
                stop.check()
            return os.read(self.fileno, limit)


def _arrow_stream(stdin: _Arriving) -> ArrowStream | None:
    """Stdin as an Arrow stream, where it is one whose columns follow from its first message (maps,
    as in scores of earlier versions, name theirs in the rows)."""
    start = stdin.peek(8)
    size = int.from_bytes(start[4:], "little")
    if start[:4] != b"\xff\xff\xff\xff" or not 0 < size <= _MOST_SCHEMA_BYTES:
        return None
    try:
        types = pa.ipc.read_schema(pa.BufferReader(stdin.peek(8 + size))).types
    except (pa.ArrowException, OSError) as error:
        raise BadData(f"<stdin>: not an Arrow stream ({error})") from error
    return None if any(map(pa.types.is_map, types)) else ArrowStream(stdin.read_some)
