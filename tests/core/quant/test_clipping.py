"""AWQ's scales against plain loops, and its divergence on a trained model beside nearest."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.numerics.scales import candidates, choose_scales, decode, encode  # noqa: E402
from sabia.core.numerics.schemes import SCHEMES, Scheme  # noqa: E402
from sabia.core.parallel.build_ops import load_ops  # noqa: E402
from sabia.core.quant.clipping import clipped  # noqa: E402
from sabia.core.quant.divergence import divergence  # noqa: E402
from sabia.core.quant.hessians import batches  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.quant.recipe import Recipe, load_recipe, with_overrides  # noqa: E402
from sabia.core.quant.rounding import store  # noqa: E402
from sabia.core.spec import from_config, new_config  # noqa: E402
from sabia.core.train.losses.next_token import next_token_loss  # noqa: E402
from sabia.core.train.stepper_factory import make_stepper  # noqa: E402

OPS = load_ops("torch")
FORMATS = ("w4a16", "w4a16-asym", "mxfp4a16", "nvfp4a16")
GROUPED = [x.with_group(32) if x.sizes_groups else x for x in (SCHEMES[name] for name in FORMATS)]


def inputs(columns: int) -> np.ndarray:
    """Inputs [400, columns] that are correlated and of uneven size."""
    draw = np.random.default_rng(4)
    x = draw.standard_normal((400, columns)) @ draw.standard_normal((columns, columns))
    return (x * np.exp(draw.standard_normal(columns)) + 2).astype(np.float32)


def rounded(row: np.ndarray, step: float, zero: float, scheme: Scheme) -> np.ndarray:
    return (scheme.codes.round(row / step + zero) - zero) * step


@pytest.mark.parametrize("scheme", GROUPED, ids=lambda scheme: scheme.name)
def test_each_group_takes_the_best_scale_beside_the_others(scheme: Scheme) -> None:
    """By a loop over rows and groups, with the outputs computed from the inputs themselves."""
    weight = np.random.default_rng(3).standard_t(4, (6, 128)).astype(np.float32)
    x, width = inputs(128), scheme.group or 128
    chosen = clipped(weight, torch.from_numpy(x.T @ x), scheme)
    start = choose_scales(weight, scheme)
    expected = decode(encode(weight, start, scheme), start, scheme)
    for group in range(128 // width):
        here = slice(group * width, (group + 1) * width)
        tried = [*candidates(weight[:, None, here], scheme, "mse", start.whole)]
        for i, row in enumerate(weight):
            made = [expected[i].copy() for _ in range(len(tried) + 1)]
            for one, (step, zero) in zip(made[1:], tried, strict=True):
                one[here] = rounded(row[here], step[i, 0] / start.whole, zero[i, 0], scheme)
            errors = [float(np.square((x @ (one - row)).astype(np.float64)).sum()) for one in made]
            expected[i] = made[int(np.argmin(errors))]
    found = decode(encode(weight, chosen, scheme), chosen, scheme)

    def error(decoded: np.ndarray) -> np.ndarray:
        return np.square((decoded - weight).astype(np.float64) @ x.T).sum(1)

    np.testing.assert_allclose(error(found), error(expected), rtol=1e-3)
    before = error(decode(encode(weight, start, scheme), start, scheme))
    assert (error(found) <= before * 1.0001).all() and error(found).sum() < 0.97 * before.sum()


def test_only_the_search_of_awq_in_four_bits_clips_by_the_outputs() -> None:
    weight = np.random.default_rng(3).standard_t(4, (6, 128)).astype(np.float32)
    x = inputs(128)
    h = torch.from_numpy(x.T @ x)

    def stored(smooth: Any, scale: Any = "mse", scheme: Scheme = GROUPED[0]) -> np.ndarray:
        recipe = Recipe("r", {}, rounding="rtn", smooth=smooth, scale=scale)
        return store([weight], scheme, recipe, h)[0].scales.stored

    plain = stored("none")
    assert not np.array_equal(stored("awq"), plain)
    np.testing.assert_array_equal(stored("smoothquant"), plain)
    np.testing.assert_array_equal(stored("awq", "absmax"), stored("none", "absmax"))
    eight = SCHEMES["w8a16"]
    np.testing.assert_array_equal(stored("awq", scheme=eight), stored("none", scheme=eight))


def chain(rows: int, seed: int) -> np.ndarray:
    """Rows [rows, 64] of a random process over 64 symbols in which each is followed by few."""
    follow = np.random.default_rng(0).dirichlet(np.full(64, 0.1), 64).cumsum(1)
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 64, (rows, 1))
    for _ in range(63):
        drawn = (draw.random((rows, 1)) > follow[ids[:, -1]]).sum(1)
        ids = np.append(ids, np.minimum(drawn, 63)[:, None], 1)
    return ids


@pytest.fixture(scope="module")
def trained() -> Any:
    """(spec, parameters) of a model of two layers that has learned the process."""
    spec = from_config(new_config(hidden=128, layers=2, heads=4, ffn=256, vocab=64, tied=False))
    stepper, steps = make_stepper("torch", spec, hub.init_params(spec, 0), next_token_loss), 40
    for step in range(steps):
        rows = chain(16, 100 + step).astype(np.int32)
        mask = np.ones(rows.shape, np.float32)
        mask[:, -1] = 0
        batch = {"input_ids": rows, "targets": np.roll(rows, -1, 1), "loss_mask": mask}
        stepper.step(batch, 4e-3 * min(1, (step + 1) / 10) * (1 - step / steps), number=step)
    return spec, {name: array.detach().numpy().copy() for name, array in stepper.params.items()}


def test_factors_without_a_clear_gain_are_not_moved(trained: Any) -> None:
    """By GPTQ, which does not take AWQ's scales, nothing is different then."""
    spec, params = trained
    four = load_recipe("w4a16")
    one, other = (
        quantize(
            spec, params, with_overrides(four, smooth=smooth), OPS, batches(chain(8, 1).tolist())
        )
        for smooth in ("none", "awq")
    )
    for name, values in one.params.items():
        np.testing.assert_array_equal(values, other.params[name], err_msg=name)


@pytest.mark.parametrize("name", FORMATS)
def test_awq_beats_nearest_on_a_trained_model_with_even_channels(trained: Any, name: str) -> None:
    spec, params = trained
    calibration, held_out = (batches(chain(24, seed).tolist()) for seed in (1, 2))
    result = {}
    for smooth in ("none", "awq"):
        recipe = with_overrides(load_recipe(name), rounding="rtn", smooth=smooth)
        made = quantize(spec, params, recipe, OPS, calibration)
        before, after = (OPS.to_device(x, "float32") for x in (params, made.params))
        result[smooth] = divergence(spec, before, after, made.linears, held_out)
    print(name, {smooth: one.kl_nats for smooth, one in result.items()})
    assert result["awq"].kl_nats < 0.97 * result["none"].kl_nats
