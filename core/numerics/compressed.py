"""Encoding and decoding of weights in the compressed-tensors format.

A quantized Linear named M of O outputs and I inputs is stored as
  pack-quantized         M.weight_packed I32 [O, I·bits/32], M.weight_shape I64 [2], and if
                         asymmetric M.weight_zero_point (packed along O); M.weight_g_idx [I] in
                         files of others: the group of each column
  int-quantized          M.weight I8 [O, I]
  float-quantized        M.weight F8_E4M3 [O, I], as in
  mxfp8-quantized
  nvfp4-pack-quantized   M.weight_packed U8 [O, I/2], the even columns in the low halves, as in
  mxfp4-pack-quantized
with M.weight_scale for each tensor [1], row [O, 1], group of columns [O, groups], or block: BF16,
E4M3 (nvfp4, next to M.weight_global_scale F32 [1], by which they are divided), or U8 powers of two
biased by 127 (mxfp4, mxfp8). Static scales of the inputs are M.input_scale BF16 [1], or
M.input_global_scale F32 [1]. Which form a module has is looked up in the configuration.
Values are the float32 products (code - zero point) · scale.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.numerics import integers
from sabia.core.numerics.floats import decode_e8m0, encode_e8m0, numpy_dtype
from sabia.core.numerics.scales import Scales, decode
from sabia.core.numerics.schemes import Scheme, group_of, read_scheme
from sabia.core.numerics.tile_slices import shape_of, whole_tiles
from sabia.core.numerics.tiles import pack_fp4, unpack_fp4

PARTS: tuple[str, ...] = ("weight", "weight_packed", "weight_scale", "weight_shape")
PARTS += ("weight_zero_point", "weight_g_idx", "weight_global_scale")
STATIC_SCALES = "input_scales"  # key of a `quantization_config` in memory: `input_scales`
INPUT_SCALES = ("input_scale", "input_global_scale")
IGNORED = (*INPUT_SCALES, "input_zero_point", "output_scale", "output_zero_point")
Parts = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Form:
    """How the codes of a format are stored.

    part: suffix of their tensor. dtype: of the tensor; words: how many of it hold a row of so many
    columns and bits. pack, unpack: from and to codes, for bits and columns.
    """

    part: str
    dtype: str
    words: Callable[[int, int], int]
    pack: Callable[[np.ndarray, int], np.ndarray]
    unpack: Callable[[np.ndarray, int, int], np.ndarray]


def _plain(dtype: str) -> Form:
    stored = numpy_dtype(dtype)

    def unpack(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
        if words.dtype.itemsize != 1 or (words.dtype == np.int8) != (dtype == "int8"):
            raise BadData(f"weight is {words.dtype} (expected {dtype})")
        return words if dtype == "int8" else words.view(np.uint8)

    return Form("weight", dtype, lambda columns, _: columns, lambda q, _: q.view(stored), unpack)


_PACKED = Form(
    "weight_packed",
    "int32",
    lambda columns, bits: -(-columns * bits // 32),
    integers.pack,
    integers.unpack,
)
_FP4 = Form(
    "weight_packed",
    "uint8",
    lambda columns, _: -(-columns // 2),
    lambda q, _: pack_fp4(q),
    lambda words, _, columns: unpack_fp4(words),
)
FORMS = {
    "pack-quantized": _PACKED,
    "int-quantized": _plain("int8"),
    "float-quantized": _plain("float8_e4m3fn"),
    "mxfp8-quantized": _plain("float8_e4m3fn"),
    "nvfp4-pack-quantized": _FP4,
    "mxfp4-pack-quantized": _FP4,
}
FORMATS = (*FORMS, "naive-quantized", "mixed-precision", "dense")
_SCALES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e8m0": "uint8"}


def _form(scheme: Scheme) -> Form:
    if scheme.format == "naive-quantized":
        return _plain("int8" if scheme.element.startswith("int") else "float8_e4m3fn")
    if scheme.format not in FORMS:
        raise BadData(f"format {scheme.format} (expected one of {', '.join(FORMS)})")
    return FORMS[scheme.format]


def layout(scheme: Scheme, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of each stored part of a matrix, by suffix."""
    form, tiles = _form(scheme), scheme.tiles(rows, columns)
    packed = form is _PACKED
    parts: dict[str, tuple[tuple[int, ...], str]] = {
        "weight_scale": ((1,) if scheme.strategy == "tensor" else tiles, _SCALES[scheme.scale]),
        form.part: ((rows, form.words(columns, scheme.bits)), form.dtype),
    }
    if packed:
        parts["weight_shape"] = (2,), "int64"
    if not scheme.symmetric:
        zero = (form.words(rows, scheme.bits), tiles[1]) if packed else tiles
        parts["weight_zero_point"] = zero, form.dtype
    if scheme.scale == "e4m3":
        parts["weight_global_scale"] = (1,), "float32"
    if scheme.inputs and scheme.inputs.part:
        parts[scheme.inputs.part] = (1,), input_dtype(scheme.inputs.part)
    return parts


