"""Provenance: fingerprints of outputs, and the manifest of an output directory.

A shard is the unit of resuming. Its metadata holds the fingerprint of its input, the resolved
options and the version; a run skips every shard whose metadata equals what it would write.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core import notes
from sabia.core.shards import columns, layout
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.inputs import is_url
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import open_output, output_path, read_metadata, rows_in
from sabia.core.shards.sources import Source

_DOCUMENTS = ("document", "removed")


def provenance(
    job: Job,
    kind: str,
    inputs: Sequence[str],
    salt: str = "",
    schema: pa.Schema | None = None,
) -> dict[str, Any]:
    """The provenance of an output: command, version, options, seed, input fingerprints, kind.

    schema: for documents, the columns of all inputs, which all shards of the output have.
    """
    record = _call(job) | {"kind": kind, "inputs": list(inputs), "salt": salt}
    if kind in _DOCUMENTS:
        record["columns"] = columns.digest(schema)
    text = json.dumps(record | {"options": _decisive(job.options)}, sort_keys=True, default=str)
    return record | {"fingerprint": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def _call(job: Job) -> dict[str, Any]:
    record = {"command": job.command, "version": version("sabia")}
    return record | {"options": job.options, "seed": job.seed}


def _decisive(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with the tokenizer's path as in earlier versions, whose rows stay valid."""
    path = options.get("tokenizer")
    if not isinstance(path, str) or os.path.basename(path) != layout.TOKENIZER:
        return options
    return options | {"tokenizer": os.path.join(os.path.dirname(path), layout.FORMER_TOKENIZER)}


def rows_made(path: str, wanted: dict[str, Any]) -> int | None:
    """Rows of a file that can be opened and has the provenance `wanted`; else None."""
    if not holds(path, wanted):
        return None
    return 0 if is_url(path) else rows_in(path)


def holds(path: str, wanted: dict[str, Any]) -> bool:
    """True when the file can be opened and was made from the same input in the same way."""
    provenance = read_metadata(path)
    return provenance is not None and provenance.get("fingerprint") == wanted["fingerprint"]


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
    """Remove parts of an earlier run of this command beyond the last one; write the manifest.

    Local directories only; in a Slurm array every task does this, and the last one's is complete.
    """
    if not job.to_directory or "://" in str(job.out):
        return
    directory = Path(str(job.out))
    for path in sorted(directory.glob("part-*.parquet")):
        number = path.stem.removeprefix("part-")
        if number.isdigit() and int(number) >= parts:
            made = read_metadata(str(path))
            if made and made.get("command") == job.command:
                path.unlink()
                notes.note(f"removed {path.name}, left by an earlier run with more inputs")
    shards = []
    for path in sorted(directory.glob("part-*.parquet")):
        try:
            rows = pq.read_metadata(path).num_rows
        except (OSError, pa.ArrowException):
            continue  # another task of the array has just replaced it and will list it
        made = read_metadata(str(path)) or {}
        shard = {"name": path.name, "rows": rows, "size_bytes": os.path.getsize(path)}
        shards.append(shard | {"fingerprint": made.get("fingerprint")})
    write_atomic(directory / layout.MANIFEST, json.dumps(_call(job) | {"shards": shards}, indent=1))
