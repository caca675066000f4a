"""Precisions by name, the layers that stay high, the switch to BF16, and the chips' own units."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.ops import precision as p
from sabia.core.parallel.build_ops import build_ops, describe_products
from sabia.core.spec import from_config, new_config
from sabia.kernels.quantize.definitions import (
    FP8,
    FP8_GRADIENT,
    FP8_TILES,
    NVFP4,
    NVFP4_WEIGHT,
    Layout,
)
from sabia.kernels.quantize.interface import quantize

SHAPE = {"hidden": 64, "vocab": 97, "heads": 4, "kv_heads": 2, "head_dim": 16}


def spec_of(layers: int) -> Any:
    return from_config(new_config("llama", **SHAPE, layers=layers, ffn=96, context=64))


@pytest.mark.parametrize(("layers", "low"), [(4, [2]), (20, range(2, 17)), (40, range(2, 34))])
def test_nvfp4_keeps_the_first_two_layers_and_the_last_seventh(layers: int, low: Any) -> None:
    names = p.quantized_weights(spec_of(layers), p.BY_NAME["nvfp4"])
    parts = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
    assert names == {f"layers.{layer}.{part}" for layer in low for part in parts}


def test_fp8_takes_every_layer_and_bf16_none() -> None:
    assert len(p.quantized_weights(spec_of(3), p.BY_NAME["fp8"])) == 21
    assert p.quantized_weights(spec_of(3), p.BY_NAME["bf16"]) == frozenset()
    plain = build_ops("torch", spec_of(3), precision=p.BY_NAME["bf16"])
    assert plain.at(3) is plain


def test_a_recipe_that_would_round_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="2 first and 1 last of 3 layers"):
        p.quantized_weights(spec_of(3), p.BY_NAME["nvfp4"])


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="expected one of fp32, bf16, fp8, fp8-block, nvfp4"):
        p.precision_named("fp4")


def test_the_tail_is_the_decay() -> None:
    nvfp4 = p.BY_NAME["nvfp4"]
    schedule = p.PrecisionSchedule(nvfp4, steps=100, decay=20, bf16_tail=True)
    names = [p.precision_at(step, schedule).name for step in range(100)]
    assert names == ["nvfp4"] * 80 + ["bf16"] * 20
    always = replace(schedule, bf16_tail=False)
    assert {p.precision_at(step, always) for step in range(100)} == {nvfp4}
    with pytest.raises(UsageError, match="0 decay steps"):
        p.PrecisionSchedule(nvfp4, steps=100, bf16_tail=True)


def test_descriptions_say_what_computes() -> None:
    torch = pytest.importorskip("torch")
    assert describe_products(p.BY_NAME["fp8"], torch.device("cpu")) == "fp8: emulated on cpu"
    assert describe_products(p.BY_NAME["nvfp4"], "cpu") == "nvfp4: emulated on cpu"
    assert describe_products(p.BY_NAME["qat-int8"], "cpu").startswith(
        "qat-int8: weights rounded as int8"
    )
    assert describe_products(p.BY_NAME["bf16"], "cpu") == "bf16: products in bfloat16"
    jax = pytest.importorskip("jax")
    assert describe_products(p.BY_NAME["fp8"], jax.devices("cpu")[0]) == "fp8: emulated on cpu"


@pytest.mark.parametrize(
    ("layout", "capability", "cuda", "has"),
    [
        (FP8, (8, 0), "12.4", False),
        (FP8, (8, 9), "12.4", True),
        (FP8_TILES, (9, 0), "12.4", False),
        (FP8_TILES, (9, 0), "12.9", True),
        (FP8_TILES, (10, 0), "12.9", False),
        (NVFP4, (9, 0), "13.0", False),
        (NVFP4, (10, 0), "12.8", True),
    ],
)
def test_units_by_capability(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, capability: Any, cuda: str, has: bool
) -> None:
    torch = pytest.importorskip("torch")
    from sabia.core.ops.rounding_units_torch import has_units

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert has_units(layout, torch.device("cuda")) is has
    assert not has_units(layout, torch.device("cpu"))


def sides() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    a = random.standard_normal((40, 200), np.float32)
    return a, random.standard_normal((72, 200), np.float32) * np.float32(0.1)


@pytest.mark.parametrize("gradient", [False, True])
def test_fp8_units_of_torch_give_the_emulated_product(gradient: bool) -> None:
    """scaled_mm runs on CPU too, for scales of whole matrices."""
    torch = pytest.importorskip("torch")
    from sabia.core.ops.rounding_units_torch import product

    layout = FP8_GRADIENT if gradient else FP8
    given = [torch.from_numpy(side) for side in sides()]
    found = [
        product(given[0], layout, given[1], FP8, torch.float32, units=units)
        for units in (False, True)
    ]
    assert found[1].shape == (40, 72)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5 * float(found[0].abs().max()))


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("kind", ["fp8-block", "nvfp4"])
def test_operands_are_what_scaled_mm_reads(kind: str, weight: bool) -> None:
    """Its own checks of shapes, strides and dtypes, which need no chip."""
    torch = pytest.importorskip("torch")
    from sabia.core.ops.rounding_units_torch import product_by_units

    with torch.device("meta"):
        a, b = torch.empty(40, 200), torch.empty(72, 200)
    products = p.BY_NAME[kind].recipe
    assert products is not None
    right = products.weight if weight else products.activation
    out = product_by_units(a, products.activation, b, right, torch.bfloat16)
    assert out.shape == (40, 72) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (130, 5)])
def test_swizzled_scales_lie_where_cublas_looks(shape: tuple[int, int]) -> None:
    """The offset that the cuBLAS manual gives for (row, column), blocks of 128 × 4 in order."""
    torch = pytest.importorskip("torch")
    from sabia.core.ops.rounding_units_torch import swizzled_scales

    scales = np.random.default_rng(0).integers(1, 255, shape, np.uint8)
    across = -(-shape[1] // 4)
    wanted = np.zeros(-(-shape[0] // 128) * across * 512, np.uint8)
    for row in range(shape[0]):
        for column in range(shape[1]):
            block = row // 128 * across + column // 4
            offset = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            wanted[block * 512 + offset] = scales[row, column]
    np.testing.assert_array_equal(swizzled_scales(torch.from_numpy(scales)).numpy(), wanted)


@pytest.mark.parametrize("gradient", [False, True])
def test_fp8_units_of_jax_give_the_emulated_product(gradient: bool) -> None:
    jax = pytest.importorskip("jax")
    from sabia.core.ops.rounding_jax import product

    layout = FP8_GRADIENT if gradient else FP8
    a, b = (jax.numpy.asarray(side) for side in sides())
    found = [product(a, layout, b, FP8, jax.numpy.float32, units=units) for units in (False, True)]
    np.testing.assert_allclose(found[1], found[0], atol=1e-5 * float(abs(found[0]).max()))


def test_nvfp4_operands_of_jax_decode_to_the_rounded_values() -> None:
    jax = pytest.importorskip("jax")
    from sabia.core.numerics import tiles
    from sabia.core.ops.rounding_jax import _block_scaled

    for layout, side in zip((NVFP4, NVFP4_WEIGHT), sides(), strict=True):
        found = quantize(jax.numpy.asarray(side), layout, implementation="reference")
        elements, scales = _block_scaled(found, layout)
        assert elements.shape[1] % 128 == 0 and scales.shape[2] * 16 == elements.shape[2]
        values = np.asarray(elements.astype("float32"))[0]
        spread = np.repeat(np.asarray(scales.astype("float32"))[0], 16, 1)
        seen = (values * spread)[: side.shape[0], : side.shape[1]] * found.scale
        np.testing.assert_array_equal(seen, tiles.simulate(side, layout))
