"""Remove benchmark items from documents: drop the document, cut out the span, or only mark it.

A map stage: each shard needs only the index, so it runs in workers and in slices of a Slurm array.
The column `contamination` holds the findings of a row as JSON (null where there are none); their
spans are byte positions of the input text.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.job import Job, file_ending
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.sources import Source
from sabia.core.text.contamination.benchmark_index import Index
from sabia.core.text.contamination.matching import ITEM, Finder, Finding
from sabia.core.text.dedup.first_pass import choose_engine
from sabia.core.text.removed_rows import RemovedPart, map_and_gather, put_column

AUTO, DROP, MASK = "auto", "drop", "mask"  # values of --verdict
CUT = "\n"  # replaces a span
MARKS = " \t\r\n.,;:!?…)]}»”’\"'"  # removed after a span


def run(job: Job, options: DedupOptions, index: Index) -> None:
    """Remove the items of an index from the job's documents."""
    names = ", ".join(sorted(index.tasks))
    notes.note(f"looking for {len(index.owners):,} items of {names} (index {index.digest[:12]})")
    if short := index.too_short:
        task, item = short[0]
        notes.warn(
            f"{len(short)} items have too few words to be looked for (for example {task}/{item})"
        )
    engine = choose_engine(options.engine)
    parts = job.to_directory or (options.removed and not file_ending(options.removed))
    salt = f"{index.digest} {options.removed}" if parts else index.digest

    def work(job: Job, removed: str, sources: Sequence[Source] | None) -> None:
        resolved = options.replace(engine=engine, removed=removed)
        transform = partial(clean_shard, options=resolved, index=index)
        run_map(job, transform, sources=sources, salt=salt, next_step="sabia tokenize")

    map_and_gather(job, options.removed, work, salt)


_finders: dict[tuple[str, float, int, str], Finder] = {}


def clean_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    options: DedupOptions,
    index: Index,
) -> Iterator[pa.RecordBatch]:
    """Mark, cut or drop the contaminated rows of a shard: a transform for `run_map`."""
    key = (index.digest, options.overlap, options.run, options.engine)
    if key not in _finders:  # one per process, as a finder is slow to build
        _finders.clear()
        _finders[key] = Finder(index, options.overlap, options.run, options.engine)
    finder = _finders[key]
    with RemovedPart(options.removed, context) as removed:
        for batch in batches:
            data, offsets = text_buffers(batch.column("text"))
            findings = finder.find(data, offsets)
            records = [
                json.dumps([f.as_dict() for f in findings[i]], ensure_ascii=False)
                if i in findings else None
                for i in range(batch.num_rows)
            ]  # fmt: skip
            batch = put_column(batch, "contamination", pa.array(records, pa.string()))
            yield _clean_batch(batch, findings, options.verdict, context, removed)


def _clean_batch(
    batch: pa.RecordBatch,
    findings: dict[int, list[Finding]],
    verdict: str,
    context: ShardContext,
    removed: RemovedPart,
) -> pa.RecordBatch:
    """The rows that are kept, with spans cut out; the others are written to `removed`."""
    actions = {row: _action(findings[row], verdict) for row in findings}
    column = batch.column("text")
    masked = [row for row, action in actions.items() if action == MASK]
    cut = {row: cut_spans(column[row].as_py(), findings[row]) for row in masked}
    dropped = {row for row, action in actions.items() if action == DROP}
    dropped |= {row for row, text in cut.items() if not text.strip()}
    context.count("contaminated", len(findings))
    context.count("dropped", len(dropped))
    context.count("masked", len(set(masked) - dropped))
    items = {(f.task, f.item) for f in chain.from_iterable(findings.values())}
    for task in sorted({task for task, _ in items}):
        context.count(f"findings of {task}", sum(t == task for t, _ in items))
    if dropped:
        rows = sorted(dropped)
        reasons = [f"contaminated: {findings[r][0].task}/{findings[r][0].item}" for r in rows]
        removed.write(batch.take(pa.array(rows)), pa.array(reasons))
    kept = np.ones(batch.num_rows, bool)
    kept[list(dropped)] = False
    if cut:
        texts = column.to_pylist()
        for row, text in cut.items():
            texts[row] = text
        batch = put_column(batch, "text", pa.array(texts, column.type))
    return batch.filter(pa.array(kept))


def _action(findings: Sequence[Finding], verdict: str) -> str:
    if verdict != AUTO:
        return verdict
    return DROP if any(finding.level == ITEM for finding in findings) else MASK


def cut_spans(text: str, spans: Sequence[Finding]) -> str:
    """The text without bytes [begin, end) of each span; CUT replaces a span inside the text."""
    data = text.encode()
    kept, position = [], 0
    for span in sorted(spans, key=lambda one: one.begin):
        if span.begin > position:
            kept.append(data[position : span.begin].decode())
        position = max(position, span.end)
    first, *others = [*kept, data[position:].decode()]
    if not kept or min(span.begin for span in spans) == 0:
        others, first = [first, *others], ""
    parts = [first, *(part.lstrip(MARKS) for part in others)]
    return CUT.join(part.rstrip() for part in parts if part.strip())
