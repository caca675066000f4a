"""The outputs below some directories, from what they and the files beside them tell.

An output is a file, a directory of shards, a run directory or a model. Nothing but records is read:
`.NAME.sabia.json`, `_manifest.json`, `run.json`, `quantization.json`, the records of token files
and classifiers, and the metadata of files that have none of these. An output that was deleted is
known by the file beside it. In a tree that was moved, names are changed to where it is now.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.results import recorded_result
from sabia.core.shards.atomic import read_json
from sabia.core.shards.lineage.run_record import KEY, RUN, of_parquet
from sabia.core.shards.outputs import read_metadata

Record = dict[str, Any]
BESIDE = re.compile(r"\.(.+)\.sabia\.json\Z")
PART = re.compile(r"part-\w+\.(parquet|json)\Z")
NOT_ENTERED = (".crawl", ".rejects")  # endings of folders with the state of a stage
OF_RUNS = ("run.json", "quantization.json")
ENDINGS = (".parquet", ".arrow")


@dataclass
class Shard:
    """A file of an output directory. size: its bytes, as the manifest tells; record: of its call;
    inputs: what it was made from."""

    path: str
    record: Record
    inputs: Sequence[Mapping[str, Any]] = ()
    size: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)  # of rows


@dataclass
class Output:
    """An output and the call that made it. shards: of a directory of rows; unfinished: a run."""

    path: str
    record: Record
    shards: list[Shard] = field(default_factory=list)
    unfinished: bool = False
    totals: Mapping[str, Any] = field(default_factory=dict)  # of the manifest

    @property
    def command(self) -> str:
        """The name of the command."""
        return str(self.record.get("command", "?"))

    def records(self) -> list[Record]:
        """The records of all calls that made a part of it, and of the stages piped into them."""
        own = {id(one.record): one.record for one in self.shards} or {0: self.record}
        piped = [made for one in own.values() for made in upstream(one)]
        inputs = [one for shard in self.shards for one in shard.inputs]
        return [*own.values(), *piped, *upstream({"inputs": inputs})]

    def rows_from(self) -> Iterator[Mapping[str, Any]]:
        """All files whose rows it was made from, through pipes too: `name`, `content`, or
        `origin`."""
        for shard in self.shards:
            yield from shard.inputs
        for record in [self.record, *self.records()]:
            yield from [] if self.shards and record is self.record else record.get("inputs", ())

    def inputs(self) -> Iterator[Mapping[str, Any]]:
        """Those, and the files that its options name, such as models."""
        yield from self.rows_from()
        for record in [self.record, *self.records()]:
            yield from record.get("reads", ())


def upstream(record: Mapping[str, Any]) -> Iterator[Record]:
    """The records of the stages whose rows came through pipes, each before those before it."""
    for one in record.get("inputs", ()):
        if "made" in one:
            yield one["made"]
            yield from upstream(one["made"])


def outputs_below(folders: Sequence[str]) -> dict[str, Output]:
    """Path → output, of all outputs below the folders. Raises UsageError for a folder that does not
    exist."""
    outputs: dict[str, Output] = {}
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder}: no such directory (expected one with outputs)")
        _walk(os.path.abspath(folder), outputs)
    return dict(sorted(outputs.items()))


def _walk(folder: str, outputs: dict[str, Output]) -> None:
    entries = {entry.name: entry for entry in os.scandir(folder)}
    for name in entries:
        if match := BESIDE.fullmatch(name):
            path = os.path.join(folder, match[1])
            if record := _beside(os.path.join(folder, name), path):
                outputs[path] = Output(path, record)
    _add_directory(folder, entries, outputs)
    is_run = any(name in entries for name in OF_RUNS)
    for name, entry in entries.items():
        if entry.is_dir(follow_symlinks=False):
            if name[:1] not in "._" and not name.endswith(NOT_ENTERED) and not is_run:
                _walk(entry.path, outputs)
        elif name.endswith(ENDINGS) and not PART.fullmatch(name) and entry.path not in outputs:
            if record := _in_file(entry.path):
                outputs[entry.path] = Output(entry.path, _moved(record, entry.path))
        elif name.endswith(".json") and name[:-5] in entries and entry.path[:-5] not in outputs:
            report = _json(entry.path)
            if record := report.get(RUN) or report.get("made"):
                outputs[entry.path[:-5]] = Output(entry.path[:-5], _moved(record, entry.path[:-5]))


def _add_directory(folder: str, entries: Mapping[str, Any], outputs: dict[str, Output]) -> None:
    """The output that a folder itself is, if it is one."""
    known = outputs.get(folder)
    if "_manifest.json" in entries:
        manifest = _json(f"{folder}/_manifest.json")
        calls = [_moved(call, folder) for call in manifest.get("calls", ())]
        record = known.record if known else manifest.get(RUN) or (calls or [manifest])[-1]
        output = Output(folder, _moved(record, folder))
        listed = manifest.get("shards", ())
        at = entries["_manifest.json"].stat().st_mtime_ns
        output.totals = manifest.get("totals") or {}
        output.shards = [_shard(folder, one, calls, entries, at) for one in listed]
        names = {one["name"] for one in listed}
        for name in sorted(entries):
            if PART.fullmatch(name) and name not in names and "command" in manifest:
                output.shards.append(_read_shard(f"{folder}/{name}"))
        outputs[folder] = output
    elif parts := [name for name in sorted(entries) if re.fullmatch(r"part-\d+\.json", name)]:
        shards = [shard for name in parts for shard in _token_part(f"{folder}/{name}")]
        outputs[folder] = Output(folder, known.record if known else shards[0].record, shards)
    elif parts := [name for name in sorted(entries) if PART.fullmatch(name)]:
        shards = [_read_shard(f"{folder}/{name}") for name in parts]  # a run that was killed
        if shards[0].record.get("command"):
            outputs[folder] = Output(folder, known.record if known else shards[0].record, shards)
    for name in OF_RUNS:
        if name in entries:
            stored = _json(f"{folder}/{name}")
            identity = stored.get("identity") or {"command": "quantize"}
            record = stored.get(RUN) or (known.record if known else identity)
            result = recorded_result(stored if "result" in stored else record)
            record = _moved(record, folder) | {"result": result}
            unfinished = stored.get("finished", True) is not True
            outputs[folder] = Output(folder, record, unfinished=unfinished)


def _shard(
    folder: str, one: Record, calls: Sequence[Record], entries: Mapping[str, Any], at: int
) -> Shard:
    """A shard by its entry in the manifest, or by itself if it is newer than that."""
    path, entry = f"{folder}/{one['name']}", entries.get(one["name"])
    if entry is not None and ("call" not in one or entry.stat().st_mtime_ns > at):
        return _read_shard(path)
    if "call" not in one:  # it is missing
        return Shard(path, {}, (), one.get("size_bytes"))
    call = calls[one["call"]]
    inputs = one.get("inputs", ())
    if call.get("moved"):
        inputs = _replaced(inputs, *call["moved"])
    return Shard(path, call, inputs, one.get("size_bytes"), one.get("counts") or {})


def _read_shard(path: str) -> Shard:
    record = _moved(_in_file(path), os.path.dirname(path))
    return Shard(path, record, record.get("inputs", ()), None, record.get("rows") or {})


def _token_part(path: str) -> list[Shard]:
    """The files of a part that are not Parquet, of which the JSON file at `path` tells."""
    stored, folder = _json(path), os.path.dirname(path)
    record = _moved(stored.get(RUN) or stored, folder)
    names = stored.get("files") or [os.path.basename(path)]
    counts = [record.get("rows") or {}, *({} for _ in names)]  # of the part, with its first file
    return [Shard(f"{folder}/{name}", record, record.get("inputs", ()), None, rows)
            for name, rows in zip(names, counts, strict=False)]  # fmt: skip


def _json(path: str) -> Record:
    """A JSON object; {} if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(path)
    return {}


