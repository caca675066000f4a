"""Low-precision products and their gradients against the recipes written out in NumPy."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model import forward
from sabia.core.numerics import hadamard, tiles
from sabia.core.numerics.scales import choose_scales, decode, encode, whole_scale
from sabia.core.numerics.schemes import SCHEMES
from sabia.core.ops import precision as p
from sabia.core.ops.product import Matrix, Product
from sabia.core.parallel.build_ops import build_ops
from sabia.core.spec import from_config, new_config
from sabia.kernels.quantize.definitions import mix

LOW = ("fp8", "fp8-block", "nvfp4")
NAME = "layers.2.mlp.up"
SEED, STEP, PART = 11, 5, 3
SHAPE = {"hidden": 64, "layers": 4, "vocab": 97, "heads": 4, "kv_heads": 2, "head_dim": 16}
SPEC = from_config(new_config("llama", **SHAPE, ffn=96, context=64))


def lowered(ops: Any, name: str) -> Any:
    """Operations that round NAME's products, in a known part of a known step."""
    precision = p.BY_NAME[name]
    return build_ops(ops.name, SPEC, precision=precision, seed=SEED).at(STEP, PART)


def draws(shape: tuple[int, int], of_weight: bool) -> np.ndarray:
    """The uniform numbers of NAME's gradients, from the definition."""
    first, second = p.hash_words(SEED, NAME)
    clock = mix((mix(STEP) + PART * 0x9E3779B9) & 0xFFFFFFFF)
    role = 0x5BD1E995 if of_weight else 0
    return tiles.uniforms(shape, (mix(clock ^ first), second ^ role))


def turned(x: np.ndarray, products: p.MatmulRecipe) -> np.ndarray:
    """xᵀ, behind the transform where the recipe has one."""
    if not products.hadamard:
        return x.T.copy()
    filled = np.pad(x.T, ((0, 0), (0, -len(x) % 16)))
    return hadamard.transform(filled, hadamard.signs(SEED))


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


