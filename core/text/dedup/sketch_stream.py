"""Methods whose sketch of a shard is a stream: some arrays for each batch of its documents.

The comparison reads the stream of all shards, in order: computed as the documents are read, or from
files that `--phase sketch` wrote. Such a file is an Arrow file with one row for each batch: the ids
of its documents, and its arrays in NumPy's format.
"""

import io
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sabia.core import stop
from sabia.core.digests import ArrowRows, arrow_batches
from sabia.core.errors import BadData
from sabia.core.shards.atomic import atomic_path
from sabia.core.shards.sources import Source, rows_of
from sabia.core.text.dedup.first_pass import first_pass
from sabia.core.text.dedup.phases import Method, Plan

Arrays = tuple[np.ndarray, ...]
_SCHEMA = pa.schema([("ids", pa.list_(pa.string())), ("arrays", pa.list_(pa.large_binary()))])


class Sketched(NamedTuple):
    """The sketch of one batch: the number of its shard, the ids of the documents, the arrays."""

    source: int
    ids: pa.Array
    arrays: Arrays


class StreamMethod(Method):
    """A method that says what arrays a batch gives, and how the stream of all is compared."""

    @abstractmethod
    def columns(self) -> list[str]:
        """The columns that are read besides `id`."""

    @abstractmethod
    def read(self, batch: pa.RecordBatch, name: str) -> Arrays:
        """The arrays of a batch of a shard of this name; called from several threads."""

    @abstractmethod
    def compare(
        self, sources: list[Source], sketches: Iterator[Sketched], directory: Path | None
    ) -> Plan:
        """The plan from the sketches of all documents; see Method.plan."""

    def has_sketch(self, path: Path) -> bool:
        """See Method."""
        return path.exists()

    def is_intact(self, path: Path) -> bool:
        """See Method."""
        try:
            for _ in _stored([path]):
                pass
        except BadData:
            return False
        return True

    def sketch(self, source: Source, path: Path) -> None:
        """See Method."""
        with (
            atomic_path(path) as temporary,
            open(temporary, "wb") as file,
            closing(ArrowRows(file, _SCHEMA, pa.ipc.new_file)) as writer,
        ):
            for _, ids, arrays in self._read_all([source]):
                blobs = [_to_bytes(array) for array in arrays]
                row = {"ids": [ids], "arrays": [blobs]}
                writer.write(pa.RecordBatch.from_pydict(row, _SCHEMA))

    def plan(
        self, sources: list[Source], sketches: Sequence[Path] | None, directory: Path | None = None
    ) -> Plan:
        """See Method."""
        stream = self._read_all(sources) if sketches is None else _stored(sketches)
        return self.compare(sources, stream, directory)

    def _read_all(self, sources: Sequence[Source]) -> Iterator[Sketched]:
        columns = list(dict.fromkeys(["id", *self.columns()]))
        threads, rows = self.threads(), rows_of(sources)
        for index, batch, arrays in first_pass(sources, columns, self.read, threads, rows):
            yield Sketched(index, batch.column("id"), arrays)

    def threads(self) -> int:
        """Threads that call `read`."""
        return self.job.jobs


def _to_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _stored(paths: Sequence[Path]) -> Iterator[Sketched]:
    """The stream of sketches that were written before."""
    for source, path in enumerate(paths):
        try:
            with pa.memory_map(str(path)) as file:
                for row in arrow_batches(pa.ipc.open_file(file), str(path)):
                    stop.check()
                    blobs = row.column("arrays").flatten()
                    arrays = (np.load(io.BytesIO(blob.as_buffer())) for blob in blobs)
                    yield Sketched(source, row.column("ids").flatten(), tuple(arrays))
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise BadData(f"{path}: not a sketch ({reason}); delete it and run again") from error
