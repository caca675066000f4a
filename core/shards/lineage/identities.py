"""What a file or directory contains, known without reading much of it.

Two files with equal identities have equal rows or weights: a Parquet file by its digests, a small
file by its bytes, a directory by the records of the run that made it or by its files. A file which
is large and has no digests is only known by its size.
"""

import contextlib
import hashlib
import os
from pathlib import Path

from sabia.core.errors import BadData
from sabia.core.shards.atomic import read_json

# file in a directory → its entries that decide what the directory contains
RECORDS = {
    "run.json": ("fingerprint", "result", "finished"),
    "quantization.json": ("fingerprint",),
    "_manifest.json": ("command", "options", "seed"),
}
SHARDS = "_manifest.json"
MOST_FILES = 1000


def identity_of(path: str) -> str:
    """The identity of a local file or directory; '' for a URL or where there is nothing to read."""
    try:
        if "://" in path or not os.path.exists(path):
            return ""
        return _of_directory(Path(path)) if os.path.isdir(path) else _of_file(path)
    except (OSError, BadData):
        return ""


def _of_file(path: str) -> str:
    from sabia.core.digests import footer_digest  # loads pyarrow, which not every command needs
    from sabia.core.file_hashes import CACHED_BYTES, content_hash

    with open(path, "rb") as file:
        if digest := footer_digest(file, path):
            return f"digests {digest}"
    size = os.path.getsize(path)
    return f"bytes {content_hash(path)}" if size < CACHED_BYTES else f"size {size}"


def _of_directory(folder: Path) -> str:
    """By the record of the run, here or (for the `final` of a run) above; else by its files."""
    for directory in (folder, folder.parent) if folder.name == "final" else (folder,):
        for name, entries in RECORDS.items():
            with contextlib.suppress(OSError, ValueError):
                record = read_json(directory / name)
                values = [record.get(entry) for entry in entries]
                if name == SHARDS:
                    values += [one.get("fingerprint") for one in record.get("shards", ())]
                return f"record {_hash(repr(values))}"
    listed = sorted(p for p in folder.iterdir() if p.is_file() and p.name[:1] not in "._")
    return f"files {_hash(repr([(p.name, _of_file(str(p))) for p in listed[:MOST_FILES]]))}"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
