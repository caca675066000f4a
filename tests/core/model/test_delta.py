"""The chunked delta rule and the convolution against a step-by-step oracle in float64."""

from typing import Any

import numpy as np
import pytest

from sabia.core.ops.base import dtype_name
from sabia.core.parallel.build_ops import load_ops

from .conftest import HURRY, compiled

SIZES = {"batch": 2, "groups": 2, "heads": 6, "keys": 5, "values": 7}


def inputs(length: int, seed: int = 0, decay: float = 0.3) -> dict[str, np.ndarray]:
    """Unit keys, decays around e^-decay, strengths in (0, 1)."""
    random = np.random.default_rng(seed)
    batch, heads = SIZES["batch"], SIZES["heads"]
    q, k = random.standard_normal((2, batch, length, SIZES["groups"], SIZES["keys"]))
    return {
        "q": q,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": random.standard_normal((batch, length, heads, SIZES["values"])),
        "log_decay": -decay * random.exponential(size=(batch, length, heads)),
        "beta": random.uniform(0, 1, (batch, length, heads)),
    }


def documents(length: int, seed: int = 1) -> np.ndarray:
    """Rows of documents of 1 to 90 tokens; the last row ends in padding; a number comes back."""
    random = np.random.default_rng(seed)
    rows = np.zeros((SIZES["batch"], length), int)
    for row in rows:
        start, number = 0, 1
        while start < length:
            size = int(random.integers(1, 90))
            row[start : start + size] = 1 + number % 3
            start, number = start + size, number + 1
    rows[-1, length - length // 4 :] = 0
    return rows


def one_step_at_a_time(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    segments: np.ndarray | None,
) -> np.ndarray:
    """The recurrence as it is defined."""
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    out = np.zeros_like(v)
    for row in range(v.shape[0]):
        state = np.zeros((v.shape[2], q.shape[3], v.shape[3]))
        for t in range(v.shape[1]):
            if segments is not None and t and segments[row, t] != segments[row, t - 1]:
                state[:] = 0
            state *= np.exp(log_decay[row, t])[:, None, None]
            error = v[row, t] - np.einsum("hnv,hn->hv", state, k[row, t])
            state += np.einsum("hn,hv,h->hnv", k[row, t], error, beta[row, t])
            out[row, t] = np.einsum("hnv,hn->hv", state, q[row, t])
    return out


def convolved(x: np.ndarray, weight: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
    """The convolution as it is defined."""
    out = np.zeros_like(x)
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            for back in range(min(t + 1, weight.shape[1])):
                part = None if segments is None else segments[row, t - back : t + 1]
                if part is None or (part == part[0]).all():
                    out[row, t] += weight[:, -1 - back] * x[row, t - back]
    return out


def value_and_gradients(
    ops: Any, function: Any, arrays: dict[str, np.ndarray], weights: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """function(**arrays) in fp32 and the gradients of its sum weighted by `weights`."""
    narrow = {name: array.astype(np.float32) for name, array in arrays.items()}
    if ops.name == "torch":
        import torch

        leaves = {name: torch.tensor(array, requires_grad=True) for name, array in narrow.items()}
        out = function(**leaves)
        (out * torch.tensor(weights, dtype=torch.float32)).sum().backward()
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        return ops.to_numpy({"x": out})["x"], ops.to_numpy(grads)
    import jax

    def loss(arrays: Any) -> Any:
        out = function(**arrays)
        return (out * weights.astype(np.float32)).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=HURRY)(
        narrow
    )
    return np.asarray(out), ops.to_numpy(grads)


def numeric(function: Any, arrays: dict, weights: np.ndarray, name: str, seed: int) -> tuple:
    """(direction, derivative along it) by central differences in float64."""
    direction = np.random.default_rng(seed).standard_normal(arrays[name].shape)
    step = 1e-5
    sums = [
        (function(**(arrays | {name: arrays[name] + sign * step * direction})) * weights).sum()
        for sign in (1, -1)
    ]
    return direction, (sums[0] - sums[1]) / (2 * step)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 50, 64, 200])
