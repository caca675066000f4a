"""NF4, 4-bit codes of quantiles of the normal distribution, as bitsandbytes stores them; NumPy.

Dettmers et al. 2023 (QLoRA, arXiv 2305.14314, section 3). The values of a matrix, row by row, are
divided by the largest one of their block of 64 and become the nearest of 16 VALUES; two codes are
in a byte, the first in its upper half. With double quantization the largest values of the blocks,
less their mean, become the nearest of 256 values of a dynamic format in blocks of 256. The mean of
bitsandbytes differs from ours in the last bit, and with it few of these 8-bit codes by one.

A matrix NAME of a checkpoint of bitsandbytes is NAME U8 [values/2, 1], NAME.absmax F32 (or U8) by
block, NAME.quant_map F32 [16], with double quantization NAME.nested_absmax F32 by block and
NAME.nested_quant_map F32 [256], and NAME.quant_state.bitsandbytes__nf4, JSON in bytes: quant_type,
blocksize, shape, dtype, and nested_blocksize, nested_dtype, nested_offset. FP4 of bitsandbytes has
another quant_map and is read too. Files may hold the codes in words of other dtypes. Values are
float32 products, which programs compute in the dtype of the product. compressed-tensors and GGUF
have no NF4.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.numerics.tile_slices import shape_of, whole_tiles

BLOCK, NESTED_BLOCK = 64, 256
# table of bitsandbytes; appendix E of the paper
VALUES = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
STATE, ABSMAX = ".quant_state.bitsandbytes__", ".absmax"
KINDS = ("nf4", "fp4")
PARTS: tuple[str, ...] = ("", ABSMAX, ".quant_map", ".nested_absmax", ".nested_quant_map")
PARTS += tuple(STATE + kind for kind in KINDS)
_PIECE = 1 << 16  # blocks that are encoded together, to bound temporary memory
OFFSET_DIGITS = 24  # of nested_offset in JSON, at most; shorter ones are filled up with spaces


def dynamic_values() -> np.ndarray:
    """The 256 values, ascending, of the dynamic 8-bit format (Dettmers 2016, arXiv 1511.04561, as
    `create_dynamic_map` of bitsandbytes): seven decades, each with twice as many steps as the one
    below, both signs, 0 and 1. The ends of steps are rounded as by torch.linspace, which counts
    from the nearer end by a fused multiply-add."""
    low, high, made = np.float32(0.1), np.float32(1), [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        step, number = np.float64((high - low) / np.float32(count)), np.arange(count + 1)
        from_low = 2 * number < count + 1
        ends = np.where(from_low, low + step * number, high - step * (count - number))
        ends = ends.astype(np.float32)
        middles = (ends[:-1] + ends[1:]) / 2 * np.float32(10.0 ** (decade - 6))
        made += [*middles.tolist(), *(-middles).tolist()]
    return np.array(sorted(made), np.float32)


@dataclass(frozen=True)
class Nf4:
    """packed: uint8 [values/2]; largest: float32 by block, or codes (uint8) of it, then with
    `nested`: float32 by block of these, and `offset`. values[16], nested_values[256]: of the codes.
    """

    packed: np.ndarray
    largest: np.ndarray
    shape: tuple[int, ...]
    nested: np.ndarray | None = None
    offset: float = 0.0
    block: int = BLOCK
    nested_block: int = NESTED_BLOCK
    values: np.ndarray = field(default_factory=lambda: VALUES)
    nested_values: np.ndarray = field(default_factory=dynamic_values)

    def by_block(self) -> np.ndarray:
        """float32: the largest value of each block."""
        if self.nested is None:
            return self.largest.astype(np.float32)
        scale = np.repeat(self.nested, self.nested_block)[: self.largest.size]
        largest: np.ndarray = self.nested_values[self.largest] * scale + np.float32(self.offset)
        return largest

    def __getitem__(self, part: tuple[slice, slice]) -> "Nf4":
        """weight[rows, columns] of a matrix; ValueError where they cut blocks."""
        if (shape := shape_of(part, self.shape)) == self.shape:
            return self
        columns = self.shape[1]
        rows = self.block // math.gcd(columns, self.block)  # whose values are whole blocks
        unit = rows, self.block if rows == 1 else columns
        at = whole_tiles(part, self.shape, unit)
        each = columns // unit[1], math.prod(unit) // self.block
        blocks = np.arange(self.largest.size).reshape(-1, *each)[at].flatten()
        packed = self.packed.reshape(-1, self.block // 2)[blocks].reshape(-1)
        nested, run = self.nested, self.nested_block
        if nested is not None:
            of_blocks = blocks // run
            # the most blocks of which each run has one scale
            run = int(np.gcd.reduce(np.flatnonzero(np.diff(of_blocks)) + 1)) or blocks.size
            nested = nested[of_blocks[::run]]
        largest = self.largest[blocks]
        return replace(
            self, packed=packed, largest=largest, shape=shape, nested=nested, nested_block=run
        )

    def decoded(self) -> np.ndarray:
        """float32 [...]."""
        count = math.prod(self.shape)
        codes = np.stack([self.packed >> 4, self.packed & 15], 1).reshape(-1)[:count]
        made: np.ndarray = self.values[codes]
        made *= np.repeat(self.by_block(), self.block)[:count]
        return made.reshape(self.shape)


def encode(weight: np.ndarray, double: bool = False, block: int = BLOCK) -> Nf4:
    """weight[...] (float32) in NF4; double: with double quantization."""
    flat = np.asarray(weight, np.float32).reshape(-1)
    blocks = _blocks(flat, block)
    largest = np.abs(blocks).max(1)
    factor = np.float32(1) / np.maximum(largest, np.float32(1e-38))[:, None]
    pieces = [slice(at, at + _PIECE) for at in range(0, len(blocks), _PIECE)]
    codes = np.concatenate([_nearest(blocks[at] * factor[at], VALUES) for at in pieces])
    codes = codes.reshape(-1)[: flat.size]
    codes = np.pad(codes, (0, flat.size % 2), constant_values=7)  # the value 0
    packed = (codes[::2] << 4 | codes[1::2]).astype(np.uint8)
    if not double:
        return Nf4(packed, largest, weight.shape, block=block)
    offset = largest.mean(dtype=np.float32)
    rest = _blocks(largest - offset, NESTED_BLOCK)
    nested = np.abs(rest).max(1)
    scaled = rest / np.where(nested > 0, nested, 1)[:, None]
    small = _nearest(scaled, dynamic_values()).reshape(-1)[: largest.size]
    return Nf4(packed, small, weight.shape, nested, float(offset), block)


def file_tensors(stored: Nf4) -> dict[str, np.ndarray]:
    """The tensors of the files by what follows the name of the matrix, for programs that compute in
    BF16."""
    made = {"": stored.packed[:, None], ABSMAX: stored.largest, ".quant_map": stored.values}
    if stored.nested is not None:
        made |= {".nested_absmax": stored.nested, ".nested_quant_map": stored.nested_values}
    state = _state(stored.shape, stored.block, None if stored.nested is None else stored.offset)
    return made | {f"{STATE}nf4": np.frombuffer(state, np.uint8)}


def stored_bytes(shape: tuple[int, ...], double: bool) -> int:
    """Bytes of a matrix in the files."""
    count = math.prod(shape)
    blocks = -(-count // BLOCK)
    bytes_of = -(-count // 2) + VALUES.nbytes + len(_state(shape, BLOCK, 0.0 if double else None))
    return bytes_of + (blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 * 256 if double else 4 * blocks)


def _state(shape: tuple[int, ...], block: int, offset: float | None) -> bytes:
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16"}
    state["shape"] = shape
    if offset is None:
        return json.dumps(state).encode()
    state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    size = len(json.dumps(state | {"nested_offset": 0})) - 1 + OFFSET_DIGITS
    return json.dumps(state).ljust(size).encode()


def read(tensors: Mapping[str, np.ndarray], name: str) -> Nf4 | None:
    """A matrix of a checkpoint; None if it is not quantized. Raises BadData with the name of the
    tensor that is missing or does not fit."""

    def part(suffix: str) -> np.ndarray:
        if name + suffix not in tensors:
            raise BadData(f"model: tensor {name}{suffix} is missing (expected by {source})")
        return np.asarray(tensors[name + suffix])

    kind = next((kind for kind in KINDS if f"{name}{STATE}{kind}" in tensors), "")
    source = f"{name}{STATE}{kind}" if kind else name + ABSMAX
    if not kind and source not in tensors:
        return None
    state_bytes = part(f"{STATE}{kind or KINDS[0]}").tobytes()
    try:
        state: dict[str, Any] = json.loads(state_bytes)
        shape, block = tuple(map(int, state["shape"])), int(state["blocksize"])
        double = "nested_offset" in state
        offset = float(state.get("nested_offset", 0))
        nested_block = int(state.get("nested_blocksize", NESTED_BLOCK))
        if min(*shape, block, nested_block) < 1 or state["quant_type"] != kind:
            raise ValueError(f"{state}")
    except (KeyError, TypeError, ValueError) as error:
        raise BadData(f"model: {source} cannot be read ({error!r:.200})") from None
    count = math.prod(shape)
    blocks = -(-count // block)

    def fitting(suffix: str, dtype: Any, size: int) -> np.ndarray:
        array = part(suffix)
        given = np.ascontiguousarray(array).reshape(-1)
        given = given.view(np.uint8) if suffix == "" else given
        if given.size != size or given.dtype != dtype:
            raise BadData(
                f"model: {name}{suffix} is {array.dtype} {list(array.shape)} (expected {size} "
                f"values of {np.dtype(dtype)} for a matrix {list(shape)} in blocks of {block})"
            )
        return given

    small, size = np.uint8 if double else np.float32, -(-blocks // nested_block)
    more: dict[str, Any] = {"values": fitting(".quant_map", np.float32, 16)}
    if double:
        more["nested"] = fitting(".nested_absmax", np.float32, size)
        more["nested_values"] = fitting(".nested_quant_map", np.float32, 256)
    more |= {"offset": offset, "block": block, "nested_block": nested_block}
    return Nf4(fitting("", np.uint8, -(-count // 2)), fitting(ABSMAX, small, blocks), shape, **more)


def dequantize(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint of bitsandbytes, decoded. Raises BadData for 8 bits, and what
    `read` raises."""
    if wrong := [name for name in tensors if name.endswith(".SCB")]:
        raise BadData(f"model: {wrong[0]}: 8 bits of bitsandbytes (expected NF4 or FP4)")
    decoded: dict[str, np.ndarray] = {}
    for name in matrices(tensors):
        if (stored := read(tensors, name)) is not None:
            decoded[name] = stored.decoded()
    return {k: x for k, x in tensors.items() if matrix_of(k) not in decoded} | decoded


def matrices(tensors: Iterable[str]) -> list[str]:
    """The names of the quantized matrices of a checkpoint."""
    marks = (name for name in tensors if STATE in name or name.endswith(ABSMAX))
    return list(dict.fromkeys(map(matrix_of, marks)))


def matrix_of(name: str) -> str:
    """The name of the matrix to which a tensor of the files belongs."""
    return next((name.removesuffix(part) for part in PARTS[1:] if name.endswith(part)), name)


def _blocks(flat: np.ndarray, size: int) -> np.ndarray:
    """flat[n] in rows of `size`, the last one filled with zeros."""
    return np.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def _nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The number (uint8) of the nearest value, the lower one of two that are as near."""
    middles = (values[1:] + values[:-1]) / 2
    return np.searchsorted(middles, x, side="left").astype(np.uint8)
