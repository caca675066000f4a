"""An output directory: shards part-NNNNN.parquet and nothing else that a reader would open.

pyarrow opens every file in it and in its subfolders except names that begin with `_` or `.`, so the
manifest and a tokenizer have such names, and rejects are written to OUT.rejects beside it. datasets
leaves out only names with `.`, and then reads the files of the most frequent ending; because a
tokenizer can have more files than there are shards, `.huggingface.yaml` names the shards. Earlier
versions wrote OUT/manifest.json, OUT/tokenizer/ and OUT/rejects/; a stage that writes to such a
directory moves them.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from sabia.core import notes
from sabia.core.digests import parquet_at
from sabia.core.errors import BadData, UsageError
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.job import Job
from sabia.core.shards.stores.objects import is_there, is_url, put

MANIFEST, TOKENIZER = "_manifest.json", "_tokenizer"
FORMER_MANIFEST, FORMER_TOKENIZER, FORMER_REJECTS = "manifest.json", "tokenizer", "rejects"
REJECTS = ".rejects"  # appended to the name of the output
SHARDS_FILE = ".huggingface.yaml"  # https://huggingface.co/docs/hub/datasets-manual-configuration
_SHARDS = "configs:\n- config_name: default\n  data_files: part-*.parquet\n"


def rejects_beside(out: str) -> str:
    """The folder for rejects of an output directory: OUT.rejects, next to it."""
    plain = out.rstrip("/")
    if "://" not in out and os.path.basename(plain) in ("", ".", ".."):
        plain = os.path.realpath(out)
    return f"{plain}{REJECTS}"


def check_outside(job: Job, path: str | None, flag: str) -> None:
    """Raise UsageError if a path is inside the output directory, among its shards."""
    if not path or not job.to_directory or is_url(path) != is_url(str(job.out)):
        return
    inner, outer = (name if is_url(name) else os.path.realpath(name)
                    for name in (path, str(job.out)))  # fmt: skip
    if f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/"):
        raise UsageError(
            f"{flag}: {path} is in the directory of -o {job.out}, which may contain only shards"
            " (expected a path outside it)"
        )


def adopt(job: Job) -> None:
    """Move the manifest and the rejects that an earlier version put into the output directory.

    Several tasks of an array may do this at the same time; files already moved are skipped.
    """
    adopt_rejects(job)
    _move(job, _move_manifest)


def adopt_rejects(job: Job) -> None:
    """Move only the rejects, for directories that contain other files too."""
    _move(job, _move_rejects)


def adopt_tokenizer(job: Job) -> None:
    """Move the tokenizer of token rows."""
    _move(job, _move_tokenizer)


def _move(job: Job, what: Callable[[Path], None]) -> None:
    out = Path(str(job.out))
    if job.to_directory and not job.dry_run and "://" not in str(job.out) and out.is_dir():
        with contextlib.suppress(FileNotFoundError):
            what(out)


def name_shards(job: Job) -> None:
    """Name the shards for datasets if there is a tokenizer beside them."""
    out = str(job.out).rstrip("/")
    if not job.to_directory or job.dry_run or not is_there(f"{out}/{TOKENIZER}/tokenizer.json"):
        return
    if not is_url(out):
        write_atomic(Path(out, SHARDS_FILE), _SHARDS)
    elif not is_there(f"{out}/{SHARDS_FILE}"):
        put(f"{out}/{SHARDS_FILE}", _SHARDS.encode())


def _move_manifest(out: Path) -> None:
    before, after = out / FORMER_MANIFEST, out / MANIFEST
    try:
        content = json.loads(before.read_text("utf-8"))
    except ValueError:
        return
    if isinstance(content, dict) and {"command", "shards"} <= content.keys():
        if after.exists():
            before.unlink()
        else:
            os.rename(before, after)


def _move_tokenizer(out: Path) -> None:
    before, after = out / FORMER_TOKENIZER, out / TOKENIZER
    definition = before / "tokenizer.json"
    if not definition.is_file():
        return
    if not after.exists():
        os.rename(before, after)
        notes.note(f"moved {before} to {after}")
    elif definition.read_bytes() == (after / "tokenizer.json").read_bytes():
        shutil.rmtree(before)
    else:
        notes.warn(f"{before} is among the shards, so readers of the directory fail; move it")


def _move_rejects(out: Path) -> None:
    before = out / FORMER_REJECTS
    if not before.is_dir():
        return
    after = Path(rejects_beside(str(out)))
    for path in sorted(before.glob("part-*.parquet")):
        if not _holds_rejects(path):
            continue
        after.mkdir(exist_ok=True)
        if (after / path.name).exists():
            path.unlink()
        else:
            os.rename(path, after / path.name)
    with contextlib.suppress(OSError):
        before.rmdir()


def _holds_rejects(path: Path) -> bool:
    try:
        with parquet_at(path) as file:
            return file.schema_arrow.names == ["reason", "shard", "record"]
    except BadData:
        return False