def oracle(
    products: p.MatmulRecipe, x: np.ndarray, w: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y, dx, dw) of the recipe."""
    seen = tiles.simulate(w, products.weight)
    chance = draws(dy.shape, False) if products.stochastic else None
    left, right = turned(dy, products), turned(x, products)
    other = draws(left.shape, True) if products.stochastic else None
    dw = times(
        tiles.simulate(left, products.gradient, other),
        tiles.simulate(right, products.activation).T,
    )
    y = times(tiles.simulate(x, products.activation), seen.T)
    return y, times(tiles.simulate(dy, products.gradient, chance), seen), dw


def gradients(ops: Any, function: Any, arrays: list[np.ndarray], dy: np.ndarray) -> list[Any]:
    """[y, d/da of each array] of function(*arrays) for a cotangent, as NumPy."""
    if ops.name == "torch":
        import torch

        given = [torch.from_numpy(array).requires_grad_() for array in arrays]
        y = function(*given)
        found = torch.autograd.grad(y, given, torch.from_numpy(dy))
        return [part.detach().numpy() for part in (y, *found)]
    import jax

    @jax.jit
    def run(arrays: list[Any], dy: Any) -> Any:
        y, back = jax.vjp(function, *arrays)
        return [y, *back(dy)]

    return [np.asarray(part) for part in run(arrays, dy)]


def close(found: np.ndarray, wanted: np.ndarray, bound: float = 1e-6) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= bound * np.abs(wanted).max()


def matrices(rows: int, width: int, out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, width), np.float32)
    x[:, 3] *= 20
    w = random.standard_normal((out, width), np.float32) * np.float32(0.1)
    return x, w, random.standard_normal((rows, out), np.float32) * np.float32(1e-3)


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("sizes", [(40, 64, 96), (13, 50, 23), (300, 272, 160)])
def test_linear_and_its_gradients_are_the_recipe(
    ops: Any, name: str, sizes: tuple[int, int, int]
) -> None:
    low = lowered(ops, name)
    x, w, dy = matrices(*sizes)
    found = gradients(ops, lambda x, w: low.linear(x, w, name=NAME), [x, w], dy)
    for mine, wanted in zip(found, oracle(low.rules[0].recipe, x, w, dy), strict=True):
        close(mine, wanted)


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("sizes", [(64, 96), (40, 24)])
def test_experts_and_their_gradients_are_the_recipe(
    ops: Any, name: str, sizes: tuple[int, int]
) -> None:
    """Three experts, one of them without rows."""
    low, products = lowered(ops, name), p.BY_NAME[name].recipe
    assert products is not None
    counts, (width, out) = [21, 0, 27], sizes
    x, _, dy = matrices(48, width, out)
    w = np.random.default_rng(1).standard_normal((3, out, width), np.float32)
    chosen = np.repeat(np.arange(3), counts)[:, None]

    def run(x: Any, w: Any) -> Any:
        rows, plan = low.dispatch(x, low.integers(chosen, x), 3)
        return low.multiply(Product(rows, (Matrix(NAME, w),), plan))[0]

    y, dx, dw = gradients(ops, run, [x, w], dy)
    height = products.weight.tile[0] if products.weight.tile else 1
    stack = np.pad(w, ((0, 0), (0, -out % height), (0, 0)))
    seen = tiles.simulate(stack.reshape(-1, width), products.weight)
    seen = seen.reshape(3, -1, width)[:, :out]
    chance = draws(dy.shape, False) if products.stochastic else None
    low_x = tiles.simulate(x, products.activation)
    low_dy = tiles.simulate(dy, products.gradient, chance)
    owners = chosen[:, 0]
    close(y, np.stack([times(seen[e], row) for e, row in zip(owners, low_x, strict=True)]))
    close(dx, np.stack([times(row, seen[e]) for e, row in zip(owners, low_dy, strict=True)]))
    close(dw, _expert_gradients(products, x, dy, counts))


def _expert_gradients(
    products: p.MatmulRecipe, x: np.ndarray, dy: np.ndarray, counts: list[int]
) -> np.ndarray:
    group = products.group
    room = [-(-count // group) * group for count in counts]
    ends = np.cumsum(room)
    total = -(-len(x) // group) * group + len(counts) * group
    places = np.concatenate(
        [np.arange(c) + end - r for c, r, end in zip(counts, room, ends, strict=True)]
    )
    spread = [np.zeros((total, part.shape[1]), np.float32) for part in (dy, x)]
    for wide, part in zip(spread, (dy, x), strict=True):
        wide[places] = part
    left, right = (turned(part, products) for part in spread)
    chance = draws(left.shape, True) if products.stochastic else None
    left = tiles.simulate(left, products.gradient, chance)
    right = tiles.simulate(right, products.activation)
    pairs = zip(ends - room, [*ends[:-1], total], strict=True)
    return np.stack([times(left[:, a:b], right[:, a:b].T) for a, b in pairs])


def test_chance_repeats_and_depends_on_step_part_and_name(ops: Any) -> None:
    """Under jax with a traced step and part."""
    low = build_ops(ops.name, SPEC, precision=p.BY_NAME["nvfp4"], seed=SEED)
    x, w, dy = matrices(32, 64, 48)
    w = ops.to_device({"w": w})["w"]

    def run(step: int, part: int = 0, name: str = NAME) -> np.ndarray:
        here = low.at(step, part)
        return gradients(ops, lambda x: here.linear(x, w, name=name), [x], dy)[1]

    first = run(7)
    np.testing.assert_array_equal(first, run(7))
    others = [run(8), run(7, name="layers.2.mlp.gate")]
    if ops.name == "jax":
        import jax

        @jax.jit
        def traced(step: Any, part: Any) -> Any:
            here = low.at(step, part)
            return jax.vjp(lambda x: here.linear(x, w, name=NAME), x)[1](dy)[0]

        np.testing.assert_array_equal(traced(7, 0), first)
        others.append(traced(7, 1))
    else:
        others.append(run(7, 1))
    for other in others:
        assert (first != other).mean() > 0.5


def stored(w: np.ndarray, bits: int, group: int | None) -> np.ndarray:
    """The values of w[O, I] as `sabia quantize` stores them."""
    scheme = SCHEMES[f"w{bits}a16"].with_group(group)
    chosen = choose_scales(w, scheme, "absmax")
    return decode(encode(w, chosen, scheme), chosen, scheme)


@pytest.mark.parametrize(("name", "bits", "group"), [("qat-int8", 8, None), ("qat-int4", 4, 64)])
def test_trained_for_integers(ops: Any, name: str, bits: int, group: int | None) -> None:
    low = lowered(ops, name)
    x, w, dy = matrices(24, 64, 40)
    w[3] = 0
    found = gradients(ops, lambda x, w: low.linear(x, w, name=NAME), [x, w], dy)
    seen = stored(w, bits, group)
    wanted = times(x, seen.T), times(dy, seen), times(dy.T, x)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("bits", [4, 8])
def test_fake_integers_have_the_bits_of_the_codec(ops: Any, bits: int) -> None:
    w = np.random.default_rng(3).standard_normal((500, 1024), np.float32)
    w[7], w[9, :32] = 0, 1e-30
    if ops.name == "torch":
        import torch

        from sabia.core.numerics.nearest_torch import fake

        found = fake(torch.from_numpy(w), bits, 32).numpy()
    else:
        import jax

        from sabia.core.numerics.nearest_jax import fake as faked

        found = np.asarray(jax.jit(faked, static_argnums=(1, 2))(w, bits, 32))
    np.testing.assert_array_equal(found, stored(w, bits, 32))


def test_qat_nvfp4_computes_with_the_quantized_weights(ops: Any) -> None:
    low = lowered(ops, "qat-nvfp4")
    x, w, dy = matrices(24, 64, 40)
    found = gradients(ops, lambda x, w: low.linear(x, w, name=NAME), [x, w], dy)
    close(found[0], times(x, simulated(w).T))
    close(found[2], times(dy.T, x))
    stack = np.stack([w, 3 * w])

    def run(x: Any, w: Any) -> Any:
        rows, plan = low.dispatch(x, low.integers(np.repeat([0, 1], 12)[:, None], x), 2)
        return low.multiply(Product(rows, (Matrix(NAME, w),), plan))[0]

    y = gradients(ops, run, [x, stack], dy)[0]
    seen = [simulated(matrix) for matrix in stack]
    wanted = np.concatenate([times(x[:12], seen[0].T), times(x[12:], seen[1].T)])
    close(y, wanted)


def simulated(*matrices: np.ndarray) -> np.ndarray:
    """NVFP4 values of the first of matrices that have one scale as wholes."""
    scheme = SCHEMES["nvfp4a16"]
    whole = whole_scale(max(float(np.abs(w).max()) for w in matrices), scheme)
    chosen = choose_scales(matrices[0], scheme, "absmax", whole)
    return decode(encode(matrices[0], chosen, scheme), chosen, scheme)


def test_matrices_that_servers_join_have_one_scale_in_qat_nvfp4(ops: Any) -> None:
    """The bits of the codec; others of the same product keep their own."""
    low = lowered(ops, "qat-nvfp4")
    rng = np.random.default_rng(4)
    drawn = [size * rng.standard_normal((32, 64), np.float32) for size in (1, 3, 0.2, 9)]
    drawn[0][5], drawn[0][6, :16] = 0, 1e-30
    names = [f"layers.2.attn.{name}" for name in ("q", "k", "v", "o")]
    given = ops.to_device(dict(zip(names, drawn, strict=True)))
    identity = ops.to_device({"x": np.eye(64, dtype=np.float32)})["x"]
    product = Product(identity, tuple(Matrix(name, given[name]) for name in names))
    found = [ops.to_numpy({"y": y})["y"].T for y in low.multiply(product)]
    for i in range(3):
        wanted = simulated(drawn[i], *drawn[:3])
        np.testing.assert_array_equal(found[i], wanted)
    np.testing.assert_array_equal(found[3], simulated(drawn[3]))


def test_groups_that_do_not_fit_are_refused(ops: Any) -> None:
    given = ops.to_device({"x": np.ones((4, 40), np.float32), "w": np.ones((8, 40), np.float32)})
    with pytest.raises(UsageError, match="16 does not divide 40"):
        lowered(ops, "qat-nvfp4").linear(given["x"], given["w"], name=NAME)


def test_what_stays_high_is_untouched(ops: Any) -> None:
    """The head, the embedding, and the products of the layers that are kept."""
    x, w, _ = matrices(8, 64, 97)
    given = ops.to_device({"x": x, "w": w})
    low = lowered(ops, "nvfp4")
    for name in ("head", "embed", "layers.0.attn.q", "layers.1.mlp.up", "layers.3.mlp.up", None):
        assert name not in low.rules[0].names
        same = low.linear(given["x"], given["w"], name=name), ops.linear(given["x"], given["w"])
        found = ops.to_numpy(dict(zip("ab", same, strict=True)))
        np.testing.assert_array_equal(found["a"], found["b"])


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("fp8", "matmuls"),
        pytest.param("nvfp4", "full", marks=pytest.mark.slow),
        pytest.param("nvfp4", "none", marks=pytest.mark.slow),
        pytest.param("fp8-block", "none", marks=pytest.mark.slow),
        pytest.param("qat-int8", "none", marks=pytest.mark.slow),
        pytest.param("qat-nvfp4", "matmuls", marks=pytest.mark.slow),
    ],
)
def test_a_model_computes_in_it(ops: Any, name: str, remat: Any) -> None:
    """Loss near full precision; gradients close in direction; under recomputation too."""
    spec = from_config(new_config("llama", **(SHAPE | {"layers": 2}), ffn=96, context=64))
    random = np.random.default_rng(0)
    params = {
        t.name: (random.standard_normal(t.shape) * (t.shape[-1] ** -0.5)).astype(np.float32)
        + np.float32(t.init.kind == "ones")
        for t in spec.tensors()
    }
    ids = random.integers(0, 97, (2, 25))
    names = sorted(params)

    def loss_in(here: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            held = dict(zip(names, arrays, strict=True))
            hidden = forward.hidden(spec, held, ids[:, :-1], here, remat=remat)
            return forward.token_losses(spec, held, hidden, ids[:, 1:], here)[0].mean()

        return loss

    arrays, one = [params[name] for name in names], np.ones((), np.float32)
    exact = gradients(ops, loss_in(ops), arrays, one)
    precision = replace(p.BY_NAME[name], bf16_first=1, bf16_last=0.0)
    low = build_ops(ops.name, spec, precision=precision, seed=SEED).at(STEP)
    found = gradients(ops, loss_in(low), arrays, one)
    assert abs(found[0] - exact[0]) < 0.05 * exact[0]
    a, b = (np.concatenate([g.ravel() for g in part[1:]]) for part in (found, exact))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.93
    assert (a != b).any()


def test_torch_compiles_the_products_without_a_break() -> None:
    """One program for all steps, with the numbers of the eager one."""
    torch = pytest.importorskip("torch")

    low = build_ops("torch", SPEC, precision=p.BY_NAME["nvfp4"], seed=SEED)
    x, w, dy = (torch.from_numpy(array) for array in matrices(32, 64, 48))
    w.requires_grad_()

    def run(x: Any, w: Any) -> Any:
        return low.linear(x, w, name=NAME)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for step in (1, 2, 9):
        low.at(step)
        (wanted,) = torch.autograd.grad(run(x, w), [w], dy)
        with torch.compiler.set_stance("fail_on_recompile") if step > 1 else nullcontext():
            (found,) = torch.autograd.grad(compiled(x, w), [w], dy)
        assert torch.equal(found, wanted)
