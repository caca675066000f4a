"""What counts as input in a folder: the files in it and below it, but for what stands beside rows.

Left out are names that begin with `_` or `.` and `*.rejects`, as pyarrow and datasets leave out the
first two. So are the places of earlier versions: manifest.json, a folder `tokenizer` with a
tokenizer.json, a folder `rejects` beside shards, and files of rejects. A folder NAME=VALUE gives
every row below it a column.
"""

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import unquote

from sabia.core import notes

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
SHOWN = 5
BESIDE_ROWS = ("_manifest.json", "_tokenizer", "_SUCCESS", "_metadata", "_common_metadata")
_FORMER_REJECTS = re.compile(r"(.*\.rejects|sabia-.*\.rejects-\d+)\.parquet")


def files_below(folder: str) -> Iterator[str]:
    """Paths of the files in a local folder and below it, as seen from it, with `/`.

    Links to folders are followed, once each; folders whose names leave them out are named with a
    `/` behind and not entered.
    """
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
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
    """Whether the name of a file or folder leaves it out of every input."""
    return name.startswith(("_", ".")) or name.endswith(".rejects")


def shards_among(paths: Iterable[str], endings: Sequence[str], given: str) -> list[str]:
    """The paths that are shards, sorted; a note names what else is there."""
    every = sorted(set(paths), key=lambda path: path.split("/"))
    former = _former_places(every)
    taken = [path for path in every if path.endswith(tuple(endings)) and not former(path)
             and not any(is_hidden(part) for part in path.split("/"))]  # fmt: skip
    others = {_left_out(path) for path in every if not former(path)}.difference(taken)
    say_left_out(given, sorted(others))
    return taken


def _left_out(path: str) -> str:
    """A path up to the folder whose name leaves it out."""
    parts = path.split("/")
    ends = [n for n, part in enumerate(parts[:-1], 1) if is_hidden(part)]
    return "/".join(parts[: ends[0]]) + "/" if ends else path


def say_left_out(given: str, paths: Sequence[str]) -> None:
    """A note that names what is left out of a folder, but for what always stands beside rows."""
    odd = [path for path in paths if _is_worth_a_note(path)]
    if odd:
        more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        notes.note(f"{given}: left out {', '.join(odd[:SHOWN])}{more}")


def _former_places(paths: Sequence[str]) -> Callable[[str], bool]:
    """A function that knows what earlier versions put beside shards."""
    there = set(paths)
    shards = {posixpath.dirname(path) for path in paths if _is_part(posixpath.basename(path))}

    def former(path: str) -> bool:
        *folders, name = path.split("/")
        if name == "manifest.json" or _FORMER_REJECTS.fullmatch(name):
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


def _is_part(name: str) -> bool:
    return name.startswith("part-") and name.endswith(".parquet")


def _is_worth_a_note(path: str) -> bool:
    """False for what is known to stand beside rows, and for files that no listing shows."""
    name = posixpath.basename(path.rstrip("/"))
    return not name.startswith(".") and name not in BESIDE_ROWS


def keys_of(path: str) -> tuple[tuple[str, str | None], ...]:
    """Columns and values that the folders NAME=VALUE of a path say."""
    folders = (part.partition("=") for part in path.split("/")[:-1])
    columns = {unquote(name): unquote(value) for name, sign, value in folders if name and sign}
    return tuple((name, None if value == NO_VALUE else value) for name, value in columns.items())