def test_chunks_equal_steps_and_gradients_equal_differences(
    length: int, packed: bool, ops: Any
) -> None:
    arrays = inputs(length)
    segments = documents(length) if packed else None
    like = ops.zeros((1,), "float32")
    rows = None if segments is None else ops.integers(segments, like)
    weights = np.random.default_rng(5).standard_normal(arrays["v"].shape)
    out, grads = value_and_gradients(
        ops, lambda **x: ops.delta_rule(**x, segments=rows)[0], arrays, weights
    )
    right = one_step_at_a_time(**arrays, segments=segments)
    assert np.linalg.norm(out - right) <= 2e-6 * np.linalg.norm(right)
    for name in arrays:
        direction, slope = numeric(
            lambda **x: one_step_at_a_time(**x, segments=segments), arrays, weights, name, 9
        )
        size = np.linalg.norm(grads[name]) * np.linalg.norm(direction)
        assert abs((grads[name] * direction).sum() - slope) <= 1e-5 * size, name


def test_the_result_has_the_dtype_of_the_values(ops: Any) -> None:
    arrays = ops.to_device({k: v.astype(np.float32) for k, v in inputs(70).items()})
    exact = ops.to_numpy({"out": ops.delta_rule(**arrays)[0]})["out"]
    out = ops.delta_rule(**arrays | {"v": ops.cast(arrays["v"], "bfloat16")})[0]
    assert dtype_name(out) == "bfloat16"
    rounded = ops.to_numpy({"out": ops.cast(out, "float32")})["out"]
    assert np.linalg.norm(rounded - exact) <= 4e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 3, 41])
