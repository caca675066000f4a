"""Local paths for the options of a call whose values are URLs of files and folders.

What a command reads by path, such as `--model`, is fetched into the cache. What it writes by path,
such as a run directory, is written into a spool in the cache and uploaded after the call. The spool
remains if the call is killed, so that the same command on this machine resumes from it. Data stages
read and write their shards at the URLs themselves.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from sabia.core import notes
from sabia.core.errors import Failed, Infeasible, Interrupted, Unavailable, UsageError
from sabia.core.shards.job import Job, several_tasks
from sabia.core.shards.lineage.run_record import may_be_file
from sabia.core.shards.stores.listed import version_of
from sabia.core.shards.stores.mirrors import fetched, folder, send, state_of
from sabia.core.shards.stores.objects import (
    LOCAL,
    about_object,
    download,
    exists,
    objects_below,
    plain_path,
)
from sabia.kernels.runtime.cache_folder import writable_cache_folder

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
