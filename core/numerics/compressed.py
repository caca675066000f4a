"""Encoding and decoding of weights in the compressed-tensors format.

A quantized Linear named M of O outputs and I inputs is stored as
  pack-quantized   M.weight_packed I32 [O, I·bits/32], M.weight_scale, M.weight_shape I64 [2], and
                   if asymmetric M.weight_zero_point (packed along O), M.weight_g_idx [I]
  int-quantized    M.weight I8 [O, I], M.weight_scale
  float-quantized  M.weight F8_E4M3 [O, I], M.weight_scale
with one scale per tensor [1], row [O, 1], group of columns [O, groups], or block. `encode_weight`
writes symmetric formats with scales per row or group; `dequantize` reads all of them.
Values are the exact float32 products code · scale.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.numerics import floats, integers
from sabia.core.numerics.schemes import Scheme

PARTS: tuple[str, ...] = ("weight", "weight_packed", "weight_scale", "weight_shape")
PARTS += ("weight_zero_point", "weight_g_idx")
IGNORED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "mixed-precision", "dense")
DEFAULT_BLOCK = (128, 128)


def encode_weight(codes: np.ndarray, scale: np.ndarray, scheme: Scheme) -> dict[str, np.ndarray]:
    """The stored parts of a weight, by suffix.

    codes[O, I] are int8, or uint8 E4M3 codes for fp8; scale[O, groups] holds BF16 values as
    float32. Parts that are BF16 or E4M3 in the file have that dtype of ml_dtypes.
    """
    import ml_dtypes

    parts = {"weight_scale": floats.bfloat16(scale)}
    if scheme.type == "float":
        return parts | {"weight": codes.view(ml_dtypes.float8_e4m3fn)}
    if scheme.format != "pack-quantized":
        return parts | {"weight": codes}
    packed = integers.pack(codes, scheme.bits)
    return parts | {"weight_packed": packed, "weight_shape": np.array(codes.shape, np.int64)}


def dequantize(
    tensors: Mapping[str, np.ndarray], quantization_config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint with every quantized weight as float32 under `NAME.weight`.

    float8 arrays may be of a float8 dtype or raw uint8; BF16 scales of a bfloat16 dtype or raw
    uint16. Raises BadData for a format that is not one of FORMATS, or for missing parts.
    """
    config = quantization_config
    if config.get("quant_method") != "compressed-tensors" or config.get("format") not in FORMATS:
        named = f"{config.get('quant_method')} {config.get('format')}"
        raise BadData(f"quantized checkpoint: {named} (expected one of {', '.join(FORMATS)})")
    modules = [n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")]
    stored = {f"{module}.{part}" for module in modules for part in PARTS}
    decoded = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in stored and name.rpartition(".")[2] not in IGNORED
    }
    block = _block(config)
    for module in modules:
        parts = {p: tensors[f"{module}.{p}"] for p in PARTS if f"{module}.{p}" in tensors}
        try:
            decoded[f"{module}.weight"] = decode_weight(parts, block)
        except (KeyError, ValueError, BadData) as error:
            shapes = ", ".join(f"{name}{list(part.shape)}" for name, part in parts.items())
            raise BadData(f"{module}: cannot decode {shapes} ({error})") from error
    return decoded


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    for group in config.get("config_groups", {}).values():
        if isinstance(group, Mapping) and (size := group["weights"].get("block_structure")):
            return int(size[0]), int(size[1])
    return DEFAULT_BLOCK


def decode_weight(
    parts: Mapping[str, np.ndarray], block: tuple[int, int] = DEFAULT_BLOCK
) -> np.ndarray:
    """weight[O, I] (float32) of its stored parts."""
    scale = _scale(parts["weight_scale"])
    if "weight_packed" in parts:
        values, zero = _packed(parts)
    else:
        values, zero = _codes(parts["weight"]), parts.get("weight_zero_point")
    order = parts.get("weight_g_idx")
    if zero is not None:
        values = values - _spread(np.asarray(zero, np.float32), values.shape, block, order)
    return values * _spread(scale, values.shape, block, order)  # w = (q - z)·s


def _scale(scale: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return (scale.view(ml_dtypes.bfloat16) if scale.dtype == np.uint16 else scale).astype("f4")


def _codes(weight: np.ndarray) -> np.ndarray:
    if weight.dtype.itemsize != 1:
        raise BadData(f"weight is {weight.dtype} (expected int8 or float8)")
    if weight.dtype == np.int8:
        return weight.astype(np.float32)
    return floats.E4M3.decode(weight.view(np.uint8))


def _packed(parts: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    rows, columns = (int(size) for size in parts["weight_shape"])
    packed = parts["weight_packed"]
    bits = next((b for b in (4, 8) if packed.shape[1] == -(-columns * b // 32)), None)
    if bits is None or len(packed) != rows:
        raise BadData(f"{list(packed.shape)} words for a weight [{rows}, {columns}]")
    zero = parts.get("weight_zero_point")
    if zero is not None:
        # zero points are packed along O
        zero = integers.unpack(np.ascontiguousarray(zero.T), bits, rows).T
    return integers.unpack(packed, bits, columns).astype(np.float32), zero


def _spread(
    scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int], order: np.ndarray | None
) -> np.ndarray:
    """A scale for each element of [O, I]."""
    rows, columns = shape
    if scale.size == 1:
        return scale.reshape(1, 1)  # one scale for the tensor
    if scale.shape[0] != rows:
        # one scale per block: [O / b0, I / b1] → [O, I]
        tall = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[:rows, :columns]
        if tall.shape != (rows, columns):
            raise BadData(f"{list(scale.shape)} blocks of {list(block)} for [{rows}, {columns}]")
        return tall
    if scale.ndim == 1 or scale.shape[1] == 1:
        return scale.reshape(rows, 1)  # one scale per row
    if order is not None:
        return scale[:, order]  # weight_g_idx: the group of each column
    width = integers.group_width(columns, columns // scale.shape[1])
    return np.repeat(scale, width, axis=1)  # [O, groups] → [O, I]
