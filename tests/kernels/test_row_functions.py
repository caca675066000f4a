"""Functions of rows: both engines agree, and their gradients are those of torch's autograd in fp64;
a NaN stays; the vocabulary loss that they compute is that of the plain form."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sabia.core.model.storage.hub import init_params
from sabia.core.ops.device_torch import TorchOps
from sabia.core.parallel.build_ops import build_ops
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper
from sabia.kernels.rms_norm.interface import rms_norm
from sabia.kernels.row_functions import interface, torch_arrays
from sabia.kernels.runtime.torch_support import numbers
from sabia.kernels.vocabulary_loss import torch_impl
from sabia.kernels.vocabulary_loss.interface import linear_cross_entropy

DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}  # relative: half a unit in the last place


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch):
    """The loops serve small tensors too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch_arrays, "LEAST", 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 2), (7, 6), (70, 100)])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_engines_agree(rows: int, size: int, cap: float, dtype: torch.dtype) -> None:
    def drawn_numbers(number: int) -> np.ndarray:
        return numbers(3 * drawn(rows, size, dtype=dtype, seed=number))

    weight, angle = drawn(size).numpy(), drawn(1, rows, 1, size, seed=9).numpy()
    targets = np.random.default_rng(0).integers(0, size, rows)
    results: list[list[Any]] = []
    for engine in ("numba", "reference"):
        x, g, scores, gate = map(drawn_numbers, range(4))
        y, dx, up, out, d_up = (np.zeros_like(x) for _ in range(5))
        inverse, lse, dw = (np.zeros(n, np.float32) for n in (rows, rows, size))
        interface.rms_norm(x, weight, 1e-6, y, inverse, engine)
        interface.rms_norm_gradient(g, x, weight, inverse, dx, dw, engine)
        interface.silu_product(gate.ravel(), x.ravel(), out.ravel(), engine)
        flat = (part.ravel() for part in (g, gate, x, up, d_up))
        interface.silu_product_gradient(*flat, engine)
        turned = np.zeros_like(x)[None, :, None]
        given = x[None, :, None], np.cos(angle), np.sin(angle), -1.0
        interface.rotate(*given, turned, engine)
        interface.log_sums(scores, cap, lse, engine)
        again = np.zeros_like(lse)
        interface.softmax_gradient(scores, targets, cap, again, engine)
        results.append([y, inverse, dx, dw, out, up, d_up, turned, lse, again, scores])
    for one, other in zip(*results, strict=True):
        wide = [torch.from_numpy(x).view(dtype).float() if x.dtype == np.uint16
                else torch.from_numpy(x) for x in (one, other)]  # fmt: skip
        torch.testing.assert_close(*wide, rtol=2 * NEAR[dtype], atol=3e-5)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_of_attention_and_their_gradients(start: int, causal: bool, masked: bool) -> None:
    """Both engines against torch's softmax and its gradient in fp64, for 5 of 8 queries."""
    scores, grad, v = drawn(2, 3, 8, 11, seed=1), drawn(2, 8, 3, 6, seed=2), drawn(2, 3, 11, 6)
    visible = torch.ones(8, 11, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    bias = torch.zeros(2 * masked, 8 * masked, 11 * masked)
    if masked:
        bias[:, :, 1:] = torch.where(drawn(2, 8, 10, seed=3) > 0, -torch.inf, 0.0)
        visible = (visible & (bias == 0))[:, None]
    z = torch.where(visible, scores.double() * 0.7, -torch.inf).requires_grad_()
    p = torch.softmax(z, -1)
    products = grad.double().transpose(1, 2) @ v.double().transpose(2, 3)
    (gradient,) = torch.autograd.grad(p, z, products)
    out = (p.detach() @ v.double()).transpose(1, 2).float().contiguous().numpy()
    lse, part = torch.logsumexp(z, -1).detach().float().numpy(), slice(start, start + 5)
    given = [x[:, :, part].float().contiguous().numpy() for x in (scores, products)]
    right = [x[:, :, part] for x in (p.detach(), 0.7 * gradient)]
    for engine in ("numba", "reference"):
        for dtype in DTYPES:
            near = {"rtol": NEAR[dtype], "atol": 1e-6}
            weights, sums = torch.empty(2, 3, 5, 11, dtype=dtype), torch.empty(2, 3, 5)
            mask = bias.clone()
            if masked:
                mask[1, start + 2] = -torch.inf  # a query that sees no key
            settings = mask.numpy(), start, causal, 0.7
            interface.attention_weights(
                given[0].copy(), *settings, numbers(weights), sums.numpy(), engine
            )
            wanted, whole = (
                p.detach()[:, :, part].clone(),
                torch.from_numpy(lse)[:, :, part].clone(),
            )
            if masked:
                wanted[1, :, 2], whole[1, :, 2] = 0, 0
            torch.testing.assert_close(weights.double(), wanted, **near)
            torch.testing.assert_close(sums, whole, rtol=1e-6, atol=2e-6)
            made = torch.empty(2, 2, 3, 5, 11, dtype=dtype)
            arrays = lse, grad.numpy(), out, bias.numpy(), start, causal, 0.7
            interface.attention_gradient(*given, *arrays, *(numbers(x) for x in made), engine)
            for one, other in zip(made, right, strict=True):
                torch.testing.assert_close(one.double(), other, **near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_none_stays(dtype: torch.dtype) -> None:
    x = drawn(3, 40, dtype=dtype)
    for sign in (1, -1):
        x[1, 17], lse = sign * torch.tensor(torch.nan), torch.zeros(3)
        interface.log_sums(numbers(x), 0.0, numbers(lse))
        assert lse.isnan().tolist() == [False, True, False]
    x[2, 3], out = torch.inf, torch.zeros_like(x)
    interface.silu_product(*(numbers(part.view(-1)) for part in (x, x, out)))
    assert torch.equal(out.isnan(), x.isnan())
    assert out[2, 3] == torch.inf


def gradients(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The result of a function and the gradients of Σ result · weights."""
    given = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*given)
    grads = torch.autograd.grad(
        (y * drawn(*y.shape, dtype=torch.bfloat16, seed=99).to(y)).sum(), given
    )
    return [y.detach(), *grads]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "rope", "norm", "norm plus one"])
def test_gradients_are_those_of_autograd(name: str, dtype: torch.dtype, always: None) -> None:
    ops, x, up = TorchOps(), drawn(2, 33, 3, 20, dtype=dtype), drawn(2, 33, 3, 20, dtype=dtype)
    positions = torch.arange(33).expand(2, -1) * torch.tensor([[1], [3]])
    angles = ops.rope_angles(positions, tuple(10.0**-i for i in range(10)))
    weight = drawn(20, seed=4)

    def turned(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * angles[0] + torch.cat((-second, first), -1) * angles[1]

    offset = name == "norm plus one"
    made, expected, inputs = {
        "silu": (ops.silu_product, lambda a, b: F.silu(a) * b, (x, up)),
        "rope": (lambda y: ops.rope(y, angles), turned, (x,)),
    }.get(name) or (
        lambda y, w: rms_norm(y, w, 1e-6, plus_one=offset),
        lambda y, w: F.rms_norm(y, (20,), w + offset, 1e-6),
        (x, weight),
    )
    right = gradients(expected, *(one.double() for one in inputs))
    for found, true in zip(gradients(made, *inputs), right, strict=True):
        tolerance = NEAR[dtype] if found.dtype == dtype else 2e-3  # dw sums rounded gradients
        torch.testing.assert_close(found.double(), true, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 2.5])
@pytest.mark.parametrize("chunk", [1 << 30, 4 * 57 * 30])  # scores saved, and computed twice
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_vocabulary_loss(
    share: float, chunk: int, cap: float | None, dtype: torch.dtype, always: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch_impl, "PRODUCT_BYTES", 4 * 57 * 16)
    monkeypatch.setattr(torch_impl, "CPU_BLOCK_BYTES", 4 * 57 * 8)
    monkeypatch.setattr(torch_impl, "HAS_AMX", share == 1.0)
    counts = torch.rand(90, generator=torch.Generator().manual_seed(1)) < share
    targets = torch.where(counts, torch.arange(90) % 57, -1)

    def loss(implementation: str, *given: torch.Tensor) -> torch.Tensor:
        settings: Any = {"softcap": cap, "chunk_bytes": chunk, "implementation": implementation}
        nll, lse = linear_cross_entropy(*given, targets, **settings)
        return torch.stack((nll, lse * counts))

    inputs = drawn(90, 24, dtype=dtype), drawn(57, 24, dtype=dtype, seed=2)
    right = gradients(lambda *x: loss("reference", *x), *(one.double() for one in inputs))
    for found, true in zip(gradients(lambda *x: loss("eager", *x), *inputs), right, strict=True):
        assert found.is_contiguous()
        tolerance = 1e-5 if dtype == torch.float32 else 0.06
        torch.testing.assert_close(found.double(), true.double(), rtol=tolerance, atol=tolerance)


def test_a_second_pass_over_the_graph_of_the_loss(always: None) -> None:
    hidden, weight = drawn(9, 4).requires_grad_(), drawn(11, 4)
    nll, _ = linear_cross_entropy(hidden, weight, torch.arange(9))
    passes = [torch.autograd.grad(nll.sum(), hidden, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*passes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_that_of_torchs_operations(precision: str, monkeypatch: Any) -> None:
    spec = from_config(new_config("llama", hidden=32, layers=2, vocab=97, heads=4, kv_heads=2))
    ids = np.random.default_rng(0).integers(0, 97, (4, 24)).astype(np.int32)
    rows = {"input_ids": ids, "targets": np.roll(ids, -1, 1), "loss_mask": np.ones(ids.shape, "f4")}
    made = []
    for least in (1, 1 << 30):
        monkeypatch.setattr(torch_arrays, "LEAST", least)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        step = make_stepper("torch", spec, init_params(spec, 0), next_token_loss,
                            precision=precision)  # fmt: skip
        made.append(step.gradients(rows))
    near = 1e-6 if precision == "fp32" else 1e-2
    for name, gradient in made[0].items():
        np.testing.assert_allclose(gradient, made[1][name], atol=near, err_msg=name)
    unequal = [name for name in made[0] if not np.array_equal(made[0][name], made[1][name])]
    assert unequal  # the loops were used


def test_exact_operations_do_not_depend_on_the_size(always: None) -> None:
    spec = from_config(new_config("llama", hidden=32, layers=1, vocab=97, heads=4, kv_heads=2))
    exact = build_ops("torch", spec, exact=True)
    x, up, weight = drawn(1, 40, 3, 16), drawn(1, 40, 3, 16, seed=1), drawn(16)
    angles = exact.rope_angles(torch.arange(40)[None], tuple(2.0**-i for i in range(8)))
    whole = exact.rms_norm(x, weight, 1e-6), exact.rope(x, angles), exact.silu_product(x, up)
    torch_arrays.LEAST = 1 << 30
    plain = exact.rms_norm(x, weight, 1e-6), exact.rope(x, angles), exact.silu_product(x, up)
    assert all(torch.equal(one, other) for one, other in zip(whole, plain, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_decoding_uses_the_loops(dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ops, x, up = TorchOps(), drawn(3, 1, 4, 64, dtype=dtype), drawn(3, 1, 4, 64, seed=1).to(dtype)
    angles = ops.rope_angles(torch.tensor([[5], [0], [9]]), tuple(2.0**-i for i in range(32)))

    def results() -> list[torch.Tensor]:
        return [ops.rms_norm(x, drawn(64), 1e-6), ops.rope(x, angles), ops.silu_product(x, up)]

    plain, calls = results(), list[str]()
    for name in ("rms_norm", "rotate", "silu_product"):
        loop = getattr(interface, name)
        counted = lambda *given, name=name, loop=loop: (calls.append(name), loop(*given))  # noqa: E731
        monkeypatch.setattr(interface, name, counted)
    assert results() and not calls
    with torch.inference_mode():
        made = results()
    assert calls == ["rms_norm", "rotate", "silu_product"]
    for one, other in zip(made, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_cosines_and_sines_are_those_of_torch() -> None:
    angles = TorchOps().rope_angles
    given = torch.tensor([[5, 0, 900]]), (1.0, 0.25)
    torch.library.opcheck(torch.ops.sabia.cpu_cos_and_sin, (drawn(1, 3, 1, 4),))
    torch._dynamo.reset()
    made = torch.compile(angles, backend="aot_eager", fullgraph=True)(*given)
    assert all(map(torch.equal, made, angles(*given)))
