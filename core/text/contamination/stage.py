"""Take benchmark items out of documents: drop the document, mask the span, or only mark it.

A map stage: the index holds all that is known of the benchmarks, so each shard is cleaned by
itself, in workers and in slices of a Slurm array alike. Findings stay with the row as JSON in the
column `contamination` (null where there are none); spans are bytes of the text as it came in.
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
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.sources import Source
from sabia.core.text.contamination.benchmark_index import Index
from sabia.core.text.contamination.matching import ITEM, Finder, Finding
from sabia.core.text.dedup.first_pass import choose_engine
from sabia.core.text.removed_rows import RemovedPart, map_and_gather, put_column

AUTO, DROP, MASK = "auto", "drop", "mask"  # values of --verdict
CUT = "\n"  # stands where a span was
MARKS = " \t\r\n.,;:!?…)]}»”’\"'"  # ends that a span left behind


def run(job: Job, options: DedupOptions, index: Index) -> None:
    """Clean the job's documents of the items of an index."""
    _say(index)
    engine = choose_engine(options.engine)
    salt = f"{index.digest} {options.removed}" if job.to_directory else index.digest

    def work(job: Job, removed: str, sources: Sequence[Source] | None) -> None:
        given = options.replace(engine=engine, removed=removed)
        transform = partial(clean_shard, options=given, index=index)
        run_map(job, transform, sources=sources, salt=salt, next_step="sabia tokenize")

    map_and_gather(job, options.removed, work, salt)


def _say(index: Index) -> None:
    names = ", ".join(sorted(index.tasks))
    notes.note(f"looking for {len(index.owners):,} items of {names} (index {index.digest[:12]})")
    if short := index.too_short:
        task, item = short[0]
        notes.warn(
            f"{len(short)} items have too few words to be looked for ({task}/{item}, for one)"
        )


_finders: dict[tuple[str, float, int, str], Finder] = {}


def finder_of(index: Index, options: DedupOptions) -> Finder:
    """The finder of an index; made once in a process."""
    key = (index.digest, options.overlap, options.run, options.engine)
    if key not in _finders:
        _finders.clear()
        _finders[key] = Finder(index, options.overlap, options.run, options.engine)
    return _finders[key]


def clean_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    options: DedupOptions,
    index: Index,
) -> Iterator[pa.RecordBatch]:
    """The transform: rows with `contamination`, masked or dropped by the verdict."""
    finder = finder_of(index, options)
    with RemovedPart(options.removed, context.index) as removed:
        for batch in batches:
            data, offsets = text_buffers(batch.column("text"))
            found = finder.find(data, offsets)
            told = [
                json.dumps([f.as_dict() for f in found[i]], ensure_ascii=False)
                if i in found else None
                for i in range(batch.num_rows)
            ]  # fmt: skip
            batch = put_column(batch, "contamination", pa.array(told, pa.string()))
            yield _judged(batch, found, options.verdict, context, removed)


def _judged(
    batch: pa.RecordBatch,
    found: dict[int, list[Finding]],
    verdict: str,
    context: ShardContext,
    removed: RemovedPart,
) -> pa.RecordBatch:
    """The rows that stay, spans masked; the others go to `removed`."""
    verdicts = {row: _verdict(findings, verdict) for row, findings in found.items()}
    column = batch.column("text")
    masked = (row for row, one in verdicts.items() if one == MASK)
    cut = {row: cut_spans(column[row].as_py(), found[row]) for row in masked}
    dropped = {row for row, one in verdicts.items() if one == DROP}
    dropped |= {row for row, text in cut.items() if not text.strip()}
    _count(context, found, verdicts, dropped)
    if dropped:
        rows = sorted(dropped)
        reasons = [f"contaminated: {found[r][0].task}/{found[r][0].item}" for r in rows]
        removed.write(batch.take(pa.array(rows)), pa.array(reasons))
    stays = np.ones(batch.num_rows, bool)
    stays[list(dropped)] = False
    if cut:
        texts = column.to_pylist()
        for row, text in cut.items():
            texts[row] = text
        batch = put_column(batch, "text", pa.array(texts, column.type))
    return batch.filter(pa.array(stays))


def _verdict(findings: Sequence[Finding], verdict: str) -> str:
    if verdict != AUTO:
        return verdict
    return DROP if any(finding.level == ITEM for finding in findings) else MASK


def cut_spans(text: str, spans: Sequence[Finding]) -> str:
    """The text without bytes [begin, end) of each span; CUT where one was inside."""
    data = text.encode()
    kept, at = [], 0
    for span in sorted(spans, key=lambda one: one.begin):
        if span.begin > at:
            kept.append(data[at : span.begin].decode())
        at = max(at, span.end)
    first, *others = [*kept, data[at:].decode()]
    if not kept or min(span.begin for span in spans) == 0:
        others, first = [first, *others], ""
    parts = [first, *(part.lstrip(MARKS) for part in others)]
    return CUT.join(part.rstrip() for part in parts if part.strip())


def _count(
    context: ShardContext,
    found: dict[int, list[Finding]],
    verdicts: dict[int, str],
    dropped: set[int],
) -> None:
    context.count("contaminated", len(found))
    context.count("dropped", len(dropped))
    context.count("masked", sum(v == MASK for r, v in verdicts.items() if r not in dropped))
    items = {(f.task, f.item) for f in chain.from_iterable(found.values())}
    for task in sorted({task for task, _ in items}):
        context.count(f"findings of {task}", sum(t == task for t, _ in items))