def input_dtype(part: str) -> str:
    """The dtype of a static scale of the inputs."""
    return "bfloat16" if part == "input_scale" else "float32"


def stored_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Bytes of a quantized matrix in the files."""
    parts = layout(scheme, rows, columns).values()
    return sum(math.prod(shape) * numpy_dtype(dtype).itemsize for shape, dtype in parts)


def encode_weight(codes: np.ndarray, scales: Scales, scheme: Scheme) -> dict[str, np.ndarray]:
    """The stored parts of a weight, by suffix, without those of the inputs.

    codes[O, I] are int8, or uint8 of floats. Parts that are BF16 or E4M3 in the file have that
    dtype of ml_dtypes.
    """
    form, expected = _form(scheme), layout(scheme, *codes.shape)
    shape, dtype = expected["weight_scale"]
    stored = encode_e8m0(scales.stored) if scheme.scale == "e8m0" else scales.stored
    parts = {"weight_scale": stored.astype(numpy_dtype(dtype)).reshape(shape)}
    parts[form.part] = form.pack(codes, scheme.bits)
    if "weight_shape" in expected:
        parts["weight_shape"] = np.array(codes.shape, np.int64)
    if scales.zero is not None:
        zero = scales.zero
        if form is _PACKED:  # zero points are packed along O
            zero = form.pack(np.ascontiguousarray(zero.T), scheme.bits).T
        parts["weight_zero_point"] = np.ascontiguousarray(zero)
    if "weight_global_scale" in expected:
        parts["weight_global_scale"] = np.array([scales.whole], np.float32)
    return parts


def decode_weight(parts: Parts, scheme: Scheme) -> np.ndarray:
    """weight[O, I] (float32) of its stored parts; raises BadData for parts that do not fit."""
    form = _form(scheme)
    words = parts[form.part]
    rows, columns = len(words), words.shape[1]
    if form is _PACKED:
        rows, columns = (int(size) for size in parts["weight_shape"])
    elif form is _FP4:
        columns *= 2
    expected = layout(scheme, rows, columns)
    if words.shape != expected[form.part][0]:
        raise BadData(f"{list(words.shape)} words for a weight [{rows}, {columns}]")
    codes = form.unpack(words, scheme.bits, columns)
    order = parts.get("weight_g_idx")
    if scheme.group and order is None and columns % scheme.group:
        raise BadData(f"groups of {scheme.group} do not divide {columns} columns")
    scales = stored_scales(parts, scheme, (rows, columns))
    if order is None:
        return decode(codes, scales, scheme)
    of_column = Scales(  # one group of one column each
        scales.stored[:, order],
        None if scales.zero is None else scales.zero[:, order],
        scales.whole,
    )
    return decode(codes, of_column, scheme.with_group(1))


def part_of(
    parts: Parts, scheme: Scheme, shape: tuple[int, int], part: tuple[slice, slice]
) -> tuple[Parts, Scheme, tuple[int, int]]:
    """The stored parts of weight[rows, columns], with the format and their shape. ValueError where
    these cut tiles, or words of several codes."""
    form = _form(scheme)
    words, (rows, columns) = parts[form.part], shape_of(part, shape)
    in_word = words.itemsize * 8 // scheme.bits
    kept = {**parts, form.part: words[whole_tiles(part, shape, (1, in_word))]}
    tiles = whole_tiles(part, shape, scheme.tile)
    kept["weight_scale"] = parts["weight_scale"].reshape(scheme.tiles(*shape))[tiles]
    if not scheme.symmetric:
        zero = parts["weight_zero_point"]
        if form is _PACKED and scheme.strategy != "tensor":  # along O
            kept["weight_zero_point"] = zero[whole_tiles(part, shape, (in_word, scheme.tile[1]))]
        else:
            kept["weight_zero_point"] = zero.reshape(scheme.tiles(*shape))[tiles]
    if "weight_shape" in parts:
        kept["weight_shape"] = np.array((rows, columns), np.int64)
    return kept, scheme, (rows, columns)


def stored_codes(parts: Parts, scheme: Scheme) -> np.ndarray:
    """The tensor of the stored codes."""
    return parts[_form(scheme).part]


def stored_scales(parts: Parts, scheme: Scheme, shape: tuple[int, int]) -> Scales:
    """The scales of a matrix of this shape; raises BadData for parts that do not fit."""
    form, tiles = _form(scheme), scheme.tiles(*shape)
    zero = None if scheme.symmetric else parts["weight_zero_point"]
    if zero is not None and form is _PACKED and scheme.strategy != "tensor":
        zero = form.unpack(np.ascontiguousarray(zero.T), scheme.bits, shape[0]).T
    whole = parts["weight_global_scale"].item() if scheme.scale == "e4m3" else 1
    return Scales(
        _fitting(_scale(parts["weight_scale"], scheme), tiles),
        None if zero is None else _fitting(zero, tiles),
        np.float32(whole),
    )


def _fitting(values: np.ndarray, tiles: tuple[int, int]) -> np.ndarray:
    if values.size != math.prod(tiles):
        raise BadData(f"scales {list(values.shape)} (expected {list(tiles)})")
    return values.reshape(tiles)


def _scale(scale: np.ndarray, scheme: Scheme) -> np.ndarray:
    """float32 values of stored scales; BF16 may be raw uint16, E4M3 raw uint8."""
    if scheme.scale == "e8m0":
        return decode_e8m0(scale.view(np.uint8))
    raw = numpy_dtype(_SCALES[scheme.scale])
    unsigned = scale.dtype.kind == "u" and scale.dtype.itemsize == raw.itemsize
    return (scale.view(raw) if unsigned else scale).astype(np.float32)


def dequantize(tensors: Parts, quantization_config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint with every quantized weight as float32 under `NAME.weight`.

    float8 arrays may be of a float8 dtype or raw uint8; BF16 scales of a bfloat16 dtype or raw
    uint16. Raises BadData for a format that is not one of FORMATS, for missing parts, and for
    scales of a module that the configuration does not quantize.
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
    for module in modules:
        parts = parts_of(module, tensors)
        try:
            decoded[f"{module}.weight"] = decode_weight(parts, scheme_of(module, config))
        except (KeyError, ValueError, IndexError, BadData) as error:
            shapes = ", ".join(f"{name}{list(part.shape)}" for name, part in parts.items())
            raise BadData(f"{module}: cannot decode {shapes} ({error})") from error
    return decoded


def parts_of(module: str, tensors: Parts) -> dict[str, np.ndarray]:
    """The stored parts of a module's weight, by their names without the module's."""
    return {p: tensors[f"{module}.{p}"] for p in PARTS if f"{module}.{p}" in tensors}


def scheme_of(module: str, config: Mapping[str, Any]) -> Scheme:
    """The format of a module; BadData if the configuration does not quantize it."""
    group = group_of(config, module)
    if group is None or group.get("weights") is None:
        raise BadData("the configuration quantizes no module of this name")
    return read_scheme(group, str(config.get("format")))


def input_scales(tensors: Parts) -> dict[str, float]:
    """The static scales of inputs by module: how far one step of codes is; of NVFP4, that of all
    groups."""
    scales = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in INPUT_SCALES:
            scales[module] = float(np.asarray(tensor, np.float32).max())
    return scales
