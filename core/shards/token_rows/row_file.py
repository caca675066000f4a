"""Row files: the token rows of one input shard, or an index of them, read through a memory map.

A row file has an index of its rows: where the ids of a row are, its length, its documents, its loss
mask and its source. The ids follow each other in the file itself, or stay where they are: in an
uncompressed Arrow shard, whose row file then holds the index alone (`in_place`). Opening one reads
its footer; the rest is mapped and read where a row is used, so that neither time nor memory grows
with the rows. Rows are numbered source by source, and in the order of the shard within a source.

Layout, little-endian: MAGIC; ids int32[tokens]; each part of the index, aligned to 8 bytes; the
footer, a JSON object with its digest; its length, uint64; MAGIC. The parts:
`at` int64[n] index of a row's first id, in units of 4 bytes from the start of the file;
`size` int32[n]; `document` int64[n + 1] where the documents of a row begin in `lengths` int32[];
`mask` int64[n] a row's first bit in `bits` (-1: every token counts); `order` int64[n] the rows by
source, where there are several; `rejected` JSON lines [row, reason, shard]; `digest` 16 bytes of
each row, where rows in place have the ids that `tokenize` gives them (`row_digest`): such a row is
checked when it is read, since nothing has read it before.
"""

import contextlib
import ctypes
import hashlib
import json
import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData
from sabia.core.shards import records
from sabia.core.shards.arrow_arrays import bools, int32s, text_buffers
from sabia.core.shards.atomic import sealed, unsealed

MAGIC = b"sabiaRO2"
ENDING = ".rows"
COLUMNS = ("input_ids", "document_lengths", "loss_mask", "source")
PARTS = {
    "at": np.int64, "size": np.int32, "document": np.int64, "lengths": np.int32,
    "mask": np.int64, "bits": np.uint8, "order": np.int64, "rejected": np.uint8,
    "code": np.int32, "digest": np.uint8,
}  # fmt: skip
SPOOL_BYTES = 1 << 20  # of each part in memory while it is written
Positions = tuple[np.ndarray, np.ndarray]  # of each row's ids and mask, see `at` and `mask`


