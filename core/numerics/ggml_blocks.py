"""Blocks of 32 weights of a row as GGUF files hold them: Q8_0, Q4_0, MXFP4.

  Q8_0   34 bytes: the scale in F16, 32 codes int8
  Q4_0   18 bytes: the scale in F16, 16 bytes of codes + 8
  MXFP4  17 bytes: the scale, a power of two biased by 127, 16 bytes of E2M1 codes
A byte of two codes has that of weight i in its low half and that of weight i + 16 in its high half.
Values are the float32 products code · scale.
"""

import numpy as np

from sabia.core.errors import BadData
from sabia.core.numerics.floats import decode_e8m0, encode_e8m0
from sabia.core.numerics.scales import Scales, decode
from sabia.core.numerics.schemes import GGUF, Scheme

BLOCK = 32
PART = "weight_blocks"  # the suffix of the tensor in finished layers
BYTES = {"q8_0": 34, "q4_0": 18, "mxfp4": 17}


def row_bytes(scheme: Scheme, columns: int) -> int:
    """Bytes of a row."""
    return columns // BLOCK * BYTES[scheme.name]


def encode_blocks(codes: np.ndarray, scales: Scales, scheme: Scheme) -> np.ndarray:
    """Bytes [O, row_bytes] (uint8) of codes[O, I]; I is a multiple of 32."""
    rows, columns = codes.shape
    if scheme.scale == "e8m0":
        head = encode_e8m0(scales.stored)[..., None]
    else:
        head = scales.stored.astype("<f2")[..., None].view(np.uint8)  # [O, I/32, 2]
    blocks = codes.reshape(rows, columns // BLOCK, BLOCK)
    if scheme.bits == 4:
        raised = (blocks + 8 if scheme.element == "int4" else blocks).astype(np.uint8)
        blocks = raised[..., : BLOCK // 2] | raised[..., BLOCK // 2 :] << 4
    return np.concatenate([head, blocks.view(np.uint8)], -1).reshape(rows, -1)


def decode_blocks(data: np.ndarray, name: str) -> np.ndarray:
    """float32 values [O, I] of bytes[O, n] of a type of BYTES; raises BadData for other lengths."""
    scheme = next(s for s in GGUF.values() if s.name == name)
    if data.shape[-1] % BYTES[name]:
        raise BadData(f"{data.shape[-1]} bytes of a row (expected blocks of {BYTES[name]})")
    blocks = np.ascontiguousarray(data, np.uint8).reshape(len(data), -1, BYTES[name])
    size = 1 if scheme.scale == "e8m0" else 2
    head = np.ascontiguousarray(blocks[..., :size])
    body: np.ndarray = blocks[..., size:]
    stored = decode_e8m0(head[..., 0]) if size == 1 else head.view("<f2")[..., 0]
    if scheme.bits == 4:
        body = np.concatenate([body & 15, body >> 4], -1)
        body = body if scheme.element == "e2m1" else (body.astype(np.int8) - 8)
    else:
        body = np.ascontiguousarray(body).view(np.int8)
    scales = Scales(stored.astype(np.float32))
    return decode(body.reshape(len(data), -1), scales, scheme)
