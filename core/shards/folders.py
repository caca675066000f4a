"""Which files of a folder are input: those in it and in its subfolders, except files beside rows.

Names that begin with `_` or `.` (as in pyarrow and datasets) and `*.rejects` are left out. So are
the paths of earlier versions: manifest.json, a folder `tokenizer` with a tokenizer.json, a folder
`rejects` beside shards, and files of rejects. A folder NAME=VALUE adds a column to every row in it.
"""

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import unquote

from sabia.core import notes
from sabia.core.errors import BadData

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
