"""Token files of other trainers: Megatron `.bin`/`.idx`, and Arrow directories of `datasets`.

Both go into a directory, a part for each input shard: `part-00000.bin` and `.idx` hold documents,
`data-00000.arrow` the packed rows, with `state.json` and `dataset_info.json` so that
`datasets.load_from_disk` opens the directory. A part's record, `part-00000.json`, is written last
and says what it was made from; a run again makes only what is missing or made from something else.
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
from sabia.core.text.tokenize.encoders import Encoder
from sabia.core.text.tokenize.megatron import SMALL_VOCABULARY, MegatronWriter
from sabia.core.text.tokenize.stage import encode_documents, show_ids, usable
from sabia.core.text.tokenize.token_counts import Tally

Batches = Iterator["pa.RecordBatch"]


@dataclass(frozen=True)
class Plan:
    """What every part is made with; picklable."""

    job: Job
    form: str  # arrow or megatron
    pack: partial[Batches]  # `pack_shard` with its encoder: documents → packed rows
    salt: str

    @property
    def encoder(self) -> Encoder:
        """The encoder that packs."""
        return self.pack.keywords["encoder"]

    def provenance(self, source: Source) -> dict[str, Any]:
        """What part of one source is made from."""
        return manifest.provenance(self.job, self.form, [source.fingerprint()], self.salt)

    def record(self, part: int) -> Path:
        """The record of a part."""
        return Path(str(self.job.out)) / f"part-{part:05d}.json"


def write(plan: Plan, sources: Sequence[Source]) -> Summary:
    """Writes the parts that this process owns; returns the figures.

    Raises UsageError where the output is not a local directory.
    """
    job = plan.job
    if not job.to_directory or "://" in str(job.out):
        raise UsageError(f"--format {plan.form} writes a local directory; give -o DIR")
    ours = our_shards(job, len(sources))
    if job.dry_run:
        _dry_run(plan, sources, ours)
        return Summary()
    started, total = time.monotonic(), Summary()
    adopt(job)
    for done in run_tasks(_one_part, [(plan, sources[i], i) for i in ours], job.jobs):
        total.add(done)
    if plan.form == "arrow":
        _write_state(job, len(sources))
    total.seconds = time.monotonic() - started
    total.report(job)
    return total


def _dry_run(plan: Plan, sources: Sequence[Source], ours: Sequence[int]) -> None:
    """Show what would be done."""
    shown = planned(plan.job, [sources[part] for part in ours], writes=[])
    todo = []
    for part in ours:
        record, source = plan.record(part), sources[part]
        done = not plan.job.force and _known(record, plan.provenance(source)) is not None
        action = "keep" if done else "write"
        shown.writes.append({"path": str(record), "action": action, "from": source.name})
        todo += [] if done else [source]
    encoder = plan.pack.keywords["encoder"]
    narrow = encoder and encoder.tokenizer.vocab_size < SMALL_VOCABULARY
    show_ids(shown, plan.job, todo, plan.pack, 2 if narrow and plan.form == "megatron" else 4)


def _one_part(plan: Plan, source: Source, part: int) -> Summary:
    made, record = plan.provenance(source), plan.record(part)
    if not plan.job.force and (known := _known(record, made)) is not None:
        return Summary(shards_skipped=1, rows_out=known)
    summary = Summary(shards_done=1)
    with Rejects(reject_path(plan.job, part)) as rejects:
        context = ShardContext(part, source.name, rejects, summary.counters)
        batches = counted(source, context, summary, ProgressBar())
        write_part = {"arrow": _arrow, "megatron": _megatron}[plan.form]
        summary.rows_out = write_part(plan, batches, context, part)
    if rejects.count:
        summary.rejected, summary.reject_path = rejects.count, rejects.path
    write_atomic(record, json.dumps(made | {"rows": summary.rows_out}, indent=1))
    return summary


def _known(record: Path, made: Mapping[str, Any]) -> int | None:
    """Rows of a part that is there and made from the same; else None."""
    if not record.is_file():
        return None
    try:
        said = json.loads(record.read_text("utf-8"))
    except ValueError:
        return None
    return said.get("rows") if said.get("fingerprint") == made["fingerprint"] else None


def _arrow(plan: Plan, batches: Batches, context: ShardContext, part: int) -> int:
    """An Arrow stream of packed rows; returns how many."""
    rows = 0
    with (
        atomic_path(_data_file(plan.job, part)) as path,
        open(path, "wb") as file,
        pa.ipc.new_stream(file, schemas.KINDS["tokens"]) as stream,
    ):
        for batch in plan.pack(batches, context):
            stream.write(batch)
            rows += batch.num_rows
    return rows


def _megatron(plan: Plan, batches: Batches, context: ShardContext, part: int) -> int:
    """A `.bin` and its `.idx`, which appears last; returns the documents in them."""
    tally = Tally()
    stem = Path(str(plan.job.out)) / f"part-{part:05d}"
    with ExitStack() as stack:
        index = stack.enter_context(atomic_path(f"{stem}.idx"))
        data = stack.enter_context(atomic_path(f"{stem}.bin"))
        file = stack.enter_context(open(data, "wb"))
        writer = MegatronWriter(file, plan.encoder.tokenizer.vocab_size)
        for batch in batches:
            writer.add(*encode_documents(plan.encoder, usable(batch, context), tally))
        writer.write_index(index)
    for name, n in tally.counters().items():
        context.count(name, n)
    return writer.documents


def _data_file(job: Job, part: int) -> Path:
    return Path(str(job.out)) / f"data-{part:05d}.arrow"


def _write_state(job: Job, parts: int) -> None:
    """What `datasets.load_from_disk` reads beside the data; in slices the last one's is whole."""
    folder = Path(str(job.out))
    there = [path.name for part in range(parts) if (path := _data_file(job, part)).is_file()]
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in there],
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
    if len(there) < parts:
        notes.note(f"{len(there)} of {parts} parts so far")


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": str(kind), "_type": "Value"}
