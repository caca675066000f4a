"""Hashes of the content of files, by which inputs are known again.

`content_hash` is the hash of the bytes of a file, computed once: 128-bit XXH3. What a Parquet file
says about the run that wrote it is left out, so that equal rows have equal hashes. The hash of a
large local file is remembered in `cache_folder("hashes")` with its path, size, times and inode, in
a small file of its own, so that processes share the cache; an entry that cannot be read or is
damaged is computed again. An object of a store is named by its version or ETag.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128, xxh3_128_hexdigest

from sabia.core.digests import run_span
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.stores.objects import about_object, is_url, open_object, version
from sabia.kernels.runtime.cache_folder import cache_folder

CACHED_BYTES = 8 << 20  # smaller files are read each time
SETTLED_NS = 2 * 10**9  # a file changed later than this before may change again with equal times
KEPT_ENTRIES = 100_000  # a few hundred bytes each
SWEPT_AFTER = 1_000  # the cache is cut to KEPT_ENTRIES once in about so many new entries
_objects: dict[str, str] = {}  # URL → hash, in this run


def content_hash(name: str, open_file: Callable[[], BinaryIO] | None = None) -> str:
    """A hash of the content of a local path or an fsspec URL; of other names, `open_file` gives
    the content. Raises OSError."""
    if is_url(name):
        if name not in _objects:
            _objects[name] = _of_object(name)
        return _objects[name]
    if os.path.isfile(name):
        path = os.path.realpath(name)
        if os.path.getsize(path) < CACHED_BYTES:
            return _of_path(path)
        return remembered(path, "", _of_path)
    if open_file is None:
        raise FileNotFoundError(f"{name}: no such file")
    with open_file() as file:
        return _digest(file)


def forget_objects(*urls: str) -> None:
    """Ask the stores again for what is at these URLs; without any, for all."""
    for url in urls or tuple(_objects):
        _objects.pop(url, None)


def _of_object(url: str) -> str:
    if known := version(url, about_object(url)):
        return xxh3_128_hexdigest(known.encode())
    with open_object(url) as file:
        return _digest(file)


def _of_path(path: str) -> str:
    with open(path, "rb") as file:
        return _digest(file)


def remembered(path: str, what: str, compute: Callable[[str], str]) -> str:
    """compute(path), kept as long as the file does not change; what: names the result."""
    identity = _identity(path, os.stat(path))
    entry = cache_folder("hashes") / xxh3_128_hexdigest(os.fsencode(path) + what.encode())
    with contextlib.suppress(OSError, ValueError):
        stored = read_json(entry)
        if stored.get("file") == identity:
            return str(stored["hash"])
    digest = compute(path)
    after = os.stat(path)
    settled = time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > SETTLED_NS
    if settled and _identity(path, after) == identity:
        with contextlib.suppress(OSError):  # a home that cannot be written
            write_json(entry, {"file": identity, "hash": digest})
            if random.random() * SWEPT_AFTER < 1:
                _drop_oldest(entry.parent)
    return digest


def _drop_oldest(folder: Path) -> None:
    """Keep the newest KEPT_ENTRIES of the cache; other processes may do the same."""
    entries = []
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            entries.append((entry.stat().st_mtime_ns, entry.path))
    for _, path in sorted(entries)[:-KEPT_ENTRIES]:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _identity(path: str, status: os.stat_result) -> list[Any]:
    times = status.st_mtime_ns, status.st_ctime_ns
    return [os.fsencode(path).hex(), status.st_size, *times, status.st_ino, status.st_dev]


def _digest(file: Any) -> str:
    digest = xxh3_128()
    start, end = run_span(file)
    file.seek(0)
    left = start
    while left and (block := file.read(min(left, 1 << 20))):
        digest.update(block)
        left -= len(block)
    file.seek(end)
    buffer = memoryview(bytearray(1 << 20))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()
