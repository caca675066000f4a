"""The index of kept documents, against which later runs are deduplicated and which they extend.

A directory with `index.json` and, for each run that wrote to it, a sketch segment of the documents
that the run kept and a list of the indexed documents that it replaced. A run that is already in
the index uses the index as it was before that run, so a repeated run gives the same result and
adds nothing. `index.json` is renamed into place last: a killed run leaves the index unchanged.
Documents that a run removed are not in the index. A later document that is similar to a removed one
but to no kept one is kept, although one run over all documents would join them: to prevent that,
an index would have to store the signatures and n-grams of removed documents too.
Versions, parameters and checksums are verified whenever the index is opened.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from sabia.core import notes
from sabia.core.errors import BadData, UsageError
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.atomic import atomic_directory, read_json, write_json
from sabia.core.shards.sources import Source
from sabia.core.text.dedup import keep_rules, lsh, signature_files
from sabia.core.text.dedup.signature_files import Corpus, Segment, SegmentWriter
from sabia.kernels.minhash.definitions import Sketches

VERSION = 2
_FILE = "index.json"
# the options that decide which documents a run keeps; names and order are part of its key
DECIDING = ("method", "threshold", "ngram", "permutations", "keep", "verify", "signatures")


@dataclass(frozen=True)
class KeptIndex:
    """Segments before a run, and the replaced ones of their rows: dead int64, ascending."""

    segments: Sequence[Segment]
    dead: np.ndarray
    print: str

    @property
    def rows(self) -> int:
        """Rows of all segments, including replaced ones."""
        return sum(segment.rows for segment in self.segments)


def run_key(sources: Sequence[Source], config: DedupOptions, seed: int) -> str:
    """Hash of a run's inputs and options: the name of its part of an index."""
    options = {name: getattr(config, name) for name in DECIDING}
    inputs = [[source.fingerprint() for source in sources], options, seed]
    inputs.append(keep_rules.MEASURE)
    return hashlib.blake2b(json.dumps(inputs).encode(), digest_size=16).hexdigest()


def open_index(directory: str, config: DedupOptions, seed: int, key: str) -> KeptIndex:
    """The index as it was before the run `key`; raises UsageError, BadData."""
    manifest = _read(Path(directory))
    if manifest is None:
        raise UsageError(f"--against: {directory}: no index here; --index DIR makes one")
    _check(directory, manifest, config, seed)
    names = [run["key"] for run in manifest["runs"]]
    names = names[: names.index(key)] if key in names else names
    segments = [Segment.open(Path(directory) / name) for name in names]
    replaced = [_replaced(Path(directory), run) for run in manifest["runs"][: len(names)]]
    dead_rows = np.sort(np.concatenate([np.empty(0, np.int64), *replaced]))
    print_ = hashlib.blake2b(" ".join(names).encode(), digest_size=16).hexdigest()
    return KeptIndex(segments, dead_rows, print_)


def _read(directory: Path) -> dict[str, Any] | None:
    try:
        manifest = read_json(directory / _FILE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadData(f"{directory / _FILE}: not an index ({error})") from error
    if manifest.get("version") != VERSION:
        raise BadData(
            f"{directory}: index version {manifest.get('version')} (expected {VERSION}); create the"
            " index again with --index"
        )
    return manifest


def _replaced(directory: Path, run: dict[str, Any]) -> np.ndarray:
    """The rows of the index that a run replaced."""
    path = directory / run["key"] / "replaced"
    rows = np.fromfile(path, np.int64)
    if run.get("replaced_xxh3") not in (None, xxh3_128_hexdigest(rows.tobytes())):
        raise BadData(f"{path}: changed since it was written; create the index again")
    return rows


def _parameters(config: DedupOptions, seed: int) -> dict[str, object]:
    """The parameters that all runs of an index must share."""
    bands = asdict(lsh.sketch_of(config, seed))
    return bands | {name: getattr(config, name) for name in ("method", "verify", "keep")}


def _check(directory: str, manifest: dict[str, Any], config: DedupOptions, seed: int) -> None:
    for name, value in _parameters(config, seed).items():
        if manifest["made"][name] != value:
            stored = manifest["made"][name]
            raise UsageError(f"{directory}: index has {name} {stored!r}, this run {value!r}")


def load(index: KeptIndex, corpus: Corpus) -> Corpus:
    """The index's rows followed by those of the corpus; replaced rows match no other row."""
    segments = [*index.segments, *corpus.segments]
    return Corpus(segments, corpus.starts + index.rows, index.dead)


def write_index(
    directory: str, corpus: Corpus, rows: np.ndarray, replaced: np.ndarray, config: DedupOptions,
    seed: int, key: str,
) -> None:  # fmt: skip
    """Add the run `key` to an index, which is created if it does not exist.

    rows int64, ascending: the corpus's documents to add; replaced int64: rows of the index (in the
    order of its segments) that they replace. Raises UsageError where parameters differ.
    """
    root = Path(directory)
    manifest = _read(root) or {"version": VERSION, "made": _parameters(config, seed), "runs": []}
    _check(directory, manifest, config, seed)
    if any(run["key"] == key for run in manifest["runs"]):
        return
    with atomic_directory(root / key) as temporary:
        writer = SegmentWriter(corpus.bands, config.with_shingles, temporary)
        for low in range(0, len(rows), signature_files.CHUNK_ROWS):
            _copy(corpus, rows[low : low + signature_files.CHUNK_ROWS], writer)
        replaced.astype(np.int64).tofile(temporary / "replaced")
        writer.close()
        digest = xxh3_128_hexdigest(replaced.astype(np.int64).tobytes())
    run = {"key": key, "rows": len(rows), "replaced": len(replaced), "replaced_xxh3": digest}
    write_json(root / _FILE, manifest | {"runs": [*manifest["runs"], run]})
    notes.note(f"index {directory}: {len(rows):,} documents added, {len(replaced):,} replaced")


def _copy(corpus: Corpus, rows: np.ndarray, writer: SegmentWriter) -> None:
    extents = corpus.extents(rows, "numpy")
    values: Any = corpus.shingles(rows, extents, "numpy")[0] if writer.with_shingles else None
    digests = np.empty((len(rows), corpus.bands), np.uint64)
    for band in range(corpus.bands):
        digests[:, band] = corpus.digests(band, rows)
    counts = corpus.values("counts", rows).astype(np.int64)
    exact, priorities = corpus.values("exact", rows), corpus.values("worth", rows)
    sketches = Sketches(digests, exact, counts, counts, values, counts)
    writer.add(sketches, priorities, corpus.take(rows))
