"""Megatron's token files: a `.bin` of concatenated ids and an `.idx` with the document bounds.

The index, all little-endian: `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of the id's type, uint64
sequences n, uint64 documents + 1, int32 lengths[n] in tokens, int64 pointers[n] in bytes of the
`.bin`, int64 document bounds (numbers of sequences, from 0). Here a document is one sequence with
its end token. Types: 8 = uint16 where all ids are below 65,500 (the library's own rule), else
4 = int32. Format: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

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
