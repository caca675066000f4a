"""First pass of dedup: sketch every document, into unnamed files or into a scratch directory.

In a scratch directory each source has a segment of its own. Within a process the work is done by
threads: the kernels release the global interpreter lock, and rows keep their order.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.atomic import atomic_directory
from sabia.core.shards.executors.processes import map_threads
from sabia.core.shards.sources import Source, batches_of, rows_of
from sabia.core.shards.spools import Spool
from sabia.core.text.dedup import keep_rules, lsh, signature_files
from sabia.core.text.dedup.first_pass import first_pass
from sabia.core.text.dedup.signature_files import Corpus, Segment, SegmentWriter
from sabia.core.text.recorded_rows import RowRecorder
from sabia.kernels.minhash.definitions import SketchConfig, Sketches
from sabia.kernels.minhash.interface import signatures
from sabia.kernels.minhash.interface import sketch as sketch_documents


def read_corpus(
    sources: Sequence[Source], config: DedupOptions, engine: str, seed: int, jobs: int
) -> tuple[Corpus, RowRecorder | None]:
    """Sketch all sources into unnamed files, and keep what was read for the last pass, unless that
    needs only the ids."""
    writer, recorder = _writer(config, seed), None
    if not config.decisions and all(isinstance(source, Source) for source in sources):
        recorder = RowRecorder(sources, _columns(config))
    read = recorder.first_pass if recorder else sources
    rows = fill(writer, read, config, engine, seed, jobs)
    return Corpus([writer.close()], np.concatenate(([0], np.cumsum(rows)))), recorder


def _columns(config: DedupOptions) -> list[str]:
    return list(dict.fromkeys(["id", "text", *keep_rules.columns(config.keep)]))


def sketch_into(
    directory: Path, source: Source, config: DedupOptions, engine: str, seed: int, jobs: int
) -> None:
    """Compute the segment of one source, which appears when it is complete."""
    with atomic_directory(directory) as temporary:
        writer = _writer(config, seed, temporary)
        fill(writer, [source], config, engine, seed, jobs)
        writer.close({"source": source.name})


def load_corpus(directories: Sequence[Path]) -> Corpus:
    """The corpus of sources that were sketched into directories."""
    segments = [Segment.open(directory) for directory in directories]
    rows = [segment.rows for segment in segments]
    return Corpus(segments, np.concatenate(([0], np.cumsum(rows))).astype(np.int64))


def sketch_key(config: DedupOptions, seed: int) -> list[Any]:
    """What a segment depends on besides its source."""
    sketch = asdict(lsh.sketch_of(config, seed))
    return [signature_files.VERSION, keep_rules.MEASURE, sketch, config.keep, config.verify]


def _writer(config: DedupOptions, seed: int, directory: Path | None = None) -> SegmentWriter:
    return SegmentWriter(lsh.sketch_of(config, seed).bands, config.with_shingles, directory)


def fill(
    writer: SegmentWriter, sources: Sequence[Source], config: DedupOptions, engine: str, seed: int,
    jobs: int,
) -> np.ndarray:  # fmt: skip
    """Sketch all documents of the sources; returns the rows of each, int64[sources]."""
    sketch = lsh.sketch_of(config, seed)
    rows = np.zeros(len(sources), np.int64)

    def work(batch: pa.RecordBatch, _name: str) -> tuple[Sketches, np.ndarray]:
        sketches = sketch_documents(*text_buffers(batch.column("text")), sketch, engine)
        return sketches, keep_rules.priorities(batch, config.keep, sketches.characters)

    items = first_pass(sources, _columns(config), work, jobs, rows_of(sources))
    for index, batch, worked in items:
        writer.add(*worked, batch.column("id"))
        rows[index] += batch.num_rows
    return rows


def read_signatures(
    sources: Sequence[Source], sketch: SketchConfig, engine: str, jobs: int
) -> np.ndarray:
    """The slots of all documents, uint32[n, bands * rows], in an unnamed file."""

    def work(item: tuple[int, pa.RecordBatch]) -> np.ndarray:
        return signatures(*text_buffers(item[1].column("text")), sketch, engine)

    spool, count = Spool(), 0
    for slots in map_threads(work, batches_of(sources, ["text"]), jobs):
        spool.append(slots)
        count += len(slots)
    return spool.array(np.uint32, (count, sketch.bands * sketch.rows))
