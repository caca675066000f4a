"""Decoding of quantized checkpoints as they are published by the authors of models.

`mxfp4` (GPT-OSS; OCP Microscaling Formats 1.0): NAME_blocks U8 [E, R, G, 16] holds blocks of 32
E2M1 numbers, even columns in the low half of each byte, and NAME_scales U8 [E, R, G] the powers of
two, biased by 127, that multiply them. NAME is [E, 32·G, R]: its columns are the stored rows.
`fp8` (DeepSeek-V3): NAME F8_E4M3 [O, I] times NAME_scale_inv F32, one scale for each block of the
configuration's weight_block_size (128 by 128).
`bitsandbytes` (QLoRA): NF4, see `nf4`.
Every MXFP4 value is a bfloat16; FP8 ones are exact float32 products.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.numerics import nf4
from sabia.core.numerics.floats import E2M1
from sabia.core.numerics.scales import Scales, decode
from sabia.core.numerics.schemes import BLOCK, SCHEMES
from sabia.core.numerics.tiles import unpack_fp4

Arrays = Mapping[str, np.ndarray]
BLOCKS, SCALES, SCALE_INV = "_blocks", "_scales", "_scale_inv"


def dequantize(tensors: Arrays, quantization_config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, decoded; raises BadData for another method or odd shapes."""
    method = quantization_config.get("quant_method")
    if method == "bitsandbytes":
        return nf4.dequantize(tensors)
    if method == "mxfp4":
        return _pairs(tensors, BLOCKS, SCALES, decode_mxfp4)
    if method != "fp8" or quantization_config.get("fmt", "e4m3") != "e4m3":
        raise BadData(f"quantized checkpoint: {method} (expected mxfp4, or fp8 in e4m3)")
    rows, columns = quantization_config.get("weight_block_size") or BLOCK
    return _pairs(
        tensors, "", SCALE_INV, lambda codes, scale: decode_fp8(codes, scale, (rows, columns))
    )


def _pairs(
    tensors: Arrays, codes: str, scale: str, decode: Callable[..., np.ndarray]
) -> dict[str, np.ndarray]:
    """Each pair NAME{codes}, NAME{scale} as the decoded NAME, and all other tensors."""
    names = [n.removesuffix(scale) for n in tensors if n.endswith(scale)]
    decoded = {}
    for name in names:
        if name + codes not in tensors:
            raise BadData(f"model: tensor {name}{codes} is missing (expected by {name}{scale})")
        try:
            decoded[name] = decode(tensors[name + codes], tensors[name + scale])
        except (ValueError, BadData) as error:
            raise BadData(f"model: {name}: cannot be decoded ({error})") from None
    used = {name + suffix for name in names for suffix in (codes, scale)}
    return {name: x for name, x in tensors.items() if name not in used} | decoded


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 [E, 32·G, R] of blocks[E, R, G, 16] and scales[E, R, G]."""
    import ml_dtypes

    if blocks.ndim != 4 or blocks.shape != (*scales.shape, 16):
        raise BadData(f"blocks {list(blocks.shape)} with scales {list(scales.shape)}")
    experts, rows, groups = scales.shape
    out = np.empty((experts, 32 * groups, rows), ml_dtypes.bfloat16)
    for expert, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
        # 2^(scale - 127) multiplies a block of 32
        numbers = np.ldexp(E2M1.decode(unpack_fp4(block)), scale.astype(np.int32)[..., None] - 127)
        out[expert] = numbers.reshape(rows, -1).T  # [32·G, R]
    return out


def decode_fp8(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32 [O, I] of E4M3 codes[O, I] and a scale for each block."""
    # [ceil(O / b0), ceil(I / b1)]
    expected = tuple(-(-size // step) for size, step in zip(codes.shape, block, strict=True))
    if scale.shape != expected:
        raise BadData(f"scales {list(scale.shape)} (expected {list(expected)})")
    if codes.dtype.itemsize != 1:
        raise BadData(f"weight is {codes.dtype} (expected float8)")
    return decode(codes.view(np.uint8), Scales(scale), replace(SCHEMES["fp8-block"], tile=block))
