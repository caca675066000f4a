"""Token files of other trainers: Megatron `.bin`/`.idx`, and Arrow directories of `datasets`.

Both formats write a directory with one part per input shard: `part-00000.bin` and `.idx` hold
documents; `data-00000.arrow` holds packed rows, with `state.json` and `dataset_info.json` so that
`datasets.load_from_disk` opens the directory. The record of a part, `part-00000.json`, is written
last and holds the fingerprint of its inputs and options; the next run writes only the parts that
are missing or whose fingerprint differs.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.progress import ProgressBar
from sabia.core.shards import manifest, schemas
from sabia.core.shards.atomic import atomic_path, write_atomic
from sabia.core.shards.dry_run import planned
from sabia.core.shards.executor import run_tasks
from sabia.core.shards.job import Job
from sabia.core.shards.layout import adopt
from sabia.core.shards.mapping import ShardContext, counted, our_shards
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.sources import Source
from sabia.core.shards.summary import Summary
from sabia.core.text.tokenize.document_encoding import (
    encode_documents,
    prepare_documents,
    show_dry_run,
)
from sabia.core.text.tokenize.encoders import Encoder
from sabia.core.text.tokenize.megatron import SMALL_VOCABULARY, MegatronWriter
from sabia.core.text.tokenize.token_counts import Tally

Batches = Iterator["pa.RecordBatch"]


@dataclass(frozen=True)
class PartSettings:
    """What all parts have in common; picklable."""

    job: Job
    format: str  # arrow or megatron
    pack: partial[Batches]  # `pack_shard` with its encoder: documents → packed rows
    salt: str

    @property
    def encoder(self) -> Encoder:
        """The encoder that packs."""
        return self.pack.keywords["encoder"]

    def provenance(self, source: Source) -> dict[str, Any]:
        """The inputs and options that determine the part of one source."""
        return manifest.provenance(self.job, self.format, [source.fingerprint()], self.salt)

    def record(self, part: int) -> Path:
        """The path of a part's record."""
        return Path(str(self.job.out)) / f"part-{part:05d}.json"


def write(settings: PartSettings, sources: Sequence[Source]) -> Summary:
    """Write the parts of this process's slice; return the counts.

    Raises UsageError where the output is not a local directory.
    """
    job = settings.job
    if not job.to_directory or "://" in str(job.out):
        raise UsageError(f"--format {settings.format} writes a local directory; give -o DIR")
    ours = our_shards(job, len(sources))
    if job.dry_run:
        _dry_run(settings, sources, ours)
        return Summary()
    started, total = time.monotonic(), Summary()
    adopt(job)
    for done in run_tasks(_one_part, [(settings, sources[i], i) for i in ours], job.jobs):
        total.add(done)
    if settings.format == "arrow":
        _write_state(job, len(sources))
    total.seconds = time.monotonic() - started
    total.report(job)
    return total


def _dry_run(settings: PartSettings, sources: Sequence[Source], ours: Sequence[int]) -> None:
    shown = planned(settings.job, [sources[part] for part in ours], writes=[])
    todo = []
    for part in ours:
        record, source = settings.record(part), sources[part]
        done = (
            not settings.job.force
            and _rows_written(record, settings.provenance(source)) is not None
        )
        action = "keep" if done else "write"
        shown.writes.append({"path": str(record), "action": action, "from": source.name})
        todo += [] if done else [source]
    encoder = settings.pack.keywords["encoder"]
    small = encoder and encoder.tokenizer.vocab_size < SMALL_VOCABULARY
    bytes_per_id = 2 if small and settings.format == "megatron" else 4
    show_dry_run(shown, settings.job, todo, settings.pack, bytes_per_id)


def _one_part(settings: PartSettings, source: Source, part: int) -> Summary:
    provenance, record = settings.provenance(source), settings.record(part)
    if not settings.job.force and (rows := _rows_written(record, provenance)) is not None:
        return Summary(shards_skipped=1, rows_out=rows)
    summary = Summary(shards_done=1)
    with Rejects(reject_path(settings.job, part)) as rejects:
        context = ShardContext(part, source.name, rejects, summary.counters)
        batches = counted(source, context, summary, ProgressBar())
        write_part = {"arrow": _arrow, "megatron": _megatron}[settings.format]
        summary.rows_out = write_part(settings, batches, context, part)
    if rejects.count:
        summary.rejected, summary.reject_path = rejects.count, rejects.path
    write_atomic(record, json.dumps(provenance | {"rows": summary.rows_out}, indent=1))
    return summary


def _rows_written(record: Path, provenance: Mapping[str, Any]) -> int | None:
    """Rows of a finished part of the same provenance; None where there is no such part."""
    if not record.is_file():
        return None
    try:
        content = json.loads(record.read_text("utf-8"))
    except ValueError:
        return None
    same = content.get("fingerprint") == provenance["fingerprint"]
    return content.get("rows") if same else None


def _arrow(settings: PartSettings, batches: Batches, context: ShardContext, part: int) -> int:
    """Write an Arrow stream of packed rows; return how many."""
    rows = 0
    with (
        atomic_path(_data_file(settings.job, part)) as path,
        open(path, "wb") as file,
        pa.ipc.new_stream(file, schemas.KINDS["tokens"]) as stream,
    ):
        for batch in settings.pack(batches, context):
            stream.write(batch)
            rows += batch.num_rows
    return rows


def _megatron(settings: PartSettings, batches: Batches, context: ShardContext, part: int) -> int:
    """Write a `.bin`, then its `.idx`; return how many documents they hold."""
    tally = Tally()
    stem = Path(str(settings.job.out)) / f"part-{part:05d}"
    with ExitStack() as stack:
        index = stack.enter_context(atomic_path(f"{stem}.idx"))
        data = stack.enter_context(atomic_path(f"{stem}.bin"))
        file = stack.enter_context(open(data, "wb"))
        writer = MegatronWriter(file, settings.encoder.tokenizer.vocab_size)
        for batch in batches:
            documents = prepare_documents(batch, context)
            writer.add(*encode_documents(settings.encoder, documents, tally))
        writer.write_index(index)
    for name, n in tally.counters().items():
        context.count(name, n)
    return writer.documents


def _data_file(job: Job, part: int) -> Path:
    return Path(str(job.out)) / f"data-{part:05d}.arrow"


def _write_state(job: Job, parts: int) -> None:
    """Write what `datasets.load_from_disk` reads beside the data.

    Each slice writes it for the parts that exist; the last slice to finish lists all parts.
    """
    folder = Path(str(job.out))
    names = [path.name for part in range(parts) if (path := _data_file(job, part)).is_file()]
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "sabia",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    features = {field.name: _feature(field.type) for field in schemas.KINDS["tokens"]}
    write_atomic(folder / "state.json", json.dumps(state, indent=1))
    write_atomic(folder / "dataset_info.json", json.dumps({"features": features}, indent=1))
    if len(names) < parts:
        notes.note(f"{len(names)} of {parts} parts are written so far")


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": str(kind), "_type": "Value"}
