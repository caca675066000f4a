"""Provenance: fingerprints of outputs, and the manifest of an output directory.

A shard is the unit of resuming. Its metadata holds the fingerprint of its input, the resolved
options and the version of the stage's results (`core.results`); a run skips every shard whose
metadata equals what it would write.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from sabia.core import notes
from sabia.core.digests import open_parquet
from sabia.core.errors import BadData, UsageError
from sabia.core.results import code_identity, result_version
from sabia.core.shards import columns, layout
from sabia.core.shards.atomic import read_json, sweep, write_json
from sabia.core.shards.executors.processes import map_threads
from sabia.core.shards.inputs import open_binary
from sabia.core.shards.job import FORMATS, Job, file_ending
from sabia.core.shards.lineage import run_record
from sabia.core.shards.lineage.run_record import RUN, RunRecord
from sabia.core.shards.outputs import (
    is_intact,
    open_output,
    output_path,
    provenance_in,
    read_metadata,
    readable,
    rows_in,
)  # fmt: skip
from sabia.core.shards.sources import Source
from sabia.core.shards.stores import listed
from sabia.core.shards.stores.objects import exists, is_url, objects_below, remove

_NUMBERED = re.compile(r"part-\d+\.\w+\Z")  # others are named by `append_names`
_DOCUMENTS = ("document", "removed")
READERS = 16  # shards at a URL that are read at the same time
# shards listed before, by name, size, time of change in ns and inode
Known = dict[tuple[str, int, int, int], dict[str, Any]]
_version = functools.cache(version)


def provenance(
    job: Job,
    kind: str,
    inputs: Sequence[str],
    salt: str = "",
    schema: pa.Schema | None = None,
    origins: Sequence[str] = (),
    names: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The provenance of an output: command, version, options, seed, input fingerprints, kind.

    schema: for documents, the columns of all inputs, which all shards of the output have. origins:
    see Source.origin; they do not decide whether an output is complete, nor does what is told about
    the run (see run_record). names: of the inputs (`run_record.inputs_of`); None: those of the job.
    """
    record = _call(job) | {"kind": kind, "inputs": list(inputs), "salt": salt}
    if kind in _DOCUMENTS:
        record["columns"] = columns.digest(schema)
    record["fingerprint"] = _fingerprint(job, record)
    if origins:
        record["origins"] = list(origins)
    named = run_record.inputs_of_job(job) if names is None else names
    if len(named) == len(inputs):
        named = [{**one, "hash": each} for one, each in zip(named, inputs, strict=True)]
    return record | {RUN: RunRecord(record, run_record.call_of_job(job), named, job.jobs)}


