"""The stored form of quantized weights: our own round trip, and compressed-tensors as judge."""

from typing import Any

import numpy as np
import pytest

from sabia.core.errors import BadData
from sabia.core.numerics import compressed, integers
from sabia.core.numerics.floats import round_bfloat16
from sabia.core.numerics.scales import choose_scales, decode, encode
from sabia.core.numerics.schemes import SCHEMES, Scheme, group_of, quantization_config

FORMATS = [scheme for scheme in SCHEMES.values() if scheme.quantizes]
FORMATS += [SCHEMES["w4a16"].with_group(None), SCHEMES["w4a16-asym"].with_group(32)]
EACH = pytest.mark.parametrize("scheme", FORMATS, ids=lambda scheme: scheme.label())


def made(scheme: Scheme, shape: tuple[int, int] = (24, 256)):
    """(weight as decoded from codes, stored parts) of random values."""
    draw = np.random.default_rng(0)
    weight = (draw.standard_normal(shape) * np.exp(draw.standard_normal(shape[1]))).astype("f4")
    weight[-1, :32] = 0
    chosen = choose_scales(weight, scheme)
    codes = encode(weight, chosen, scheme)
    return decode(codes, chosen, scheme), compressed.encode_weight(codes, chosen, scheme)


def config(scheme: Scheme, *targets: str) -> dict[str, Any]:
    return quantization_config({scheme: list(targets) or ["Linear"]}, [])


@EACH
@pytest.mark.parametrize("shape", [(24, 256), (130, 384), (1, 128)])
def test_state_decodes_to_the_very_same_values(scheme: Scheme, shape: tuple[int, int]) -> None:
    expected, parts = made(scheme, shape)
    tensors = {f"a.b.{part}": array for part, array in parts.items()}
    tensors |= {"a.norm.weight": np.ones(3), "a.b.input_scale": np.ones(1)}
    decoded = compressed.dequantize(tensors, config(scheme))
    assert set(decoded) == {"a.b.weight", "a.norm.weight"}
    np.testing.assert_array_equal(decoded["a.b.weight"], expected)


@EACH
def test_the_layout_is_what_is_stored(scheme: Scheme) -> None:
    parts, expected = made(scheme, (24, 384))[1], compressed.layout(scheme, 24, 384)
    inputs = {scheme.inputs.part} if scheme.inputs else set()
    assert set(parts) == expected.keys() - inputs
    for name, array in parts.items():
        assert (array.shape, array.dtype.name) == expected[name], name
    size = sum(array.nbytes for array in parts.values())
    stored_inputs = {"input_scale": 2, "input_global_scale": 4}
    extra = sum(stored_inputs[name] for name in inputs if name)
    assert compressed.stored_bytes(scheme, 24, 384) == size + extra


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 13])
@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
def test_few_columns_are_read_by_the_bits_of_the_configuration(name: str, columns: int) -> None:
    scheme = SCHEMES[name].with_group(None)
    expected, parts = made(scheme, (5, columns))
    assert parts["weight_packed"].shape == (5, -(-columns * scheme.bits // 32))
    tensors = {f"m.{part}": array for part, array in parts.items()}
    decoded = compressed.dequantize(tensors, config(scheme))["m.weight"]
    np.testing.assert_array_equal(decoded, expected)


def test_each_module_is_read_by_its_own_group() -> None:
    """Two block sizes and a row format in one file, whose scales may have the same shapes."""
    plans = {"a.x": SCHEMES["fp8-block"], "b.y": SCHEMES["fp8"], "b.z": SCHEMES["mxfp8a16"]}
    plans["c.w"] = Scheme("small", "e4m3", "float-quantized", (64, 32))
    tensors, expected = {}, {}
    for module, scheme in plans.items():
        expected[f"{module}.weight"], parts = made(scheme, (130, 256))
        tensors |= {f"{module}.{part}": array for part, array in parts.items()}
    groups = {scheme: [f"re:{m}$"] for m, scheme in plans.items() if m != "b.y"}
    written = quantization_config(groups | {plans["b.y"]: ["Linear"]}, [])
    decoded = compressed.dequantize(tensors, written)
    for name, weight in expected.items():
        np.testing.assert_array_equal(decoded[name], weight, err_msg=name)
    assert group_of(written, "b.y")["format"] == "float-quantized"  # type: ignore[index]
    assert group_of({**written, "ignore": ["b.y"]}, "b.y") is None
    with pytest.raises(BadData, match=r"b\.y: .* quantizes no module of this name"):
        compressed.dequantize(tensors, {**written, "ignore": ["b.y"]})


@pytest.mark.parametrize("name", ["w8a8", "fp8", "fp8-block", "fp8-static"])
def test_the_general_name_of_plain_codes_is_read(name: str) -> None:
    expected, parts = made(SCHEMES[name])
    written = config(SCHEMES[name]) | {"format": "naive-quantized"}
    del written["config_groups"]["group_0"]["format"]  # as older versions wrote it
    decoded = compressed.dequantize({f"m.{k}": v for k, v in parts.items()}, written)
    np.testing.assert_array_equal(decoded["m.weight"], expected)


def test_zero_points_and_group_index_are_read() -> None:
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
    scheme = SCHEMES["w4a16-asym"].with_group(16)
    np.testing.assert_array_equal(compressed.decode_weight(parts, scheme), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"format": "marlin-24"}, "marlin-24"),
    ],
)
def test_other_formats_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(BadData, match=message):
        compressed.dequantize({}, config(SCHEMES["w8a16"]) | change)


