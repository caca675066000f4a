"""Stream pieces into safetensors files: the header, then block by block, hashed while written.

Shapes and dtypes are known before any data, so nothing is collected in memory. When `write_pieces`
returns, the data are in the page cache: the caller may change its arrays, and `sync` (in another
thread) makes the files durable. Hashes are of the data in memory, not of what the disk returns:
128-bit XXH3 (xxhash.com; not cryptographic; 10 GB/s, BLAKE2b 0.8), 32 hexadecimal digits.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from sabia.core.model.storage.safetensors_file import encode_header
from sabia.core.model.storage.size_batches import batches_by_size
from sabia.core.train.checkpoint.pieces import Piece, blocks

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


def file_hash(path: Path) -> str:
    """XXH3 of a file."""
    digest = xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def text_hash(text: bytes) -> str:
    """XXH3 of a text."""
    return xxh3_128(text).hexdigest()