class RowWriter:
    """Writes a row file into an open file; `close` completes it.

    in_place: ids and masks are in another file, at the positions that `add` is given.
    """

    def __init__(self, target: BinaryIO, in_place: bool = False) -> None:
        self.target, self.in_place = target, in_place
        self._parts: dict[str, Any] = {
            name: tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - kept open
            for name in PARTS
        }
        self._digests = in_place  # as long as all rows have one
        self.rows = self.tokens = self._documents = self._bytes_of_bits = 0
        self._longest, self._most_documents, self._largest_id = 0, 0, 0
        self._sources: dict[str, int] = {}
        self._masked = False
        self._written = target.write(MAGIC)
        self._put("document", [0])

    def add(self, batch: pa.RecordBatch, positions: Positions | None = None) -> None:
        """Append token records, in place with the column `id`; raises BadData if lengths do not
        match."""
        tokens, documents = batch.column("input_ids"), batch.column("document_lengths")
        sizes = np.diff(int32s(tokens.offsets))
        counts = np.diff(int32s(documents.offsets))
        lengths = int32s(documents.flatten())
        self._check(sizes, counts, lengths)
        at, mask = positions or self._copied(batch, sizes)
        if self._masked or (mask >= 0).any():
            # rows before the first one with a mask
            self._put("mask", np.full(0 if self._masked else self.rows, -1))
            self._put("mask", mask)
            self._masked = True
        for name, values in (("at", at), ("size", sizes), ("lengths", lengths),
                             ("document", self._documents + np.cumsum(counts)),
                             ("code", self._codes(batch))):  # fmt: skip
            self._put(name, values)
        if self._digests and len(sizes):
            self._put("digest", self._digests_of(batch))
        self.rows += len(sizes)
        self.tokens += int(sizes.sum())
        self._documents += len(lengths)
        self._longest = max(self._longest, int(sizes.max(initial=0)))
        self._most_documents = max(self._most_documents, int(counts.max(initial=0)))

    def reject(self, row: Mapping[str, Any], reason: str, shard: str = "") -> None:
        """Record a row that cannot be used."""
        line = json.dumps([records.to_json(dict(row)), reason, shard]) + "\n"
        self._put("rejected", np.frombuffer(line.encode(), np.uint8))

    def close(self, **about: Any) -> None:
        """Write the index and the footer; about: figures that `RowFile.about` gives back."""
        parts, rows = {}, np.full(len(self._sources), self.rows)
        codes = self._parts.pop("code")
        if not self._digests:
            self._parts.pop("digest").close()
        if len(rows) > 1:
            codes.seek(0)
            code = np.frombuffer(codes.read(), np.int32)
            rows = np.bincount(code, minlength=len(rows))
            self._put("order", np.argsort(code, kind="stable"))
        for name, spool in self._parts.items():
            size = spool.tell()
            spool.seek(0)
            if size:
                parts[name] = [self._aligned(), size]
                shutil.copyfileobj(spool, self.target, SPOOL_BYTES)
                self._written += size
            spool.close()
        footer = {
            "in_place": self.in_place, "parts": parts, "rows": self.rows, "tokens": self.tokens,
            "row_length": self._longest, "most_documents": self._most_documents,
            "largest_id": None if self.in_place else self._largest_id,
            "sources": dict(zip(self._sources, rows.tolist(), strict=True)), "about": about,
        }  # fmt: skip
        text = json.dumps(sealed(footer)).encode()
        self.target.write(text + len(text).to_bytes(8, "little") + MAGIC)

    def _put(self, name: str, values: Any) -> None:
        self._parts[name].write(np.ascontiguousarray(values, PARTS[name]).data)

    def _aligned(self) -> int:
        """The position of the next part."""
        self._written += self.target.write(b"\0" * (-self._written % 8))
        return self._written

    def _check(self, sizes: np.ndarray, counts: np.ndarray, lengths: np.ndarray) -> None:
        total = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        ends = np.cumsum(counts)
        inside = total[ends] - total[ends - counts]  # [n] tokens of a row's documents
        wrong = inside > sizes
        if wrong.any():
            row = int(np.argmax(wrong))
            raise BadData(
                f"token row {self.rows + row}: documents of {inside[row]} tokens in a row of "
                f"{sizes[row]} (expected document_lengths that sum to at most the row's length)"
            )
        if lengths.min(initial=0) < 0:
            row = self.rows + int(np.searchsorted(ends, np.argmin(lengths), "right"))
            raise BadData(
                f"token row {row}: a document of {lengths.min()} tokens (expected 0 or more)"
            )

    def _copied(self, batch: pa.RecordBatch, sizes: np.ndarray) -> Positions:
        """Write ids and masks; their positions."""
        ids = np.ascontiguousarray(int32s(batch.column("input_ids").flatten()))
        before = np.cumsum(sizes) - sizes  # [n] tokens of the batch before a row
        at = self._written // 4 + before
        self._written += self.target.write(ids.data)
        self._largest_id = max(self._largest_id, int(ids.max(initial=0)))
        mask = batch.column("loss_mask") if "loss_mask" in batch.schema.names else None
        if mask is None or mask.null_count == len(mask):
            return at, np.full(len(sizes), -1)
        has_mask = bools(mask.is_valid())
        if (np.diff(int32s(mask.offsets))[has_mask] != sizes[has_mask]).any():
            raise BadData("token rows: a loss_mask is not as long as its input_ids")
        counted = np.ones(int(sizes.sum()), bool)
        counted[np.repeat(has_mask, sizes)] = bools(mask.flatten())
        bits = np.packbits(counted, bitorder="little")
        self._put("bits", bits)
        first = 8 * self._bytes_of_bits
        self._bytes_of_bits += len(bits)
        return at, np.where(has_mask, first + before, -1)

    def _digests_of(self, batch: pa.RecordBatch) -> np.ndarray:
        """The digests of a batch's rows, uint8[16 n]; none if their ids are something else."""
        digests = b""
        if "id" in batch.schema.names and pa.types.is_string(batch.schema.field("id").type):
            text, bounds = text_buffers(batch.column("id"))
            if (np.diff(bounds) == 32).all():
                with contextlib.suppress(ValueError):
                    digests = bytes.fromhex(text[bounds[0] : bounds[-1]].tobytes().decode())
        if digests and not self.rows:  # whether they are digests is seen from the first row
            tokens, documents = (batch.column(name)[0].values for name in COLUMNS[:2])
            if digests[:16] != row_digest(int32s(tokens), int32s(documents)):
                digests = b""
        self._digests = bool(digests)
        return np.frombuffer(digests, np.uint8)

    def _codes(self, batch: pa.RecordBatch) -> np.ndarray:
        """Index of each row's source int32[n]; new sources are added."""
        codes = self._sources
        if "source" not in batch.schema.names:
            return np.full(batch.num_rows, codes.setdefault("", len(codes)), np.int32)
        names = batch.column("source").cast(pa.string())
        encoded = (names.fill_null("") if names.null_count else names).dictionary_encode()
        known = [codes.setdefault(name, len(codes)) for name in encoded.dictionary.to_pylist()]
        return np.array(known, np.int32)[int32s(encoded.indices)]


def row_digest(ids: np.ndarray, lengths: np.ndarray) -> bytes:
    """128-bit BLAKE2b of the ids, int32[T], and the lengths of the documents."""
    digest = hashlib.blake2b(ids.astype("<i4", copy=False).tobytes(), digest_size=16)
    digest.update(lengths.astype("<i8").tobytes())
    return digest.digest()


