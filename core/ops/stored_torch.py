"""Quantized matrices in torch, decoded for one product at a time: only codes and scales are kept.

The values are those of `core.numerics.compressed` and `core.numerics.nf4`, bit for bit. In training
a matrix is decoded once for the forward and once for the backward pass (`decoded_again`).
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sabia.core.numerics.compressed import stored_codes
from sabia.core.numerics.floats import E2M1
from sabia.core.numerics.nf4 import Nf4
from sabia.core.numerics.stored import Stored, StoredMatrix, StoredStack
from sabia.core.ops.product import Array

Tensor = torch.Tensor
PIECE = 1 << 16  # elements that are decoded together on a CPU, so that they stay in its cache


def _pairs(values: np.ndarray, upper: bool = False) -> Tensor:
    """[256] float64, each the bytes of the two float32 values[16] of a byte's codes, the low half
    first, or the upper one."""
    pairs = np.stack((np.tile(values, 16), np.repeat(values, 16)), -1).astype(np.float32)
    if upper:
        pairs = np.ascontiguousarray(pairs[:, ::-1])
    return torch.from_numpy(pairs.view(np.float64)[:, 0])


class Codes:
    """weight[O, I] as codes and scales on a device."""

    def __init__(self, stored: StoredMatrix, device: torch.device) -> None:
        self.shape, self._scheme = stored.shape, stored.scheme
        scales, codes = stored.scales, stored_codes(stored.parts, stored.scheme)
        words = codes if codes.dtype == np.int8 else codes.view(np.uint8)
        self._words = torch.from_numpy(np.array(words)).to(device)
        self._pairs = None
        if stored.scheme.bits == 4:
            halves = np.arange(16, dtype=np.uint8)
            integers = stored.scheme.element == "int4"
            values = halves - np.float32(8) if integers else E2M1.decode(halves)
            self._pairs = _pairs(values).to(device)
        step = torch.from_numpy(np.array(scales.stored.astype(np.float32) / scales.whole))
        exact = stored.scheme.scale == "bf16"  # a BF16 number, with a whole scale of 1
        self._step = (step.bfloat16() if exact else step).to(device)
        self._zero = None
        if scales.zero is not None:
            self._zero = torch.from_numpy(scales.zero.astype(np.int8)).to(device)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self._words.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        zero = 0 if self._zero is None else self._zero.nbytes
        return self._words.nbytes + self._step.nbytes + zero

    def to(self, dtype: torch.dtype) -> Tensor:
        """The decoded matrix."""
        rows, columns = self.shape
        made = torch.empty(self.shape, dtype=dtype, device=self.device)
        count = max(1, PIECE // max(columns, 1)) if self.device.type == "cpu" else rows
        for start in range(0, rows, count):
            piece = slice(start, start + count)
            values = self._values(self._words[piece])
            if self._zero is not None:
                values = self._spread(values, self._zero, piece, torch.Tensor.sub_)
            made[piece] = self._spread(values, self._step, piece, torch.Tensor.mul_)
        return made

    def _values(self, words: Tensor) -> Tensor:
        """The values of rows of codes, float32."""
        columns = self.shape[1]
        if self._pairs is not None:
            pairs = self._pairs.index_select(0, words.flatten().int())
            return pairs.view(torch.float32).view(len(words), -1)[:, :columns]
        if words.dtype == torch.int8:
            return words.float()
        if self._scheme.element == "int8":  # packed
            return words[:, :columns].float().sub_(128)
        return words.view(torch.float8_e4m3fn).float()

    def _spread(self, values: Tensor, every: Tensor, piece: slice, act: Any) -> Tensor:
        """Rows `piece` of values[O, I] after an operation in place with those of their tiles."""
        height, width = self._scheme.tile
        if height is None:
            tiles = every
        elif height == 1:
            tiles = every[piece]
        else:
            rows = torch.arange(piece.start, piece.start + len(values), device=every.device)
            tiles = every[rows // height]
        tiles = tiles.float()
        if width is None:
            return act(values, tiles)
        whole = values.shape[1] // width * width
        act(values[:, :whole].unflatten(1, (-1, width)), tiles[:, : whole // width, None])
        if whole < values.shape[1]:
            act(values[:, whole:], tiles[:, -1:])
        return values


class Nf4Codes:
    """weight[...] in NF4 on a device; its blocks are filled up with zeros."""

    def __init__(self, stored: Nf4, device: torch.device) -> None:
        self.shape, self.device, self._block = tuple(stored.shape), device, stored.block

        def placed(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.array(array)).to(device)

        packed, size = stored.packed.reshape(-1), len(stored.largest) * stored.block // 2
        self._packed = placed(np.pad(packed, (0, size - packed.size)))
        self._largest, self._offset = placed(stored.largest), stored.offset
        self._nested, self._nested_block = None, stored.nested_block
        if stored.nested is not None:
            self._nested, self._table = placed(stored.nested), placed(stored.nested_values)
        self._pairs = _pairs(stored.values, upper=True).to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        nested = 0 if self._nested is None else self._nested.nbytes
        return self._packed.nbytes + self._largest.nbytes + nested

    def to(self, dtype: torch.dtype) -> Tensor:
        """The decoded matrix."""
        largest = self._by_block()
        made = torch.empty(len(largest), self._block, dtype=dtype, device=self.device)
        count = PIECE // self._block if self.device.type == "cpu" else len(largest)
        for start in range(0, len(largest), max(count, 1)):
            piece = slice(start, start + count)
            packed = self._packed.view(-1, self._block // 2)[piece]
            pairs = self._pairs.index_select(0, packed.flatten().int())
            values = pairs.view(torch.float32).view(-1, self._block)
            made[piece] = values.mul_(largest[piece, None])
        return made.view(-1)[: math.prod(self.shape)].view(self.shape)

    def _by_block(self) -> Tensor:
        """The largest value of each block, float32."""
        if self._nested is None:
            return self._largest
        scale = self._nested.repeat_interleave(self._nested_block)[: len(self._largest)]
        return self._table[self._largest.int()].mul_(scale).add_(self._offset)


class StackedCodes:
    """weight[E, O, I] of experts."""

    def __init__(self, experts: Sequence[Codes | Nf4Codes]) -> None:
        self._experts = experts
        self.shape, self.device = (len(experts), *experts[0].shape), experts[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(expert.nbytes for expert in self._experts)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The decoded matrices."""
        return torch.stack([expert.to(dtype) for expert in self._experts])


AnyCodes = Codes | Nf4Codes | StackedCodes


def _one_on(stored: StoredMatrix | Nf4, device: torch.device) -> Codes | Nf4Codes:
    return Nf4Codes(stored, device) if isinstance(stored, Nf4) else Codes(stored, device)


def codes_on(stored: Stored, device: torch.device) -> AnyCodes:
    """A stored matrix on a device."""
    if isinstance(stored, StoredStack):
        return StackedCodes([_one_on(expert, device) for expert in stored.experts])
    return _one_on(stored, device)


@contextlib.contextmanager
def decoded_again(codes: AnyCodes, weight: Tensor) -> Iterator[None]:
    """Products of `weight`, which is `codes` decoded, keep the codes for their backward passes."""
    storage, dtype = weight.untyped_storage().data_ptr(), weight.dtype

    def pack(saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != storage:
            return saved
        return saved.size(), saved.stride(), saved.storage_offset()

    def unpack(kept: Array) -> Tensor:
        return kept if isinstance(kept, Tensor) else codes.to(dtype).as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
