"""Token files of other trainers: Megatron `.bin`/`.idx`, and Arrow directories of `datasets`.

Both are written into a directory, a part for each input shard: `part-00000.bin` and `.idx` hold
documents, `data-00000.arrow` holds packed rows, with `state.json` and `dataset_info.json` so that
`datasets.load_from_disk` opens the directory. The record of a part, `part-00000.json`, is written
last and holds its provenance; a repeated run writes only parts that are missing or were made from
something else.

Megatron's files are a `.bin` of concatenated ids and an `.idx` with the document bounds, all
little-endian: `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of the id's type, uint64 sequences n,
uint64 documents + 1, int32 lengths[n] in tokens, int64 pointers[n] in bytes of the `.bin`, int64
document bounds (numbers of sequences, from 0). Here a document is one sequence with its end token.
Types: 8 = uint16 where all ids are below 65,500 (the library's own rule), else 4 = int32. Format:
Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.digests import ArrowRows
from sabia.core.errors import UsageError
from sabia.core.file_hashes import content_hash
from sabia.core.shards import schemas
from sabia.core.shards.atomic import (
    atomic_path,
    file_digest,
    read_json,
    write_atomic,
    write_json,
)  # fmt: skip
from sabia.core.shards.job import Job
from sabia.core.shards.lineage import run_record
from sabia.core.shards.manifest import keep_call
from sabia.core.shards.outputs import Provenance
from sabia.core.text.tokenize.document_encoding import tokens_of

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
UINT16, INT32 = 8, 4  # codes of types
SMALL_VOCABULARY = 65_500


class MegatronWriter:
    """Appends documents to an open `.bin`; `write_index` writes the `.idx`."""

    def __init__(self, target: BinaryIO, vocab_size: int) -> None:
        """`vocab_size` is one more than the largest id."""
        self.target = target
        self.code = UINT16 if vocab_size < SMALL_VOCABULARY else INT32
        self._lengths: list[np.ndarray] = []

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return sum(map(len, self._lengths))

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: tokens[Σ lengths] and the length of each."""
        self.target.write(tokens.astype("<u2" if self.code == UINT16 else "<i4").data)
        self._lengths.append(lengths.astype("<i4"))

    def write_index(self, path: str | Path) -> None:
        """Write the index of everything added."""
        lengths = np.concatenate([np.empty(0, "<i4"), *self._lengths])
        item_bytes = 2 if self.code == UINT16 else 4
        ends = np.cumsum(lengths, dtype=np.int64) * item_bytes
        pointers = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
        with open(path, "wb") as file:
            file.write(MAGIC + struct.pack("<QB", VERSION, self.code))
            file.write(struct.pack("<QQ", len(lengths), len(lengths) + 1))
            file.write(lengths.tobytes())
            file.write(pointers.astype("<i8").tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


@dataclass(frozen=True)
class TokenFileSink(ABC):
    """A Sink (`shards.mapping`) whose parts are files with a record; subclasses write the files.

    Raises UsageError where the output is not a local directory.
    """

    job: Job
    form = ""  # as --format names it
    per_shard = True
    ending = ".json"

    def __post_init__(self) -> None:
        if not self.job.to_directory or "://" in str(self.job.out):
            raise UsageError(f"--format {self.form} writes a local directory; give -o DIR")

    def file(self, name: str) -> Path:
        """A file in the output directory."""
        return Path(str(self.job.out)) / name

    def path(self, part: int) -> str:
        """The record of a part."""
        return str(self.file(f"part-{part:05d}.json"))

    def rows_made(self, part: int, provenance: dict[str, Any]) -> int | None:
        """See Sink."""
        try:
            record = read_json(self.path(part))
        except (FileNotFoundError, ValueError):
            return None
        if record.get("fingerprint") != provenance["fingerprint"]:
            return None
        for name, digest in record.get("files", {}).items():  # earlier versions have none
            path = self.file(name)
            if not path.is_file() or content_hash(str(path)) != digest:
                notes.warn(f"{path}: missing or damaged; the part is written again")
                return None
        return record.get("rows")

    def write(
        self, part: int, schema: pa.Schema, provenance: Provenance,
        batches: Iterator[pa.RecordBatch],
    ) -> int:  # fmt: skip
        """See Sink."""
        rows = self.write_files(part, schema, batches)
        made, run = run_record.split(provenance(True) if callable(provenance) else provenance)
        files = {path.name: file_digest(path) for path in self.files(part)}
        record = {run_record.RUN: run.ended(rows)} if run else {}
        write_json(self.path(part), made | {"rows": rows, "files": files} | record)
        return rows

    def for_run(self, job: Job, existing: frozenset[str]) -> Self:
        """See Sink."""
        return replace(self, job=job)

    @abstractmethod
    def files(self, part: int) -> list[Path]:
        """The files of a part; their digests are in its record."""

    @abstractmethod
    def write_files(self, part: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
        """Write the files of a part, atomically; returns its rows."""

    def finish(self, parts: int) -> None:
        """See Sink."""
        keep_call(self.job, [])

    @abstractmethod
    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        """See Sink: the bytes of the ids."""


class ArrowSink(TokenFileSink):
    """Packed rows as Arrow streams."""

    form = "arrow"

    def files(self, part: int) -> list[Path]:
        return [self._data_file(part)]

    def write_files(self, part: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
        rows = 0
        with (
            atomic_path(self._data_file(part)) as path,
            open(path, "wb") as file,
            closing(ArrowRows(file, schema)) as stream,
        ):
            for batch in batches:
                stream.write(batch)
                rows += batch.num_rows
        return rows

    def finish(self, parts: int) -> None:
        """Write what `datasets.load_from_disk` reads beside the data; of slices, the last one's
        files name all parts."""
        files = [self._data_file(part) for part in range(parts)]
        written = [path.name for path in files if path.is_file()]
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in written],
            "_fingerprint": "sabia",
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        features = {field.name: _feature(field.type) for field in schemas.KINDS["tokens"]}
        write_atomic(self.file("state.json"), json.dumps(state, indent=1))
        write_atomic(self.file("dataset_info.json"), json.dumps({"features": features}, indent=1))
        super().finish(parts)
        if len(written) < parts:
            notes.note(f"{len(written)} of {parts} parts so far")

    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        return sum(batch.nbytes for batch in batches)

    def _data_file(self, part: int) -> Path:
        return self.file(f"data-{part:05d}.arrow")


@dataclass(frozen=True)
class MegatronSink(TokenFileSink):
    """Documents (`document_encoding.ENCODED`) as a `.bin` and its `.idx`, which appears last."""

    vocab_size: int
    form = "megatron"

    def files(self, part: int) -> list[Path]:
        return [self.file(f"part-{part:05d}{ending}") for ending in (".bin", ".idx")]

    def write_files(self, part: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
        with (
            atomic_path(self.files(part)[1]) as index,
            atomic_path(self.files(part)[0]) as data,
            open(data, "wb") as file,
        ):
            writer = MegatronWriter(file, self.vocab_size)
            for batch in batches:
                writer.add(*tokens_of(batch))
            writer.write_index(index)
        return writer.documents

    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        width = 2 if self.vocab_size < SMALL_VOCABULARY else 4
        return sum(width * len(batch.column("tokens").values) for batch in batches)


def _feature(kind: pa.DataType) -> dict[str, object]:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": str(kind), "_type": "Value"}
