"""Local paths for files and folders at URLs, for what reads or writes them through paths.

`fetched` is a read-only copy in the cache `objects/`, made once for each version of the content.
`folder` is a copy that may be changed: changed files are uploaded at the end, those of LAST last,
because readers take a folder with them as complete.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.shards.atomic import atomic_directory, scratch_directory
from sabia.core.shards.stores.listed import version_of
from sabia.core.shards.stores.objects import (
    about_object,
    download,
    exists,
    is_url,
    objects_below,
    remove,
    upload,
)
from sabia.kernels.runtime.cache_folder import writable_cache_folder

STREAMS = 4
KEPT_S = 30 * 86400  # a copy that was not used for so long is removed
LAST = (
    "segment.json",
    "starts.json",
    "tokenizer.json",
    "config.json",
    "_manifest.json",
    "run.json",
)  # in this order
_parents: dict[Path, str] = {}  # folder of a copy → URL of the folder of what it is a copy of
State = dict[str, tuple[int, int]]  # relative path → size, time of change in ns


def fetched(url: str) -> str:
    """A local copy of a file or folder, for reading; UsageError if there is none."""
    url = url.rstrip("/")
    below = objects_below(url)
    if not below and not exists(url):
        raise UsageError(f"{url}: no such object, folder or bucket; check the URL")
    versions = {name: version_of(about) for name, about in below.items()} or {
        "": version_of(about_object(url))
    }
    digest = xxh3_128_hexdigest(repr((url, versions)).encode())
    path = writable_cache_folder("objects") / digest
    name = url.rpartition("/")[2]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of this machine fetch it once
        if not path.is_dir():
            with atomic_directory(path) as temporary:
                if below:
                    _download_all(url, below, temporary / name)
                else:
                    download(url, temporary / name)
        os.utime(path)
        for old in path.parent.iterdir():
            if old.is_dir() and time.time() - old.stat().st_mtime > KEPT_S:
                shutil.rmtree(old, ignore_errors=True)
    notes.name_copy(str(path / name), url)
    _parents[path] = url.rpartition("/")[0]
    return str(path / name)


def beside(path: str, name: str) -> Path:
    """The local path of a file that the one at `path` names: a URL, or a path relative to itself,
    also where `path` is a copy of a file at a URL."""
    parent = Path(path).parent
    if is_url(name):
        return Path(fetched(name))
    return Path(fetched(f"{_parents[parent]}/{name}")) if parent in _parents else parent / name


def _download_all(url: str, names: Iterable[str], folder: Path) -> None:
    def one(name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        download(f"{url}/{name}", folder / name)

    folder.mkdir(parents=True, exist_ok=True)
    _in_parallel(one, names)


def _in_parallel(work: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        for _ in pool.map(work, names):
            stop.check()


@contextlib.contextmanager
def folder(path: str, keep: bool = True) -> Iterator[str]:
    """A local folder with the content of one at a URL, which gets what is changed in it (not with
    keep=False, or after an error); a local folder is given as it is."""
    if not is_url(path):
        yield path
        return
    url = path.rstrip("/")
    with scratch_directory("sabia-objects") as scratch:
        local = scratch / url.rpartition("/")[2]
        _download_all(url, objects_below(url), local)
        before = state_of(local)
        yield str(local)
        if keep:
            send(local, url, before)


def state_of(folder: Path) -> State:
    """What tells whether a file of a folder has changed; locks and temporary files are left out."""
    below = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            if name != ".lock" and not (name.startswith(".") and name.endswith(".tmp")):
                about = os.stat(os.path.join(parent, name))
                path = os.path.relpath(os.path.join(parent, name), folder)
                below[path] = about.st_size, about.st_mtime_ns
    return below


def send(local: Path, url: str, before: State, without: str = "//") -> None:
    """Upload the files of a folder that are not as in `before`, and remove those that are gone;
    without those whose paths have a part `without`."""
    now = {name: state for name, state in state_of(local).items() if without not in f"/{name}"}
    new = [name for name in now if now[name] != before.get(name)]
    for name in before.keys() - now.keys():
        remove(f"{url}/{name}")
    last = [name for name in new if os.path.basename(name) in LAST]
    first = [name for name in new if name not in last]
    _in_parallel(lambda name: upload(local / name, f"{url}/{name}"), first)
    for name in sorted(last, key=lambda name: LAST.index(os.path.basename(name))):
        upload(local / name, f"{url}/{name}")
