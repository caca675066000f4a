"""NF4, 4-bit codes of quantiles of the normal distribution, as bitsandbytes stores them; NumPy.

Dettmers et al. 2023 (QLoRA, arXiv 2305.14314, section 3). The values of a matrix, row by row, are
divided by the largest one of their block of 64 and become the nearest of 16 VALUES; two codes are
in a byte, the first in its upper half. With double quantization the largest values of the blocks,
less their mean, become the nearest of 256 values of a dynamic format in blocks of 256. The mean of
bitsandbytes differs from ours in the last bit, and with it few of these 8-bit codes by one.

A matrix NAME of a checkpoint of bitsandbytes is NAME U8 [values/2, 1], NAME.absmax F32 (or U8) by
block, NAME.quant_map F32 [16], with double quantization NAME.nested_absmax F32 by block and
NAME.nested_quant_map F32 [256], and NAME.quant_state.bitsandbytes__nf4, JSON in bytes: quant_type,
blocksize, shape, dtype, and nested_blocksize, nested_offset. compressed-tensors and GGUF have no
NF4.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core.errors import BadData

BLOCK, NESTED_BLOCK = 64, 256
# table of bitsandbytes; appendix E of the paper
VALUES = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True)
class Nf4:
    """packed: uint8 [values/2]; largest: float32 by block, or codes (uint8) of it, then with
    `nested`: float32 by block of these, and `offset`."""

    packed: np.ndarray
    largest: np.ndarray
    shape: tuple[int, ...]
    nested: np.ndarray | None = None
    offset: float = 0.0
    block: int = BLOCK
    nested_block: int = NESTED_BLOCK

    def decoded(self) -> np.ndarray:
        """float32 [...]."""
        return decode(self)


def encode(weight: np.ndarray, double: bool = False, block: int = BLOCK) -> Nf4:
    """weight[...] (float32) in NF4; double: with double quantization."""
    flat = np.asarray(weight, np.float32).reshape(-1)
    blocks = _blocks(flat, block)
    largest = np.abs(blocks).max(1)
    with np.errstate(divide="ignore"):
        factor = np.where(largest > 0, np.float32(1) / largest, 0).astype(np.float32)
    codes = _nearest(blocks * factor[:, None], VALUES).reshape(-1)[: flat.size]
    codes = np.pad(codes, (0, flat.size % 2))
    packed = (codes[::2] << 4 | codes[1::2]).astype(np.uint8)
    if not double:
        return Nf4(packed, largest, weight.shape, block=block)
    offset = largest.mean(dtype=np.float32)
    rest = _blocks(largest - offset, NESTED_BLOCK)
    nested = np.abs(rest).max(1)
    scaled = rest / np.where(nested > 0, nested, 1)[:, None]
    small = _nearest(scaled, dynamic_values()).reshape(-1)[: largest.size]
    return Nf4(packed, small, weight.shape, nested, float(offset), block)


def decode(
    stored: Nf4, values: np.ndarray = VALUES, nested: np.ndarray | None = None
) -> np.ndarray:
    """float32 [...] of the stored form; values, nested: the tables of a file. BadData."""
    count = int(np.prod(stored.shape))
    largest = stored.largest
    if stored.nested is not None:
        table = dynamic_values() if nested is None else nested
        by_block = np.repeat(stored.nested, stored.nested_block)[: largest.size]
        largest = table[largest] * by_block + np.float32(stored.offset)
    packed = stored.packed.reshape(-1)
    if packed.size != -(-count // 2) or largest.size != -(-count // stored.block):
        raise BadData(f"{packed.size} bytes and {largest.size} blocks for shape {stored.shape}")
    codes = np.stack([packed >> 4, packed & 15], 1).reshape(-1)[:count]
    scale = np.repeat(largest.astype(np.float32), stored.block)[:count]
    return (values[codes] * scale).reshape(stored.shape)


def dynamic_values() -> np.ndarray:
    """The 256 values, ascending, of the dynamic 8-bit format (Dettmers 2016, arXiv 1511.04561, as
    `create_dynamic_map` of bitsandbytes): seven decades, each with twice as many steps as the one
    below, both signs, 0 and 1."""
    made = [0.0, 1.0]
    for decade in range(7):
        ends = np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32)
        middles = (ends[:-1] + ends[1:]) / 2 * np.float32(10.0 ** (decade - 6))
        made += [*middles.tolist(), *(-middles).tolist()]
    return np.array(sorted(made), np.float32)


def dequantize(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint of bitsandbytes, decoded. Raises BadData for what is not NF4."""
    names = [name.partition(STATE)[0] for name in tensors if STATE in name]
    if wrong := [name for name in tensors if name.endswith((".SCB", f"{STATE}fp4"))]:
        raise BadData(f"model: {wrong[0]}: 8 bits or FP4 of bitsandbytes (expected NF4)")
    decoded = {name: _matrix(tensors, name) for name in names}
    used = tuple(f"{name}." for name in names)
    rest = {k: v for k, v in tensors.items() if k not in decoded and not k.startswith(used)}
    return rest | decoded


def _matrix(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    try:
        state: dict[str, Any] = json.loads(np.asarray(tensors[f"{name}{STATE}nf4"]).tobytes())
        double = "nested_offset" in state
        stored = Nf4(
            np.asarray(tensors[name]),
            np.asarray(tensors[f"{name}.absmax"]),
            tuple(state["shape"]),
            np.asarray(tensors[f"{name}.nested_absmax"]) if double else None,
            float(state.get("nested_offset", 0)),
            int(state["blocksize"]),
            int(state.get("nested_blocksize", NESTED_BLOCK)),
        )
        nested = np.asarray(tensors[f"{name}.nested_quant_map"]) if double else None
        return decode(stored, np.asarray(tensors[f"{name}.quant_map"], np.float32), nested)
    except (KeyError, ValueError, IndexError, BadData) as error:
        raise BadData(f"model: {name}: cannot be decoded as NF4 ({error!s})") from None


def _blocks(flat: np.ndarray, size: int) -> np.ndarray:
    """flat[n] in rows of `size`, the last one filled with zeros."""
    return np.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def _nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The number (uint8) of the nearest value, the lower one of two that are as near."""
    middles = (values[1:] + values[:-1]) / 2
    return np.searchsorted(middles, x, side="left").astype(np.uint8)
