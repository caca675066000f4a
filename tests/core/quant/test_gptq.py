"""GPTQ against the textbook, column by column in NumPy, and against rounding to nearest."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.numerics.scales import (  # noqa: E402
    choose_scales,
    decode,
    encode,
    steps,
    whole_scale,
)
from sabia.core.numerics.schemes import SCHEMES, Scheme  # noqa: E402
from sabia.core.quant.gptq import GptqConfig, gptq, output_norm  # noqa: E402
from sabia.core.quant.learned import learned  # noqa: E402
from sabia.core.quant.recipe import load_recipe, with_overrides  # noqa: E402
from sabia.core.quant.rounding import store  # noqa: E402


def correlated(rows: int, columns: int, inputs: int, seed: int = 0):
    """(weight[O, I], inputs[n, I] with strong correlations between columns)."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns, columns)) * (0.9 ** np.arange(columns))[:, None]
    x = rng.standard_normal((inputs, columns)) @ mix
    return rng.standard_normal((rows, columns)).astype(np.float32), x


def hessian_of(x: np.ndarray) -> "torch.Tensor":
    return torch.from_numpy(2 / len(x) * x.T @ x)


def textbook(weight: np.ndarray, hessian: np.ndarray, config: GptqConfig):
    """Algorithm 1 without blocks, in float64: the whole remaining inverse after each column."""
    w, h = weight.astype(np.float64), hessian.copy()
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    columns = w.shape[1]
    scheme, group = config.scheme, config.scheme.group or columns
    order = np.arange(columns)
    scale = choose_scales(w.astype(np.float32), scheme, config.scale)
    step, zero = scale.stored / scale.whole, scale.zero
    if config.order == "static":
        order = np.argsort(-np.diag(h), kind="stable")
    h += np.eye(columns) * config.damping * np.diag(h).mean()
    inverse = np.linalg.inv(h)
    codes = np.zeros(w.shape, np.uint8 if scheme.element[0] == "e" else np.int8)
    for c in order:
        if config.order == "natural" and c % group == 0:
            part = w[:, c : c + group].astype(np.float32)
            chosen = choose_scales(part, scheme.with_group(None), config.scale, scale.whole)
            step[:, c // group] = chosen.stored[:, 0] / chosen.whole
            if zero is not None and chosen.zero is not None:
                zero[:, c // group] = chosen.zero[:, 0]
        s, z = step[:, c // group], 0 if zero is None else zero[:, c // group]
        codes[:, c] = scheme.codes.encode((w[:, c] / s + z).astype(np.float32))
        error = (w[:, c] - (scheme.codes.decode(codes[:, c]) - z) * s) / inverse[c, c]
        w -= np.outer(error, inverse[c])
        inverse -= np.outer(inverse[:, c], inverse[c]) / inverse[c, c]
    return codes, step


FOUR = SCHEMES["w4a16"]


@pytest.mark.parametrize("order", ["static", "natural"])
@pytest.mark.parametrize(
    ("columns", "scheme"),
    [
        (96, FOUR.with_group(32)),
        (160, FOUR.with_group(32)),
        (64, FOUR.with_group(None)),
        (256, FOUR.with_group(256)),
        (96, SCHEMES["w4a16-asym"].with_group(32)),
        (160, SCHEMES["nvfp4"]),
        (96, SCHEMES["mxfp4"]),
        (96, SCHEMES["fp8"]),
    ],
    ids=str,
)
def test_blocks_and_cholesky_give_the_textbook_codes(
    order: str, columns: int, scheme: Scheme
) -> None:
    weight, x = correlated(24, columns, 600)
    x[:, 5] = 0
    config = GptqConfig(scheme, "absmax", order)
    codes, scale = gptq(weight, hessian_of(x), config)
    theirs, their_scale = textbook(weight, hessian_of(x).numpy(), config)
    same = ((codes == theirs) | (codes % 8 == theirs % 8) & (codes % 8 == 0)).mean()  # -0 is 0
    assert same > 0.995, same  # float32 against float64: a rare tie may fall the other way
    np.testing.assert_allclose(scale.stored / scale.whole, their_scale, rtol=0.01)
    assert (decode(codes, scale, scheme)[:, 5] == 0).all()


FORMATS = [scheme for scheme in SCHEMES.values() if scheme.quantizes]
FORMATS += [SCHEMES[name].with_group(32) for name in ("w4a16", "w4a16-asym", "w8a16")]


@pytest.mark.parametrize("scheme", FORMATS, ids=lambda scheme: scheme.label())
def test_gptq_beats_rounding_to_nearest_on_correlated_inputs(scheme: Scheme) -> None:
    weight, x = correlated(48, 256, 2000, seed=1)
    h = hessian_of(x)
    scale = choose_scales(weight, scheme)
    nearest = decode(encode(weight, scale, scheme), scale, scheme)
    ours = decode(*gptq(weight, h, GptqConfig(scheme)), scheme)
    error = output_norm(ours - weight, h) / output_norm(weight, h)
    assert error < 0.6 * output_norm(nearest - weight, h) / output_norm(weight, h)
    direct = np.linalg.norm(x @ (ours - weight).T) / np.linalg.norm(x @ weight.T)
    assert error == pytest.approx(direct, rel=1e-4)


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym", "w8a8", "nvfp4a16", "mxfp4a16"])
def test_matrices_with_equal_inputs_are_rounded_together_as_alone(name: str) -> None:
    scheme, recipe = SCHEMES[name], with_overrides(load_recipe("w4"), rounding="gptq")
    h = hessian_of(correlated(1, 256, 600)[1])
    weights = [correlated(rows, 256, 1, seed=rows)[0] for rows in (40, 9, 1)]
    whole = whole_scale(max(float(np.abs(w).max()) for w in weights), scheme)
    together = store(weights, scheme, recipe, h, whole=whole)
    for weight, stored in zip(weights, together, strict=True):
        (alone,) = store([weight], scheme, recipe, h, whole=whole)
        assert stored.method == "gptq" and stored.parts.keys() == alone.parts.keys()
        assert stored.decoded.shape == weight.shape
        assert (stored.decoded == alone.decoded).mean() > 0.995  # another shape rounds otherwise
        np.testing.assert_array_equal(stored.scales.stored, alone.scales.stored)


def test_without_correlation_nothing_is_moved() -> None:
    weight = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    for scheme in FORMATS:
        if (scheme.group or 1) <= 64:
            codes, scale = gptq(weight, torch.eye(64, dtype=torch.float64), GptqConfig(scheme))
            np.testing.assert_array_equal(codes, encode(weight, scale, scheme))


def test_fewer_inputs_than_columns_are_damped() -> None:
    weight, x = correlated(8, 128, 20, seed=3)
    scheme = FOUR.with_group(64)
    assert np.isfinite(decode(*gptq(weight, hessian_of(x), GptqConfig(scheme)), scheme)).all()


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym", "mxfp4a16", "nvfp4a16"])
def test_learned_rounding_is_below_rounding_to_nearest_by_single_steps(name: str) -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((400, 64)) @ rng.standard_normal((64, 64))
    hessian = torch.from_numpy(x.T @ x / 200)
    weight = rng.standard_normal((24, 64)).astype(np.float32)
    weight[3] = 0
    scheme = SCHEMES[name]
    scheme = scheme.with_group(32) if scheme.sizes_groups else scheme
    scales = choose_scales(weight, scheme)
    nearest = decode(encode(weight, scales, scheme), scales, scheme)
    made = decode(learned(weight, hessian, scheme, scales), scales, scheme)
    assert (made != nearest).any()
    before, after = (
        (((off := decoded - weight) @ hessian.numpy()) * off).sum(1) for decoded in (nearest, made)
    )
    assert (after <= before * 1.0001 + 1e-6).all()
    assert after.sum() < 0.9 * before.sum()
    step, _ = steps(scales, scheme, weight.shape)
    assert (np.abs(made - nearest) / step).max() <= 2.001  # a step of E2M1 is up to two scales