def _beside(path: str, output: str) -> Record | None:
    stored = _json(path)
    record = stored.get(RUN) or stored.get("made")
    return _moved(record, output) if isinstance(record, dict) else None


def _in_file(path: str) -> Record:
    """What a Parquet or Arrow file tells of its run, or of its provenance; {} if nothing."""
    with contextlib.suppress(OSError, ValueError, BadData, pa.ArrowException):
        if path.endswith(".arrow"):
            with open(path, "rb") as file:
                head = file.read(6)
                file.seek(0)
                opened = pa.ipc.open_file if head == b"ARROW1" else pa.ipc.open_stream
                metadata = opened(file).schema.metadata or {}
            if KEY in metadata:
                return dict(json.loads(metadata[KEY])) | {"stdout": True}
        else:
            with open(path, "rb") as file:
                if record := of_parquet(file):
                    return record
        made = read_metadata(path)
        if made and "command" in made:
            return _of_provenance(made)
    return {}


def _of_provenance(made: Mapping[str, Any]) -> Record:
    """The record of an output of a release that told no more than hashes."""
    origins = made.get("origins") or [""] * len(made.get("inputs", ()))
    inputs = [{"hash": one, "origin": origin}
              for one, origin in zip(made.get("inputs", ()), origins, strict=True)]  # fmt: skip
    return dict(made) | {"inputs": inputs}


def _moved(record: Record, path: str) -> Record:
    """A record with its names as they are now, when its output is at `path`."""
    if record.get("inputs") and isinstance(record["inputs"][0], str):
        record = _of_provenance(record)
    named = [record.get("path"), record.get("out"), *record.get("writes", ())]
    same = (one for one in named if one and os.path.basename(one) == os.path.basename(path))
    before, after = next(same, path).split("/"), path.split("/")
    if before == after:
        return record
    while before and after and before[-1] == after[-1]:
        before.pop()
        after.pop()
    roots = "/".join(before), "/".join(after)
    return _replaced(record, *roots) | {"moved": roots}


def _replaced(value: object, before: str, after: str) -> Any:
    """A JSON value whose paths below one folder are below another."""
    if isinstance(value, str):
        inside = value == before or value.startswith(f"{before}/")
        return after + value[len(before) :] if before and inside else value
    if isinstance(value, Mapping):
        return {name: _replaced(one, before, after) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(one, before, after) for one in value]
    return value
