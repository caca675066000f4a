"""Local paths for files and folders at URLs, for what reads or writes them through paths.

`fetched` is a read-only copy in the cache `objects/`, made once for each version of the content.
`folder` is a copy that may be changed: changed files are uploaded at the end, those of LAST last,
because readers take a folder with them as complete.

`local_paths` is for the options of a call. What a command reads by path, such as `--model`, is
fetched into the cache. What it writes by path, such as a run directory, is written into a spool in
the cache and uploaded after the call. The spool remains if the call is killed, so that the same
command on this machine resumes from it. Data stages read and write their shards at the URLs
themselves.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from sabia.core import notes, stop
from sabia.core.errors import Failed, Infeasible, Interrupted, Unavailable, UsageError
from sabia.core.shards.atomic import atomic_directory, scratch_directory
from sabia.core.shards.job import Job, several_tasks
from sabia.core.shards.lineage.run_record import may_be_file
from sabia.core.shards.stores.listed import version_of
from sabia.core.shards.stores.objects import (
    LOCAL,
    about_object,
    download,
    exists,
    is_url,
    objects_below,
    plain_path,
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


NO_STORE = ("http", "https", "redis", "rediss")
# commands that write their rows to the URL itself
ROWS = ("crawl", "classify", "dedup", "rewrite", "tokenize", "sft teacher")
RUNS = ("pretrain", "sft", "grpo")
# options that are read and written where they are
DIRECT = {"inputs", "rejects", "removed", "save_tokenizer", "checkpoint_url", "validation", "usage",
          "contaminated", "scores", "replay", "document"}  # fmt: skip
WRITTEN = {"stats", "report", "plot", "replaced", "review", "index", "scratch"}
CHANGING = {"config", "state", "cache", "judge_cache", "row_cache", "updates", "sampler_folder",
            "warc"}  # fmt: skip
CHECKPOINTS = "checkpoints"  # of a run: they are uploaded while it runs
_URL = re.compile(r"(?P<label>[^/=:]*=)?(?P<url>(?P<protocol>[a-z][a-z0-9+]*)://.+)")


@contextlib.contextmanager
def local_paths(job: Job, options: Any) -> Iterator[tuple[Job, Any]]:
    """The job and the options of a call with local paths in place of URLs; what the call writes is
    uploaded when it ends, also where it is interrupted or a gate is closed."""
    with contextlib.ExitStack() as stack:
        changes: dict[str, Any] = {}
        by_url = job.command in ROWS and getattr(options, "format", "rows") == "rows"
        by_url |= job.command in RUNS and _is_one_of_several()  # which the run refuses
        for name, option in options.table.items():
            value = getattr(options, name)
            if name not in DIRECT and (may_be_file(option) or name in WRITTEN | CHANGING | {"out"}):
                several = isinstance(value, list | tuple)
                paths = [_local(stack, job, name, option.flag, one, by_url)
                         for one in (value if several else [value])]  # fmt: skip
                if paths != (list(value) if several else [value]):
                    changes[name] = type(value)(paths) if several else paths[0]
        if "out" in changes and job.command in RUNS and not options.checkpoint_url:
            changes["checkpoint_url"] = f"{str(job.out).rstrip('/')}/{CHECKPOINTS}"
        fields = {name: value for name, value in changes.items() if name in _FIELDS}
        yield replace(job, **fields), options.replace(**changes) if changes else options


_FIELDS = ("out", "scratch", "stats")  # of a job


def _local(
    stack: contextlib.ExitStack, job: Job, name: str, flag: str, value: object, by_url: bool
) -> Any:  # fmt: skip
    """The local path for the value of an option; other values as they are, as is the output of a
    command that writes it `by_url`."""
    match = _URL.fullmatch(value) if isinstance(value, str) else None
    if match is None or match["protocol"] in NO_STORE:
        return value
    label, url = match["label"] or "", match["url"]
    if match["protocol"] in LOCAL:
        return label + plain_path(url)
    if name in CHANGING:
        raise UsageError(f"{flag}: {url} (expected a local path: it changes during the call)")
    if name == "out" and by_url:
        return value
    if name == "out" or name in WRITTEN:
        return label + stack.enter_context(spool(url, flag, not job.dry_run, name == "scratch"))
    try:
        return label + fetched(url)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None


def _is_one_of_several() -> bool:
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return os.environ.get("WORLD_SIZE", "1") != "1" or bool(several_tasks()) or "," in hosts


@contextlib.contextmanager
def spool(url: str, flag: str, keep: bool = True, shared: bool = False) -> Iterator[str]:
    """A local path with the content of a file or folder at a URL, which gets what is written there
    in the meantime. Where another process of this machine has it, `shared` gives a temporary folder
    instead; else that is Failed."""
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    base = writable_cache_folder("spool") / xxh3_128_hexdigest(url.encode())
    files, known = base / "files", base / "known.json"
    files.mkdir(parents=True, exist_ok=True)
    with open(f"{base}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if shared:
                with folder(url, keep) as temporary:
                    yield temporary
                return
            raise Failed(f"{flag}: another process of this machine writes to {url}") from error
        files.mkdir(parents=True, exist_ok=True)
        before = _filled(url, name, files, known)
        notes.name_copy(str(files / name), url)
        try:
            yield str(files / name)
        except (Interrupted, Unavailable, Infeasible):
            if keep:
                _sent(parent, files, known, before)
            raise
        if keep:
            _sent(parent, files, known, before)
        shutil.rmtree(base)


Known = dict[str, list[Any]]  # path → size, time of change in ns, version at the URL


def _filled(url: str, name: str, files: Path, known: Path) -> Known:
    """Download what has changed at a URL since the spool was filled; the files as they were then.
    What was changed here since, by a call that was killed, stays unless it changed there too."""
    before: Known = json.loads(known.read_text()) if known.exists() else {}
    there = objects_below(url)
    below = {f"{name}/{path}": about for path, about in there.items()
             if not path.startswith(f"{CHECKPOINTS}/")}  # fmt: skip
    if not there and exists(url):
        below = {name: about_object(url)}
    for path, about in below.items():
        if before.get(path, [0, 0, ""])[2] != version_of(about):
            (files / path).parent.mkdir(parents=True, exist_ok=True)
            download(f"{url.removesuffix(name)}{path}", files / path)
            before[path] = [*state_of(files)[path], version_of(about)]
    for path in before.keys() - below.keys():
        del before[path]
    known.write_text(json.dumps(before))
    return before


def _sent(parent: str, files: Path, known: Path, before: Known) -> None:
    """Upload what has changed in the spool."""
    state = {path: (size, changed) for path, (size, changed, _) in before.items()}
    send(files, parent, state, f"/{CHECKPOINTS}/")
    known.unlink(missing_ok=True)
