"""GPTQ against the textbook, column by column in NumPy, and against rounding to nearest."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.numerics import integers  # noqa: E402
from sabia.core.quant.gptq import GptqConfig, gptq, relative_output_error  # noqa: E402


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
    group = config.group or columns
    order = np.arange(columns)
    scale = integers.choose_scales(w.astype(np.float32), config.bits, config.group, config.scale)
    if config.order == "static":
        order = np.argsort(-np.diag(h), kind="stable")
    h += np.eye(columns) * config.damping * np.diag(h).mean()
    inverse = np.linalg.inv(h)
    low, high = integers.code_range(config.bits)
    codes = np.zeros(w.shape, np.int8)
    for c in order:
        if config.order == "natural" and c % group == 0:
            part = w[:, c : c + group].astype(np.float32)
            scale[:, c // group] = integers.choose_scales(part, config.bits, group, config.scale)[
                :, 0
            ]
        s = scale[:, c // group]
        codes[:, c] = np.clip(np.rint(w[:, c] / s), low, high)
        error = (w[:, c] - codes[:, c] * s) / inverse[c, c]
        w -= np.outer(error, inverse[c])
        inverse -= np.outer(inverse[:, c], inverse[c]) / inverse[c, c]
    return codes, scale


@pytest.mark.parametrize("order", ["static", "natural"])
@pytest.mark.parametrize(("columns", "group"), [(96, 32), (160, 32), (64, None), (256, 256)])
def test_blocks_and_cholesky_give_the_textbook_codes(
    order: str, columns: int, group: int | None
) -> None:
    weight, x = correlated(24, columns, 600)
    x[:, 5] = 0
    config = GptqConfig(4, group, "absmax", order)
    codes, scale = gptq(weight, hessian_of(x), config)
    theirs, their_scale = textbook(weight, hessian_of(x).numpy(), config)
    same = (codes == theirs).mean()
    assert same > 0.995, same  # float32 against float64: a rare tie may fall the other way
    np.testing.assert_allclose(scale, their_scale, rtol=0.01)
    assert (codes[:, 5] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, None])
def test_gptq_beats_rounding_to_nearest_on_correlated_inputs(bits: int, group: int | None) -> None:
    weight, x = correlated(48, 128, 2000, seed=1)
    h = hessian_of(x)
    scale = integers.choose_scales(weight, bits, group)
    nearest = integers.decode(integers.encode(weight, scale, bits), scale)
    ours = integers.decode(*gptq(weight, h, GptqConfig(bits, group)))
    error = relative_output_error(weight, ours, h)
    assert error < 0.6 * relative_output_error(weight, nearest, h)
    direct = np.linalg.norm(x @ (ours - weight).T) / np.linalg.norm(x @ weight.T)
    assert error == pytest.approx(direct, rel=1e-4)


def test_without_correlation_nothing_is_moved() -> None:
    weight = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    codes, scale = gptq(weight, torch.eye(64, dtype=torch.float64), GptqConfig(4, 32))
    np.testing.assert_array_equal(codes, integers.encode(weight, scale, 4))


def test_fewer_inputs_than_columns_are_damped() -> None:
    weight, x = correlated(8, 128, 20, seed=3)
    codes, scale = gptq(weight, hessian_of(x), GptqConfig(4, 64))
    assert np.isfinite(integers.decode(codes, scale)).all()
