"""The format of an output file follows from the ending of its path; any other path is a directory.

Standard library only, because options are checked before anything heavy is imported.
"""

import os
import re
import stat

from sabia.core.errors import UsageError

# ending → format of the rows
FORMATS = {".parquet": "parquet", ".arrow": "arrow",
           ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl"}  # fmt: skip
EXPECTED = ".parquet, .arrow, .jsonl, .jsonl.gz or .jsonl.zst"
# endings of other data formats, for which a directory would be a surprise
_OTHER = (".arrows", ".avro", ".bz2", ".csv", ".db", ".duckdb", ".feather", ".gz", ".h5", ".html",
          ".ipc", ".json", ".lance", ".lz4", ".md", ".ndjson", ".npy", ".npz", ".orc", ".pickle",
          ".pkl", ".pq", ".sqlite", ".tar", ".tsv", ".txt", ".warc", ".xlsx", ".xml", ".xz",
          ".yaml", ".zip", ".zst")  # fmt: skip


def file_ending(path: str) -> str:
    """The ending in FORMATS of a path of a file, in lower case; '' for any other path."""
    return max((end for end in FORMATS if path.lower().endswith(end)), key=len, default="")


def without_ending(path: str) -> str:
    """The path of a file without its ending."""
    return path[: len(path) - len(file_ending(path))]


def check_ending(path: str | None, flag: str) -> None:
    """Raise UsageError for the path of an output whose ending names a format that is not written.

    A path that ends with / is a directory, whatever its name.
    """
    if not path or is_stream(path):
        return
    if file_ending(path) and os.path.isdir(path):
        raise UsageError(f"{flag}: {path} is a directory; write {path}/ for shards in it")
    if not file_ending(path) and path.lower().endswith(_OTHER):
        raise UsageError(f"{flag}: {path} (expected a file ending in {EXPECTED}, or a directory)")


def is_stream(path: str) -> bool:
    """Whether a path is written or read only once, in order: a FIFO, the end of a pipe (as bash
    passes `>(…)` and `<(…)`), a socket or a character device."""
    if re.match(r"/dev/(fd/|std)|/proc/[^/]+/fd/", path):
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)
