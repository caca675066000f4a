"""The pieces of tensors that a process writes to a checkpoint, each fetched when it is written.

A piece is a box of a global tensor: name, offset, shape. Its array is a NumPy array or a
`LazyArray`, whose rows (slices of the first axis) are fetched when they are read; a writer reads
blocks of about BLOCK_BYTES, so that a copy from a device needs no more host memory than a block,
however large the tensor is.

`write_pieces` streams them into safetensors files: the header, then block by block, hashed while
written. Shapes and dtypes are known before any data, so nothing is collected in memory. When
`write_pieces` returns, the data are in the page cache: the caller may change its arrays, and `sync`
(in another thread) makes the files durable. Hashes are of the data in memory, not of what the disk
returns: 128-bit XXH3 (xxhash.com; not cryptographic; 10 GB/s, BLAKE2b 0.8), 32 hexadecimal digits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from sabia.core.errors import UsageError
from sabia.core.model.storage.lazy_array import LazyArray, batches_by_size
from sabia.core.model.storage.safetensors_file import encode_header

BLOCK_BYTES = 64 << 20


Array = np.ndarray | LazyArray


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name` at `offset` in a tensor of `global_shape` (default: all of it)."""

    name: str
    array: Array
    offset: tuple[int, ...] = ()
    global_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = self.array.shape if self.global_shape is None else self.global_shape
        whole = tuple(map(int, given))
        offset = tuple(map(int, self.offset)) or (0,) * len(whole)
        object.__setattr__(self, "global_shape", whole)
        object.__setattr__(self, "offset", offset)
        ends = [o + n for o, n in zip(offset, self.array.shape, strict=False)]
        # the box must be inside the whole tensor
        fits = len(self.array.shape) == len(whole) == len(offset)
        if not fits or min(offset, default=0) < 0 or any(map(int.__gt__, ends, whole)):
            raise UsageError(
                f"checkpoint: piece of {self.name} of shape {self.array.shape} at {offset} "
                f"(expected inside {whole})"
            )

    @property
    def key(self) -> str:
        """The name in its file, with the offset if it is not the whole tensor: `m/w@0,512`."""
        if self.array.shape == self.global_shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offset))}"


def whole_pieces(state: Mapping[str, Array]) -> Iterator[Piece]:
    """Pieces of unsharded arrays."""
    return (Piece(name, array) for name, array in state.items())


def blocks(array: Array, limit: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """The bytes of an array in order, about `limit` at a time (at least one row)."""
    rows = array.shape[0] if array.shape else 1
    if not array.nbytes:
        return
    # rows per block
    step = max(1, limit * rows // array.nbytes)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if isinstance(array, LazyArray):
            part = array.fetch(start, stop)
        else:
            part = array[start:stop] if array.shape else array
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


FILE_BYTES = 512 << 20  # an upload is retried file by file
CHUNK_BYTES = 4 << 20


def write_pieces(directory: Path, rank: int, pieces: Iterable[Piece]) -> dict[str, object]:
    """Write this process's files; returns its entry {files: {…}, tensors: {…}} of the manifest."""
    entry: dict[str, Any] = {"files": {}, "tensors": {}}
    groups = batches_by_size(pieces, lambda piece: piece.array.nbytes, FILE_BYTES)
    for number, group in enumerate(groups):
        name = f"state-{rank:05d}-{number:05d}.safetensors"
        entry["files"][name] = _write_file(directory / name, group)
        for piece in group:
            shape = list(piece.global_shape or ())
            tensor = {"dtype": piece.array.dtype.name, "shape": shape, "pieces": []}
            box = {"offset": list(piece.offset), "shape": list(piece.array.shape)}
            pieces_written = entry["tensors"].setdefault(piece.name, tensor)["pieces"]
            pieces_written.append({"file": name, "key": piece.key} | box)
    return entry


def _write_file(path: Path, pieces: Sequence[Piece]) -> dict[str, object]:
    # widest dtypes first, so that all tensors are aligned
    ordered = sorted(pieces, key=lambda piece: -piece.array.dtype.itemsize)
    header = encode_header({piece.key: piece.array for piece in ordered})
    data = chain.from_iterable(blocks(piece.array) for piece in ordered)
    digest, size = xxh3_128(), 0
    with open(path, "wb", buffering=0) as file:
        for block in chain((memoryview(header),), data):
            for start in range(0, len(block), CHUNK_BYTES):
                chunk = block[start : start + CHUNK_BYTES]
                digest.update(chunk)
                size += len(chunk)
                while chunk:  # an unbuffered write may write less
                    chunk = chunk[file.write(chunk) :]
    return {"size": size, "xxh3": digest.hexdigest()}


def sync(paths: Iterable[Path]) -> None:
    """Make files durable."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