@dataclass(frozen=True)
class RowFile:
    """A row file that is open: n rows, in the order of the shard.

    sources: rows of each source. row_length: tokens of the longest row; most_documents: of a row;
    largest_id: None where it is not known. order: see the module; None with one source.
    """

    ids: np.ndarray
    bits: np.ndarray
    at: np.ndarray
    size: np.ndarray
    document: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None
    order: np.ndarray | None
    tokens: int
    row_length: int
    most_documents: int
    largest_id: int | None
    sources: Mapping[str, int]
    about: Mapping[str, Any]
    rejected: np.ndarray
    digest: np.ndarray
    name: str  # of the file with the ids

    def __len__(self) -> int:
        return len(self.size)

    @classmethod
    def open(cls, path: str | Path, shard: str | Path = "") -> "RowFile":
        """Map a row file, and the shard if the ids are there; BadData if it is not whole."""
        return cls.from_buffer(mapped(path), str(path), shard)

    @classmethod
    def from_buffer(cls, buffer: Any, name: str, shard: str | Path = "") -> "RowFile":
        """The row file in a buffer of bytes; see `open`."""
        footer = _footer(memoryview(buffer), name)
        data = mapped(shard) if footer["in_place"] else None
        parts: dict[str, Any] = {
            part: np.ndarray((size // np.dtype(dtype).itemsize,), dtype, buffer, start)
            for part, dtype in PARTS.items()
            for start, size in [footer["parts"].get(part, (0, 0))]
        }
        ids = buffer if data is None else data
        parts |= {
            "ids": np.ndarray((len(memoryview(ids)) // 4,), np.int32, ids),
            "bits": parts["bits"] if data is None else np.frombuffer(data, np.uint8),
            "name": str(shard or name),
            # of every row, or of none
            "mask": parts["mask"] if "mask" in footer["parts"] else None,
            "order": parts["order"] if "order" in footer["parts"] else None,
        }
        return cls(**{f.name: parts[f.name] if f.name in parts else footer[f.name]
                      for f in fields(cls)})  # fmt: skip

    @cached_property
    def first_of_source(self) -> dict[str, int]:
        """How many rows of `order` are before the first of each source."""
        ends = np.cumsum(list(self.sources.values()))
        return dict(zip(self.sources, (ends - list(self.sources.values())).tolist(), strict=True))

    def will_need(self, row: int) -> None:
        """Let the system read a row in advance."""
        start = int(self.at[row])
        advise(self.ids[start : start + int(self.size[row])], mmap.MADV_WILLNEED)

    def row_ids(self, row: int) -> np.ndarray:
        """The ids of a row, int32[size]; BadData if it has a digest and is not as written."""
        start = int(self.at[row])
        ids = self.ids[start : start + int(self.size[row])]
        if len(self.digest):
            expected = self.digest[16 * row : 16 * row + 16].tobytes()
            if row_digest(ids, self.row_documents(row)) != expected:
                raise BadData(f"{self.name}: row {row} is not as it was written (damaged bits)")
        return ids

    def row_documents(self, row: int) -> np.ndarray:
        """The lengths of its documents, int32."""
        return self.lengths[self.document[row] : self.document[row + 1]]

    def row_mask(self, row: int) -> np.ndarray | None:
        """Which tokens of a row count, bool[size]; None: all."""
        if self.mask is None or self.mask[row] < 0:
            return None
        first, size = int(self.mask[row]), int(self.size[row])
        whole = self.bits[first // 8 : (first + size + 7) // 8]
        start = first % 8
        bits = np.unpackbits(whole, bitorder="little")[start : start + size]
        return bits.view(np.bool_)

    def rejects(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        """(row, reason, shard) of each row that could not be used."""
        for line in self.rejected.tobytes().splitlines():
            row, reason, shard = json.loads(line)
            yield json.loads(row), reason, shard


def _footer(buffer: memoryview, name: str) -> dict[str, Any]:
    end = len(buffer) - len(MAGIC)
    try:
        if bytes(buffer[end:]) != MAGIC or bytes(buffer[: len(MAGIC)]) != MAGIC:
            raise ValueError("not a row file")
        size = int.from_bytes(buffer[end - 8 : end], "little")
        return unsealed(json.loads(bytes(buffer[max(0, end - 8 - size) : end - 8])))
    except ValueError as error:
        raise BadData(f"{name}: damaged ({error}); remove it, and it is made again") from error


def mapped(path: str | Path) -> pa.Buffer:
    """A file as a buffer that is mapped, without an open file; pages are read one at a time."""
    with pa.memory_map(str(path)) as file:
        buffer = file.read_buffer()
    advise(np.frombuffer(buffer, np.uint8), mmap.MADV_RANDOM)
    return buffer


@cache
def _madvise() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "madvise", None)


def advise(array: np.ndarray, advice: int) -> None:
    """Tell the system how mapped memory will be used (madvise(2)); it may do nothing."""
    call = _madvise()
    if call is not None and array.nbytes:
        start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        size = array.ctypes.data + array.nbytes - start
        call(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice))
