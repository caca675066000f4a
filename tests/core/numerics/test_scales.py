"""Scales and codes of every format against plain loops, and their least squared error."""

from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.numerics import floats, scales
from sabia.core.numerics.integers import code_range
from sabia.core.numerics.scales import choose_scales, decode, encode, whole_scale
from sabia.core.numerics.schemes import SCHEMES, Scheme

FORMATS = [scheme for scheme in SCHEMES.values() if scheme.quantizes]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def four(group: int | None, bits: int = 4) -> Scheme:
    return SCHEMES["w4a16" if bits == 4 else "w8a16"].with_group(group)


def plain(weight: np.ndarray, scheme: Scheme, chosen: scales.Scales) -> np.ndarray:
    """The decoded matrix, element by element, from the definition of each element and tile."""
    rows, columns = weight.shape
    out = np.empty_like(weight)
    height, width = (size or whole for size, whole in zip(scheme.tile, weight.shape, strict=True))
    values = {
        "e2m1": np.array([*E2M1, *(-np.array(E2M1))], np.float32),
        "e4m3": floats.E4M3.table[np.isfinite(floats.E4M3.table)],
    }.get(scheme.element)
    for i in range(rows):
        for j in range(columns):
            at = (i // height, j // width)
            step = chosen.stored[at] / chosen.whole
            zero = 0 if chosen.zero is None else int(chosen.zero[at])
            if values is None:
                code = int(np.clip(np.rint(weight[i, j] / step + zero), *code_range(scheme.bits)))
                out[i, j] = np.float32(code - zero) * step
            else:
                distance = np.abs(values.astype(np.float64) - float(weight[i, j] / step))
                out[i, j] = values[np.flatnonzero(distance == distance.min())[0]] * step
    return out


@pytest.mark.parametrize("scheme", FORMATS, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("method", ["mse", "absmax"])
def test_codes_are_the_nearest_values(scheme: Scheme, method: Any) -> None:
    draw = np.random.default_rng(len(scheme.name))
    weight = (draw.standard_normal((5, 256)) * 10.0 ** draw.integers(-3, 3, (5, 1))).astype("f4")
    weight[:, 32:64] = 0  # a group of zeros
    chosen = choose_scales(weight, scheme, method)
    decoded = decode(encode(weight, chosen, scheme), chosen, scheme)
    np.testing.assert_array_equal(decoded, plain(weight, scheme, chosen))
    assert (decoded[:, 32:64] == 0).all()
    assert chosen.stored.shape == scheme.tiles(5, 256)


@pytest.mark.parametrize("scheme", FORMATS, ids=lambda scheme: scheme.name)
def test_a_search_is_never_worse_and_clips_where_it_pays(scheme: Scheme) -> None:
    weight = np.random.default_rng(2).standard_t(3, (64, 256)).astype(np.float32)

    def error(method: Any) -> float:
        chosen = choose_scales(weight, scheme, method)
        return float(((decode(encode(weight, chosen, scheme), chosen, scheme) - weight) ** 2).sum())

    if not scheme.searches:
        assert error("mse") == error("absmax")
    else:
        assert error("mse") < (0.97 if scheme.bits == 4 else 1) * error("absmax")


@pytest.mark.parametrize("bits", [4, 8])
def test_absmax_scales_clip_nothing_and_are_bfloat16(bits: int) -> None:
    weight = np.random.default_rng(1).standard_normal((16, 128)).astype(np.float32)
    scheme = four(32, bits)
    chosen = choose_scales(weight, scheme, "absmax")
    assert chosen.stored.shape == (16, 4)
    np.testing.assert_array_equal(chosen.stored, floats.round_bfloat16(chosen.stored))
    error = np.abs(decode(encode(weight, chosen, scheme), chosen, scheme) - weight)
    # half a step, and what rounding the scale to BF16 (at most 2^-9) cuts off the largest value
    bound = np.repeat(chosen.stored, 32, 1) * (0.5 + code_range(bits)[1] * 2**-8)
    assert (error <= bound).all()


def test_zero_points_use_the_whole_range_of_weights_of_one_sign() -> None:
    weight = np.random.default_rng(5).random((8, 128)).astype(np.float32)
    errors = []
    for name in ("w4a16", "w4a16-asym"):
        chosen = choose_scales(weight, SCHEMES[name], "absmax")
        made = decode(encode(weight, chosen, SCHEMES[name]), chosen, SCHEMES[name])
        errors.append(np.abs(made - weight).max())
    assert errors[1] < 0.6 * errors[0]  # 15 steps instead of 7


def test_the_whole_of_several_matrices_is_that_of_the_largest() -> None:
    scheme = SCHEMES["nvfp4a16"]
    assert whole_scale(0.0, scheme) == 1 and whole_scale(1e-45, scheme) == 1
    assert whole_scale(3.0, scheme) == np.float32(896) and whole_scale(3.0, four(32)) == 1
    weight = np.random.default_rng(6).standard_normal((4, 64)).astype(np.float32)
    large = choose_scales(weight, scheme, "absmax")
    assert large.stored.max() == 448
    assert choose_scales(weight, scheme, "absmax", large.whole / 4).stored.max() == 112


def test_mx_scales_are_powers_of_two() -> None:
    weight = np.array([[3.1] + [0.0] * 31, [6.1] + [1.5] * 31], np.float32)
    chosen = choose_scales(weight, SCHEMES["mxfp4a16"], "absmax")
    assert chosen.stored.tolist() == [[1.0], [2.0]]  # 3.1 / 6 and 6.1 / 6, up to a power of two
    # clipping 6.1 to 6 makes 1.5 exact
    assert choose_scales(weight, SCHEMES["mxfp4a16"]).stored.tolist() == [[1.0], [1.0]]


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)
    whole = choose_scales(weight, four(32))
    monkeypatch.setattr(scales, "_CHUNK_ELEMENTS", 64 * 7)
    np.testing.assert_array_equal(choose_scales(weight, four(32)).stored, whole.stored)


def test_a_group_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"128 does not divide 96 columns; groups of 32 fit"):
        choose_scales(np.ones((2, 96), np.float32), four(128))