def _fingerprint(job: Job, record: dict[str, Any]) -> str:
    decisive = record | {"options": _decisive(job.options), "version": code_identity(job.command)}
    decisive.pop("result", None)
    text = json.dumps(decisive, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def rows_finished(job: Job, kind: str, sources: Sequence[Source], salt: str = "") -> int | None:
    """Rows of a directory at a URL whose manifest lists one shard for each source, made from it in
    this way, so that no shard need be read for its columns; else None."""
    out = str(job.out).rstrip("/")
    other = job.force or job.append or job.shard or job.dry_run
    if other or not (job.to_directory and is_url(out)):
        return None
    known = listed.entries(out, layout.MANIFEST)
    names = [f"{job.part_name(part)}.parquet" for part in range(len(sources))]
    if sorted(known) != names or not names:
        return None
    columns = {str(known[name]["made"].get("columns")) for name in names}
    for name, source in zip(names, sources, strict=True):
        made = known[name]["made"]
        wanted = _call(job) | {"kind": kind, "inputs": [source.fingerprint()], "salt": salt}
        if kind in _DOCUMENTS:
            wanted["columns"] = made.get("columns")
        if made.get("fingerprint") != _fingerprint(job, wanted) or not known[name]["rows"]:
            return None
    return sum(known[name]["rows"] for name in names) if len(columns) == 1 else None


def _call(job: Job) -> dict[str, object]:
    record: dict[str, Any] = {"command": job.command, "version": _version("sabia")}
    if (number := result_version(job.command)) != 1:
        record["result"] = number
    return record | {"options": job.options, "seed": job.seed}


def _decisive(options: dict[str, Any]) -> dict[str, object]:
    """The options, with the tokenizer's path as in earlier versions, whose rows stay valid."""
    path = options.get("tokenizer")
    if not isinstance(path, str) or os.path.basename(path) != layout.TOKENIZER:
        return options
    return options | {"tokenizer": os.path.join(os.path.dirname(path), layout.FORMER_TOKENIZER)}


def rows_made(path: str, wanted: dict[str, Any]) -> int | None:
    """Rows of a file that has the provenance `wanted` and no damaged bit (see `holds`); else None,
    with a warning if it is damaged."""
    provenance = read_metadata(path)
    if provenance is not None and provenance.get("fingerprint") != wanted["fingerprint"]:
        return None
    if os.path.isfile(path) and not is_intact(path):
        notes.warn(f"{path}: damaged bits; it is written again")
        return None
    return None if provenance is None else rows_in(path)


def holds(path: str, wanted: dict[str, Any]) -> bool:
    """True when the file was made from the same input in the same way and no bit of it is damaged.

    All bytes are read, at the cost of fingerprints of inputs, and remembered as these are.
    """
    provenance = read_metadata(path)
    made = provenance is not None and provenance.get("fingerprint") == wanted["fingerprint"]
    return made and is_intact(path)


def parts_there(job: Job, ending: str = ".parquet") -> list[str]:
    """The paths of the parts in the output directory, or of the output file if it exists."""
    out = str(job.out)
    if is_url(out):
        if job.to_file:
            return [out] if exists(out) else []
        names = filter(re.compile(rf"part-[^/]*{re.escape(ending)}").fullmatch, objects_below(out))
        return [f"{out.rstrip('/')}/{name}" for name in names]
    if job.to_file or os.path.isfile(out):
        return [out] if os.path.exists(out) and os.path.getsize(out) else []
    return sorted(str(path) for path in Path(out).glob(f"part-*{ending}"))


class Existing(NamedTuple):
    """What is in the output before a run: all parts, and those that its own parts replace."""

    parts: frozenset[str] = frozenset()
    replaced: tuple[str, ...] = ()


def check_output(
    job: Job, sources: Sequence[Any], owned: Sequence[int] | None = None, ending: str = ".parquet",
    flag: str = "--out",
) -> Existing:  # fmt: skip
    """Raise UsageError if the output holds rows that would be lost: of other inputs (neither of the
    same path nor of the same content), or of another command.

    owned: the numbers of the parts that this process writes, where each source gives one; the parts
    of other tasks are checked by those. ending: that of the files which show that a part exists.
    """
    if flag == "--out" and job.rejects:
        check_beside(job, sources, job.rejects, "--rejects")
    if job.to_stdout:
        _check_stdout(job)
        return Existing()
    if is_url(str(job.out)):
        listed.refresh(str(job.out))
    there = parts_there(job, ending)
    if job.append:
        return Existing(frozenset(there))
    per_shard = job.to_directory and owned is not None
    named = [output_path(job, i).removesuffix(".parquet") + ending for i in range(len(sources))]
    others = {named[i] for i in range(len(sources)) if owned is not None and i not in owned}
    ours, replaced = _Ours(job, sources), []
    for path in there:
        if path in others:
            continue
        made = _made(path)
        if not (ours.includes(made, path) if not job.force else _command(made) == job.command):
            if not job.force and (made is not None or not job.to_directory):
                raise _would_be_lost(job, path, made, flag)
        elif per_shard and path not in named:
            replaced.append(path)
    return Existing(frozenset(there), tuple(replaced))


def _check_stdout(job: Job) -> None:
    """Raise UsageError for binary rows after the bytes of another call in the file on stdout, as
    of `xargs -n2 … > out.parquet` and `>> out.parquet`: other tools would not read both."""
    if job.out not in (None, "-") or job.to == "jsonl":
        return
    try:
        file = sys.stdout.fileno()
    except (OSError, ValueError):  # stdout is closed, or an object of the caller's
        return
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return
    appends = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_APPEND
    before = status.st_size if appends else os.lseek(file, 0, os.SEEK_CUR)
    if before:
        raise UsageError(
            f"stdout: the file has {before:,} bytes already, and rows cannot be added to them; "
            "give -o DIR --append to each call, or --to jsonl"
        )


def named_output(job: Job) -> str:
    """The name of the output, which rows beside it record; '' for a stream."""
    return "" if job.to_stdout else os.path.basename(str(job.out).rstrip("/"))


def check_beside(job: Job, sources: Sequence[Any], path: str, flag: str) -> None:
    """Raise UsageError if `path` holds removed rows or rejects of other inputs, or of another
    output that was made with other options.

    The parts of calls with `--append` have names of their own, so a directory may have others."""
    parts = job.to_directory if flag == "--rejects" else not file_ending(path)
    beside = replace(job, out=f"{path.rstrip('/')}/" if parts else path, rejects=None)
    beside = replace(beside, append=job.append if parts else None)
    check_output(beside, sources, flag=flag)
    if job.force or beside.append:
        return
    for one in parts_there(beside):
        made, out = _made(one) or {}, named_output(job)
        if made.get("out", out) != out and made.get("options") != _call(job)["options"]:
            ways = "another path, or --force to replace them"
            raise UsageError(f"{flag}: {path} holds rows of another output; give {ways}")


@dataclass
class _Ours:
    """Tells which parts were made from the inputs of this call."""

    job: Job
    sources: Sequence[Any]

    @cached_property
    def origins(self) -> set[str]:
        return {source.origin for source in self.sources} - {""}

    @cached_property
    def fingerprints(self) -> set[str]:
        return {source.fingerprint() for source in self.sources}

    def includes(self, made: dict[str, Any] | None, path: str) -> bool:
        """Whether all inputs of a part are among those of the call. Parts of `--append` stay as
        they are when their input changes, so only its content counts for them."""
        if not made or made.get("command") != self.job.command:
            return False
        inputs, origins = made.get("inputs", []), made.get("origins", [])
        appended = self.job.to_directory and not _NUMBERED.search(path)
        origins = ["" for _ in inputs] if appended or not origins else origins
        return all(
            origin in self.origins or one in self.fingerprints
            for one, origin in zip(inputs, origins, strict=True)
        )


def _made(path: str) -> dict[str, Any] | None:
    """The provenance of a part; {} if it records none, None if it cannot be opened."""
    if path.endswith(".json"):
        try:
            return read_json(path)
        except (OSError, ValueError):
            return None
    return read_metadata(path) or ({} if readable(path) else None)


def _command(made: dict[str, Any] | None) -> str | None:
    return (made or {}).get("command")


def _would_be_lost(job: Job, path: str, made: dict[str, Any] | None, flag: str) -> UsageError:
    """The error for an output that holds rows of other inputs, with the ways out."""
    by = _command(made)
    what = "of other inputs" if by == job.command else f"of sabia {by}" if by else "not of sabia"
    if job.to_file:
        if made is None and FORMATS[file_ending(path)] == "jsonl":
            what = "without a record of its inputs, or changed since"
        ways = "another path, or --force to replace it"
        return UsageError(f"{flag}: {path} holds rows {what}; give {ways}")
    keep = "" if job.append is None else ", --append to add parts to it"
    return UsageError(
        f"{flag}: {job.out} holds rows {what} ({os.path.basename(path)}); give another "
        f"directory{keep}, or --force to replace them"
    )


def columns_there(job: Job) -> pa.Schema | None:
    """The columns of the parts that are in the directory, None if there is none."""
    paths = [path for path in parts_there(job) if _command(read_metadata(path)) == job.command]
    if not paths:
        return None
    with open_binary(paths[0]) as file:
        return open_parquet(file, paths[0]).schema_arrow.remove_metadata()


def append_names(job: Job, sources: Sequence[Any], owned: Sequence[int]) -> tuple[str, ...]:
    """The names of the parts of a call with `--append`: a hash of each input's path and content, or
    the part that was made from the same input before. Parts that are not owned have no name."""
    made_of: dict[tuple[str, str], str] = {}
    for path in parts_there(job):
        if _NUMBERED.search(path) and _command(made := read_metadata(path)) == job.command:
            inputs, origins = (made or {}).get("inputs", []), (made or {}).get("origins", [])
            if len(inputs) == len(origins) == 1:
                made_of.setdefault((origins[0], inputs[0]), Path(path).stem)
    names, copies = [], Counter[tuple[str, str]]()
    for index, source in enumerate(sources):
        if index not in owned and not any(source.origin == sources[i].origin for i in owned):
            names.append("")
            continue
        key = (source.origin, source.fingerprint())
        text = f"{key} {copies[key]}" if copies[key] else str(key)
        copies[key] += 1
        new = f"part-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        names.append(made_of.pop(key, new) if copies[key] == 1 else new)
    return tuple(names)


def is_current(job: Job, sources: Sequence[Source], salt: str = "", kind: str = "document") -> bool:
    """Whether all outputs exist and match inputs and options (stages that read all shards)."""
    if job.force or job.to_stdout:
        return False
    prints = [source.fingerprint() for source in sources]
    schema = schema_of_all(sources)
    if job.to_file:
        return holds(output_path(job), provenance(job, kind, prints, salt, schema))
    wanted = [provenance(job, kind, [one], salt, schema) for one in prints]
    return all(holds(output_path(job, part), made) for part, made in enumerate(wanted))


def schema_of_all(sources: Sequence[Any]) -> pa.Schema | None:
    """The columns of all sources if they are `unified`, else None."""
    return getattr(sources[0], "schema", None) if sources else None


def write_parts(
    job: Job, schema: pa.Schema, made: dict[str, Any], batches: Iterator[pa.RecordBatch],
    parts: int, part_rows: int,
) -> None:  # fmt: skip
    """Write batches to the job's output in parts of `part_rows` rows; in one part if the output is
    not a directory."""
    for part in range(max(parts, 1)):
        with open_output(job, schema, made, part) as writer:
            written = 0
            while not job.to_directory or written < part_rows:
                batch = next(batches, None)
                if batch is None:
                    break
                writer.write(batch)
                written += batch.num_rows
    finish_directory(job, max(parts, 1))


def finish_directory(job: Job, parts: int) -> None:
    """Remove parts of an earlier run of this command beyond the last one; write the manifest."""
    for path in parts_there(job):
        number = Path(path).stem.removeprefix("part-")
        if number.isdigit() and int(number) >= parts:
            made = read_metadata(path)
            if made and made.get("command") == job.command:
                remove_part(path)
    write_manifest(job)


def remove_part(path: str) -> None:
    """Remove a part whose rows are in other parts now."""
    with contextlib.suppress(FileNotFoundError):  # another task of the array has done it
        (remove if is_url(path) else os.unlink)(path)
        notes.note(f"removed {os.path.basename(path)}, left by an earlier run with more inputs")


def write_manifest(job: Job) -> None:
    """List all parts of a directory. Of several processes that do this at the same time, the last
    one lists all parts, because each writes again if a part appeared meanwhile."""
    written: list[Any] | None = None
    known: Known = {}
    if job.to_directory and is_url(str(job.out)):
        _write_listed(job)
        return
    while job.to_directory and written != (shards := _shards(job, known)):
        written = shards
        write_json(Path(str(job.out)) / layout.MANIFEST, _call(job) | run_record.summed(shards))
    if written is not None:
        sweep(Path(str(job.out)))
        keep_call(job, [one[RUN] for one in written if RUN in one])


def keep_call(job: Job, records: Sequence[dict[str, Any]]) -> None:
    """Keep the job's call beside its output directory; records: of the parts, which know what came
    through a pipe."""
    if run_record.enabled() and job.to_directory and not is_url(str(job.out)):
        about = run_record.run_metadata(job, _call(job))[RUN].stable()
        about["inputs"] = about["inputs"] or next((one["inputs"] for one in records), [])
        run_record.keep_beside(str(job.out).rstrip("/"), about)


def _shards(job: Job, known: Known) -> list[dict[str, Any]]:
    """The parts in the directory, for the manifest; those of `known` that are unchanged are not
    read again."""
    shards = []
    for path in map(Path, parts_there(job)):
        try:
            state = path.stat()
            key = (path.name, state.st_size, state.st_mtime_ns, state.st_ino)
            if key not in known:
                known[key] = _shard(path, state.st_size)
        except (BadData, OSError):
            continue  # another task of the array has just replaced it and will list it
        shards.append(known[key])
    return shards


def _shard(path: Path, size: int) -> dict[str, object]:
    rows, made = rows_in(str(path)), read_metadata(str(path)) or {}
    shard = {"name": path.name, "rows": rows, "size_bytes": size}
    shard["fingerprint"] = made.get("fingerprint")
    if run_record.enabled():
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if record := run_record.of_parquet(file):
                shard[RUN] = record
    return shard


def _write_listed(job: Job) -> None:
    """The manifest of a directory at a URL; see `stores.listed`."""
    out, written = str(job.out).rstrip("/"), dict[str, str]()
    known: dict[tuple[str, str], dict[str, Any]] = {}
    while written != (there := {n: v for n, v in listed.versions(out).items()
                                if n.startswith("part-") and n.endswith(".parquet")}):  # fmt: skip
        written = there
        for name, one in listed.entries(out, layout.MANIFEST).items():
            known.setdefault((name, one["version"]), one)
        new = [pair for pair in there.items() if pair not in known]
        read = map_threads(partial(_listed_shard, out), new, READERS)
        known |= dict(zip(new, read, strict=True))
        shards = [dict(known[pair]) for pair in there.items()]
        made, parts = listed.shared([shard.pop("made") for shard in shards])
        shards = [s | {listed.MADE: part} for s, part in zip(shards, parts, strict=True)]
        content = _call(job) | run_record.summed(shards) | {listed.MADE: made}
        listed.write_json(f"{out}/{layout.MANIFEST}", content)


def _listed_shard(out: str, pair: tuple[str, str]) -> dict[str, object]:
    """A shard at a URL for its manifest."""
    path = f"{out}/{pair[0]}"
    with open_binary(path) as file:
        size, record = file.seek(0, os.SEEK_END), run_record.of_parquet(file)
        parquet = open_parquet(file, path, False)
        rows, made = parquet.metadata.num_rows, {}
        with contextlib.suppress(KeyError, ValueError):
            made = provenance_in(parquet.schema_arrow)
    shard = {"name": pair[0], "rows": rows, "size_bytes": size, "version": pair[1], "made": made}
    shard["fingerprint"] = made.get("fingerprint")
    return shard | ({RUN: record} if run_record.enabled() and record else {})