@EACH
def test_damaged_parts_name_the_module(scheme: Scheme) -> None:
    parts = made(scheme)[1]
    for name, array in parts.items():
        rest = {f"x.y.{k}": v for k, v in parts.items() if k != name}
        if name != "weight_scale":  # without it the module is not quantized
            with pytest.raises(BadData, match=r"x\.y: cannot decode"):
                compressed.dequantize(rest, config(scheme))
        if name not in ("weight_global_scale", "weight_shape"):
            with pytest.raises(BadData, match=r"x\.y: cannot decode"):
                compressed.dequantize(rest | {f"x.y.{name}": array[:0]}, config(scheme))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"num_bits": 3}, "int3 by group"), ({"strategy": "attn_head"}, "int4 by attn_head")],
)
def test_arguments_that_are_not_read(arguments: dict, message: str) -> None:
    scheme = SCHEMES["w4a16"]
    given = config(scheme)
    given["config_groups"]["group_0"]["weights"] |= arguments
    tensors = {f"x.{part}": array for part, array in made(scheme)[1].items()}
    with pytest.raises(BadData, match=message):
        compressed.dequantize(tensors, given)


def library() -> Any:
    reason = "compressed-tensors is the judge of the format"
    return pytest.importorskip("compressed_tensors.compressors", reason=reason)


def compressor(scheme: Scheme) -> Any:
    return library().BaseCompressor.load_from_registry(scheme.format)


def tensor(array: np.ndarray) -> Any:
    """A torch tensor with the bytes of an array."""
    import torch

    dtype = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    if array.dtype.name not in dtype:
        return torch.from_numpy(np.array(array))
    raw = np.array(array.view(np.uint16 if array.itemsize == 2 else np.uint8))
    return torch.from_numpy(raw).view(dtype[array.dtype.name])


@EACH
def test_the_library_decodes_the_same(scheme: Scheme) -> None:
    judge = compressor(scheme)
    from compressed_tensors.quantization import QuantizationScheme

    expected, parts = made(scheme, (136, 256))
    given = {part: tensor(array) for part, array in parts.items()}
    rule = QuantizationScheme(**scheme.config_group(["Linear"]))
    theirs = judge.decompress(dict(given), rule)["weight"]  # in bfloat16
    np.testing.assert_array_equal(theirs.float().numpy(), round_bfloat16(expected))
    if scheme.element.startswith("int"):  # the formats that it also decodes in float32
        given["weight_scale"] = given["weight_scale"].float()
        theirs = judge.decompress(given, rule)["weight"]
        np.testing.assert_array_equal(theirs.numpy(), expected)


@EACH
def test_what_the_library_writes_is_read(scheme: Scheme) -> None:
    """Its own scales, packing and configuration, of a matrix that it quantizes."""
    judge = compressor(scheme)
    import torch
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    rule = QuantizationScheme(**scheme.config_group(["Linear"]))
    weight = torch.randn(136, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows, columns = scheme.tiles(*weight.shape)
    height, width = (size or n for size, n in zip(scheme.tile, weight.shape, strict=True))
    padded = torch.zeros(rows * height, columns * width).bfloat16()
    padded[: len(weight)] = weight
    tiles = padded.reshape(rows, height, columns, width)
    low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    whole = generate_gparam(low.min(), high.max()) if scheme.scale == "e4m3" else None
    scale, zero = calculate_qparams(low, high, rule.weights, whole)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        state["weight_global_scale"] = whole
    if scheme.strategy == "tensor":
        state["weight_scale"] = scale.reshape(1)
    state = judge.compress(state, rule)
    theirs = judge.decompress(dict(state), rule)["weight"].float().numpy()
    whole_config = QuantizationConfig(config_groups={"group_0": rule}, format=scheme.format)
    written = whole_config.model_dump(mode="json")

    def array(x: Any) -> np.ndarray:
        import ml_dtypes

        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.view(torch.uint8).numpy() if x.dtype.itemsize == 1 and x.is_floating_point() \
            else x.numpy()  # fmt: skip

    tensors = {f"m.{name}": array(x) for name, x in state.items()}
    found = compressed.dequantize(tensors, {**written, "quant_method": "compressed-tensors"})
    np.testing.assert_array_equal(round_bfloat16(found["m.weight"]), theirs)