def test_convolution_stays_in_its_document(length: int, packed: bool, ops: Any) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "x": random.standard_normal((2, length, 6)),
        "weight": random.standard_normal((6, 4)),
    }
    segments = documents(length) if packed else None
    if packed:
        segments[0, : length // 2] = np.arange(length // 2) % 5  # many short documents
    rows = None if segments is None else ops.integers(segments, ops.zeros((1,), "float32"))
    weights = random.standard_normal(arrays["x"].shape)
    out, grads = value_and_gradients(
        ops, lambda **x: ops.causal_conv(**x, segments=rows), arrays, weights
    )
    right = convolved(**arrays, segments=segments)
    assert np.abs(out - right).max() <= 1e-5
    for name in arrays:
        direction, slope = numeric(
            lambda **x: convolved(**x, segments=segments), arrays, weights, name, 3
        )
        assert abs((grads[name] * direction).sum() - slope) <= 1e-5 * (1 + abs(slope)), name


def test_equal_keys_without_decay_stay_exact(ops: Any) -> None:
    arrays = inputs(256) | {"log_decay": np.zeros((2, 256, 6)), "beta": np.ones((2, 256, 6))}
    arrays["k"] = np.broadcast_to(arrays["k"][:, :1], arrays["k"].shape).copy()
    narrow = ops.to_device({name: x.astype(np.float32) for name, x in arrays.items()})
    run = compiled(ops, lambda x: ops.delta_rule(**x)[0])
    right = one_step_at_a_time(**arrays, segments=None)
    out = ops.to_numpy({"x": run(narrow)})["x"]
    assert np.linalg.norm(out - right) <= 1e-5 * np.linalg.norm(right)


@pytest.mark.parametrize("packed", [False, True])
def test_strong_decays_of_earlier_tokens_cost_no_digits(packed: bool, ops: Any) -> None:
    """Tokens that forget everything, and after them tokens that forget little, in one chunk."""
    length = 150
    arrays = inputs(length, decay=0.01)
    arrays["log_decay"][:, :40] -= 25.0
    arrays["log_decay"][:, 70:90] -= 40.0
    arrays = {name: x.astype(np.float32).astype(np.float64) for name, x in arrays.items()}
    segments = np.repeat([[1, 2, 3, 4]] * 2, (40, 30, 20, 60), axis=1) if packed else None
    weights = np.random.default_rng(5).standard_normal(arrays["v"].shape)
    rows = None if segments is None else ops.integers(segments, ops.zeros((1,), "float32"))
    out, grads = value_and_gradients(
        ops, lambda **x: ops.delta_rule(**x, segments=rows)[0], arrays, weights
    )
    right = one_step_at_a_time(**arrays, segments=segments)
    assert np.linalg.norm(out - right) <= 1e-6 * np.linalg.norm(right)
    direction, slope = numeric(
        lambda **x: one_step_at_a_time(**x, segments=segments), arrays, weights, "log_decay", 9
    )
    size = np.linalg.norm(grads["log_decay"]) * np.linalg.norm(direction)
    assert abs((grads["log_decay"] * direction).sum() - slope) <= 1e-6 * size


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_are_as_exact_as_transformers_in_packed_rows_too(seed: int, ops: Any) -> None:
    """Errors of the output against float64; gradients against those of separate documents."""
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    random = np.random.default_rng(seed)
    keys, values = random.choice([8, 12, 33, 64, 128], 2)
    groups = int(random.choice([1, 3, 5]))
    heads = groups * int(random.choice([1, 3]))
    edges = np.cumsum([*random.integers(1, 150, 2), *random.integers(1, 9, 2)])
    length = int(edges[-1])
    q, k = random.standard_normal((2, 1, length, groups, keys)) + random.choice([0, 2])
    arrays = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True) * keys**-0.5,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": random.standard_normal((1, length, heads, values)),
        "log_decay": -random.exponential(np.exp(random.uniform(-6, 2)), (1, length, heads)),
        "beta": random.uniform(0, 1, (1, length, heads)),
    }
    arrays = {name: x.astype(np.float32).astype(np.float64) for name, x in arrays.items()}
    segments = np.searchsorted(edges, np.arange(length), side="right")[None]
    weights = random.standard_normal(arrays["v"].shape).astype(np.float32).astype(np.float64)

    def theirs(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
        parts = zip(
            *(x.tensor_split(tuple(edges[:-1]), 1) for x in (q, k, v, log_decay, beta)), strict=True
        )
        rule = qwen.torch_chunk_gated_delta_rule
        return torch.cat([rule(q * keys**0.5, *others)[0] for q, *others in parts], 1)

    def ours(**x: Any) -> Any:
        return ops.delta_rule(**x, segments=rows)[0]

    def apart(**x: Any) -> Any:
        cut = [slice(a, b) for a, b in zip([0, *edges], edges, strict=False)]
        parts = [ops.delta_rule(**{name: a[:, s] for name, a in x.items()})[0] for s in cut]
        return ops.concat(parts, 1)

    rows = ops.integers(segments, ops.zeros((1,), "float32"))
    right = one_step_at_a_time(**arrays, segments=segments)
    out, grads = value_and_gradients(ops, ours, arrays, weights)
    other, other_grads = value_and_gradients(load_ops("torch"), theirs, arrays, weights)
    assert relative(out, right) <= 1.5 * relative(other, right)
    separate, separate_grads = value_and_gradients(ops, apart, arrays, weights)
    assert relative(out, separate) <= 1e-6
    for name in arrays:
        assert relative(grads[name], separate_grads[name]) <= 1e-5, name
        assert relative(grads[name], other_grads[name]) <= 2e-5, name


def relative(one: np.ndarray, other: np.ndarray) -> float:
    """|a - b| / |b|."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_torch_compiles_the_rule_without_breaks_or_unrolling() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from sabia.core.ops.delta_torch import delta_rule

    arrays = {n: torch.tensor(x, dtype=torch.float32) for n, x in inputs(300).items()}
    segments = torch.tensor(documents(300))
    graphs = []

    def counting(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(delta_rule, backend=counting, fullgraph=True)
    out, _ = run(**arrays, segments=segments)
    assert torch.allclose(out, delta_rule(**arrays, segments=segments)[0], atol=1e-6)
    calls = [node for node in graphs[0].graph.nodes if "affine_scan" in str(node.target)]
    assert len(graphs) == len(calls) == 1


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
def test_rows_continue_from_a_state(length: int, ops: Any) -> None:
    """In two parts, of which the first is padded differently in each row, as in one."""
    given, cut, width = inputs(length), np.array([length // 2, length]), length + 3
    whole = one_step_at_a_time(**given, segments=None)
    state = ops.zeros((2, SIZES["heads"], SIZES["keys"], SIZES["values"]), "float32")
    run = compiled(ops, ops.delta_rule)

    def part(start: np.ndarray, size: np.ndarray) -> dict[str, np.ndarray]:
        made = {}
        for name, x in given.items():
            made[name] = np.ones((2, width, *x.shape[2:]), np.float32)
            if name in ("log_decay", "beta"):
                made[name][:] = 0
            for row in range(2):
                made[name][row, : size[row]] = x[row, start[row] : start[row] + size[row]]
        return ops.to_device(made, "float32")

    first, state = run(**part(np.zeros(2, int), cut), state=state)
    rest, _ = run(**part(cut, length - cut), state=state)
    first, rest = (ops.to_numpy({"x": x})["x"] for x in (first, rest))
    for row, end in enumerate(cut):
        both = np.concatenate((first[row, :end], rest[row, : length - end]))
        np.testing.assert_allclose(both, whole[row], atol=2e-5)
