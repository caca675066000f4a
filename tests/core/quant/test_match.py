"""`--match llmcompressor`: codes and scales beside its arithmetic written down in torch's BF16.

With compressed-tensors installed, beside its own functions as well.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.errors import UsageError  # noqa: E402
from sabia.core.numerics import llmcompressor  # noqa: E402
from sabia.core.numerics.floats import round_bfloat16  # noqa: E402
from sabia.core.numerics.schemes import SCHEMES, Scheme  # noqa: E402
from sabia.core.parallel.build_ops import load_ops  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.quant.recipe import load_recipe, with_overrides  # noqa: E402
from sabia.core.quant.rounding import store  # noqa: E402

NAMES = ("w4a16", "w4a16-asym", "w8a16", "w8a8", "fp8", "fp8-block", "mxfp4a16", "mxfp8a16",
         "nvfp4a16")  # fmt: skip


def matrix(seed: int, rows: int = 48, columns: int = 384) -> np.ndarray:
    """Values of many sizes, with a tile of zeros and a tile of one sign."""
    draw = np.random.default_rng(seed)
    weight = draw.standard_normal((rows, columns)) * np.exp(2 * draw.standard_normal((rows, 1)))
    weight[3, :128], weight[4, :128] = 0, np.abs(weight[4, :128])
    return round_bfloat16(weight.astype(np.float32))


def scheme_of(name: str) -> Scheme:
    scheme = SCHEMES[name]
    return scheme.with_group(128) if name.startswith("w4") else scheme


def tiles(weight: Any, scheme: Scheme) -> Any:
    """[O, groups, group], or blocks [down, across, height · width]; BF16."""
    x = torch.from_numpy(weight).bfloat16()
    if scheme.tile[0] == 1:
        return x.unflatten(1, (-1, scheme.group or x.shape[1]))
    height, width = scheme.tile
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % height))
    x = x.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    return x.permute(0, 2, 1, 3).flatten(2)


def parameters(weight: np.ndarray, scheme: Scheme) -> tuple[Any, Any, Any]:
    """(scales, zero points, scale of the matrix) in the steps of `calculate_qparams`."""
    x = tiles(weight, scheme)
    low, high = (
        f(torch.zeros((), dtype=x.dtype)) for f in (x.amin(-1).minimum, x.amax(-1).maximum)
    )
    largest, whole, zero = torch.maximum(-low, high), None, None
    if scheme.scale == "e8m0":
        shifted = (largest.view(torch.uint16).to(torch.int32) + 32) & 0xFF80
        exponent = torch.floor(torch.log2(shifted.to(torch.uint16).view(torch.bfloat16)))
        code = (127 + exponent - {4: 2, 8: 8}[scheme.bits]).clamp(0, 255).round()
        return 2.0 ** (code.float() - 127), None, None
    if not scheme.symmetric:
        scale = (high - low) / torch.tensor(15.0)
        scale = torch.where(scale == 0, 2.0**-7, scale)
        zero = torch.clamp(torch.tensor(-8.0) - low / scale, -8, 7).round().to(torch.int8)
        return scale, zero, None
    top = {"int4": 7.5, "int8": 127.5, "e4m3": 448.0, "e2m1": 6.0}[scheme.element]
    scale = largest / torch.tensor(top).bfloat16()
    if scheme.scale == "e4m3":
        whole = (448.0 * 6.0 / largest.max()).float()
        scale = (whole * scale.float()).to(torch.float8_e4m3fn).float()
        return torch.where(scale == 0, 0.125, scale), None, whole
    return torch.where(scale == 0, 2.0**-7, scale), None, None


def codes_of(weight: np.ndarray, scheme: Scheme, scale: Any, zero: Any, whole: Any) -> Any:
    """The codes' values by tile, in the steps of `_quantize`."""
    step = scale if whole is None else scale / whole
    scaled = tiles(weight, scheme) / step[..., None]
    if scheme.scale != "e4m3":
        scaled = scaled.bfloat16()
    if zero is not None:
        scaled = scaled + zero[..., None].to(scaled.dtype)
    if scheme.element.startswith("int"):
        half = 2 ** (scheme.bits - 1)
        return scaled.clamp(-half, half - 1).round()
    if scheme.bits == 8:
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = torch.tensor([True, False, True, False, True, False, True])  # ties go down
    size = scaled.abs().float()[..., None]
    code = torch.where(even, size > ends, size >= ends).sum(-1)
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])[code] * torch.where(scaled < 0, -1, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_codes_and_scales_are_those_of_its_arithmetic(name: str, seed: int) -> None:
    weight, scheme = matrix(seed), scheme_of(name)
    (stored,) = store([weight], scheme, with_overrides(load_recipe(name), match="llmcompressor"))
    scale, zero, whole = parameters(weight, scheme)
    np.testing.assert_array_equal(stored.scales.stored, scale.float().numpy())
    if zero is not None:
        np.testing.assert_array_equal(stored.scales.zero, zero.numpy())
    if whole is not None:
        assert stored.scales.whole == np.float32(whole)
    codes, _ = llmcompressor.rounded(weight, scheme, stored.scales.whole)
    made = torch.from_numpy(scheme.codes.decode(codes))
    expected = codes_of(weight, scheme, scale, zero, whole).float()
    torch.testing.assert_close(tiles(made.numpy(), scheme).float(), expected, rtol=0, atol=0)
    (plain,) = store(
        [weight], scheme, with_overrides(load_recipe(name), rounding="rtn", scale="absmax")
    )
    assert not all(np.array_equal(a.view(np.uint8), plain.parts[n].view(np.uint8))
                   for n, a in stored.parts.items())  # fmt: skip


def test_matrices_that_servers_join_share_a_scale(tiny: Any) -> None:
    spec, params = tiny
    made = quantize(spec, params, with_overrides(load_recipe("nvfp4a16"), match="llmcompressor"),
                    load_ops("torch"))  # fmt: skip
    wholes = {name: made.stored[f"layers.0.attn.{name}", None].scales.whole for name in "qkv"}
    peaks = {n: np.abs(round_bfloat16(params[f"layers.0.attn.{n}"])).max() for n in "qkv"}
    each = {n: llmcompressor.whole_scale(float(peak)) for n, peak in peaks.items()}
    assert set(wholes.values()) == {min(each.values())} and len(set(each.values())) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounding": "gptq"}, "its rounding to nearest is reproduced, not gptq"),
        ({"smooth": "awq"}, "not auto with smooth awq"),
        ({"container": "gguf"}, "writes no gguf"),
        ({"components": {"mlp": "nvfp4"}}, "format nvfp4 stores scales of inputs"),
        ({"match": "other"}, "match is 'other'"),
    ],
)
def test_what_is_not_reproduced_is_refused(changes: dict, message: str) -> None:
    recipe = replace(load_recipe("w4"), components=changes.pop("components", {"mlp": "w4a16"}))
    with pytest.raises(UsageError, match=message):
        with_overrides(recipe, **{"match": "llmcompressor"} | changes)


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym", "w8a8", "fp8", "mxfp4a16", "nvfp4a16"])
def test_codes_and_scales_beside_the_library(name: str) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    weight, scheme = matrix(7), scheme_of(name)
    (stored,) = store([weight], scheme, with_overrides(load_recipe(name), match="llmcompressor"))
    arguments = library.QuantizationArgs(**scheme.config_group(["Linear"])["weights"])
    x = tiles(weight, scheme)
    whole = None
    if scheme.scale == "e4m3":
        whole = helpers.generate_gparam(-x.abs().max().reshape(1), x.abs().max().reshape(1))
    scale, zero = helpers.calculate_qparams(x.amin(-1), x.amax(-1), arguments, whole)
    np.testing.assert_array_equal(stored.scales.stored, scale.float().numpy())
    if not scheme.symmetric:
        some = (x != 0).any(-1).numpy()  # of zeros alone it converts NaN, as the machine does
        np.testing.assert_array_equal(stored.scales.zero[some], zero.numpy()[some])
