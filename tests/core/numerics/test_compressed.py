"""The stored form of quantized weights: our own round trip, and compressed-tensors as judge."""

from dataclasses import replace

import numpy as np
import pytest

from sabia.core.errors import BadData
from sabia.core.numerics import compressed, floats, integers, schemes

CONFIG = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {}}


def made(name: str, group: int | None = None, shape: tuple[int, int] = (24, 64)):
    """(weight as decoded from codes, stored parts, scheme) of random values."""
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    scheme = replace(schemes.scheme_named(name), group=group)
    if scheme.type == "float":
        scale = floats.round_bfloat16(np.abs(weight).max(1, keepdims=True) / floats.E4M3.max)
        codes = floats.E4M3.encode(weight / scale)
        return (
            floats.E4M3.decode(codes) * scale,
            compressed.encode_weight(codes, scale, scheme),
            scheme,
        )
    scale = integers.choose_scales(weight, scheme.bits, group)
    codes = integers.encode(weight, scale, scheme.bits)
    return integers.decode(codes, scale), compressed.encode_weight(codes, scale, scheme), scheme


@pytest.mark.parametrize(
    ("name", "group"),
    [("w4a16", 32), ("w4a16", None), ("w8a16", None), ("w8a8", None), ("fp8", None)],
)
def test_state_decodes_to_the_very_same_values(name: str, group: int | None) -> None:
    expected, parts, _ = made(name, group)
    tensors = {f"a.b.{part}": array for part, array in parts.items()} | {
        "a.norm.weight": np.ones(3)
    }
    decoded = compressed.dequantize(tensors, CONFIG)
    assert set(decoded) == {"a.b.weight", "a.norm.weight"}
    np.testing.assert_array_equal(decoded["a.b.weight"], expected)


def test_shapes_and_dtypes_are_those_of_the_format() -> None:
    parts = made("w4a16", 32)[1]
    assert {k: (v.dtype.str, v.shape) for k, v in parts.items()} == {
        "weight_packed": ("<i4", (24, 8)),
        "weight_scale": ("<V2", (24, 2)),
        "weight_shape": ("<i8", (2,)),
    }
    parts = made("w8a8")[1]
    assert parts["weight"].dtype == np.int8 and parts["weight_scale"].shape == (24, 1)


def test_columns_that_are_no_multiple_of_eight_are_padded() -> None:
    expected, parts, _ = made("w4a16", None, (5, 13))
    assert parts["weight_packed"].shape == (5, 2)
    np.testing.assert_array_equal(compressed.decode_weight(parts), expected)


def test_zero_points_group_index_and_blocks_are_read() -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers(-8, 8, (16, 32)).astype(np.int8)
    zero = rng.integers(-8, 8, (16, 2)).astype(np.int8)
    scale = rng.random((16, 2)).astype(np.float32)
    order = rng.integers(0, 2, 32)
    parts = {
        "weight_packed": integers.pack(codes, 4),
        "weight_scale": scale,
        "weight_shape": np.array([16, 32]),
        "weight_zero_point": np.ascontiguousarray(integers.pack(np.ascontiguousarray(zero.T), 4).T),
        "weight_g_idx": order,
    }
    expected = (codes.astype("f4") - zero[:, order]) * scale[:, order]
    np.testing.assert_array_equal(compressed.decode_weight(parts), expected)
    block = {"weight": np.ones((130, 200), np.int8), "weight_scale": np.float32([[1, 2], [3, 4]])}
    assert compressed.decode_weight(block)[[0, 0, 129, 129], [0, 199, 0, 199]].tolist() == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"format": "marlin-24"}, "marlin-24"),
    ],
)
def test_other_formats_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(BadData, match=message):
        compressed.dequantize({}, CONFIG | change)


def test_a_missing_part_names_the_module() -> None:
    with pytest.raises(BadData, match=r"x\.y: cannot decode weight_scale\[2, 1\]"):
        compressed.dequantize({"x.y.weight_scale": np.ones((2, 1), "f4")}, CONFIG)


@pytest.mark.parametrize(
    ("name", "group"), [("w4a16", 32), ("w8a16", None), ("w8a8", None), ("fp8", None)]
)
def test_the_library_decodes_the_same(name: str, group: int | None) -> None:
    reason = "compressed-tensors is the judge of the format"
    library = pytest.importorskip("compressed_tensors.compressors", reason=reason)
    torch = pytest.importorskip("torch")
    from compressed_tensors.quantization import QuantizationScheme

    expected, parts, scheme = made(name, group)
    raw = {part: a.view(np.uint8) if name == "fp8" else a for part, a in parts.items()}
    given = {part: torch.from_numpy(a) for part, a in raw.items() if part != "weight_scale"}
    given["weight_scale"] = torch.from_numpy(parts["weight_scale"].astype(np.float32))
    if name == "fp8":
        given["weight"] = given["weight"].view(torch.float8_e4m3fn)
    theirs = library.BaseCompressor.load_from_registry(scheme.format).decompress(
        given, QuantizationScheme(**scheme.config_group(["Linear"]))
    )
    np.testing.assert_array_equal(theirs["weight"].float().numpy(), expected)
