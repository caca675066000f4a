"""The chunked vocabulary loss and the other operations against plain double-precision NumPy."""

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest

from sabia.core.ops import base
from sabia.core.ops.base import Ops
from sabia.core.parallel.build_ops import load_ops

from .conftest import compiled

RANDOM = np.random.default_rng(11)
HIDDEN = RANDOM.standard_normal((2, 7, 24), np.float32)
WEIGHT = RANDOM.standard_normal((53, 24), np.float32)
TARGETS = RANDOM.integers(0, 53, (2, 7))
TARGETS[1, 3] = -1
GRADS = RANDOM.standard_normal((2, 2, 7), np.float32)  # of the loss, of the log-sum-exp


def expected(cap: float | None) -> tuple[np.ndarray, ...]:
    """(nll, logsumexp, d_hidden, d_weight) in double precision."""
    raw = HIDDEN.astype(float) @ WEIGHT.T.astype(float)
    z = raw if cap is None else cap * np.tanh(raw / cap)
    lse = np.log(np.exp(z).sum(-1))
    valid = TARGETS >= 0
    one_hot = np.eye(53)[np.maximum(TARGETS, 0)]
    nll = np.where(valid, lse - (z * one_hot).sum(-1), 0)
    p = np.exp(z - lse[..., None])
    g_nll = np.where(valid, GRADS[0], 0)[..., None]
    dz = g_nll * (p - one_hot) + GRADS[1][..., None] * p
    dz = dz if cap is None else dz * (1 - (z / cap) ** 2)
    return nll, lse, dz @ WEIGHT, np.einsum("btv,btd->vd", dz, HIDDEN)


def computed(ops: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """The same by a backend."""
    x = ops.to_device({"h": HIDDEN, "w": WEIGHT, "g": GRADS})
    targets = ops.integers(TARGETS, x["h"])

    def loss(h: Any, w: Any) -> Any:
        nll, lse = ops.linear_cross_entropy(h, w, targets, **options)
        return (nll * x["g"][0] + lse * x["g"][1]).sum(), (nll, lse)

    if ops.name == "jax":
        import jax

        value = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, outputs), grads = value(x["h"], x["w"])
    else:
        h, w = x["h"].requires_grad_(), x["w"].requires_grad_()
        total, outputs = loss(h, w)
        total.backward()
        grads = h.grad, w.grad
    return tuple(ops.to_numpy(dict(enumerate((*outputs, *grads)))).values())


@pytest.mark.parametrize("cap", [None, 2.5])
@pytest.mark.parametrize("chunk_bytes", [None, 4 * 53 * 4])  # all at once; 4 tokens of 14
def test_loss_and_gradients(
    cap: float | None, chunk_bytes: int | None, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk_bytes is not None:
        loss = partial(base._linear_cross_entropy, chunk_bytes=chunk_bytes)
        monkeypatch.setattr(base, "_linear_cross_entropy", loss)
    ours = computed(ops, softcap=cap)
    for mine, right in zip(ours, expected(cap), strict=True):
        assert mine.dtype == np.float32
        assert np.abs(mine - right).max() <= 2e-5 * np.abs(right).max()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_any_size_give_one_loss(
    seed: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from sabia.kernels.vocabulary_loss import torch_impl as module

    random = np.random.default_rng(seed)
    tokens, vocabulary, width = (int(random.integers(1, most)) for most in (90, 300, 20))
    cap = [None, 3.0][int(random.integers(2))]
    h, w = (torch.tensor(random.standard_normal((n, width)), dtype=getattr(torch, dtype))
            for n in (tokens, vocabulary))  # fmt: skip
    targets = torch.tensor(random.integers(-1, vocabulary, tokens))
    leaves = h.requires_grad_(), w.requires_grad_()

    def gradients(block: int, product: int) -> list[Any]:
        monkeypatch.setattr(module, "CPU_BLOCK_BYTES", block)
        monkeypatch.setattr(module, "PRODUCT_BYTES", product)
        nll, lse = module.linear_cross_entropy(*leaves, targets, cap, 1 << 28)
        return [nll.detach(), *torch.autograd.grad((nll + 0.1 * lse).sum(), leaves)]

    whole = gradients(1 << 30, 1 << 30)
    rows = 4 * vocabulary
    bound = 2e-5 if dtype == "float32" else 2e-2
    for block, product in ((rows, rows), (3 * rows, 7 * rows), (5 * rows, rows), (1, 1)):
        for ours, right in zip(gradients(block, product), whole, strict=True):
            assert (ours - right).abs().max() <= bound * right.abs().max()


def test_a_loss_can_be_differentiated_twice_over_the_same_graph() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    torch_ops = load_ops("torch")
    x = torch_ops.to_device({"h": HIDDEN, "w": WEIGHT})
    h = x["h"].requires_grad_()
    nll, _ = torch_ops.linear_cross_entropy(h, x["w"], torch_ops.integers(TARGETS, h))
    nll.sum().backward(retain_graph=True)
    first = h.grad.clone()
    nll.sum().backward()
    assert (h.grad == 2 * first).all()


def test_long_rows_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    ops = load_ops("torch")
    loss = partial(base._linear_cross_entropy, chunk_bytes=32 * 4000)
    monkeypatch.setattr(base, "_linear_cross_entropy", loss)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    h = torch.zeros(1, 512, 8, requires_grad=True)
    w = torch.zeros(1000, 8, requires_grad=True)
    with Sizes():
        nll, _ = ops.linear_cross_entropy(h, w, torch.zeros(1, 512, dtype=torch.long))
        nll.sum().backward()
    assert largest <= 32 * 4000 < 512 * 4000


@pytest.mark.parametrize("masked", [False, True])
def test_capped_attention(masked: bool, ops: Any) -> None:
    random = np.random.default_rng(2)
    q = random.standard_normal((2, 6, 6, 8), np.float32)
    k, v = random.standard_normal((2, 2, 6, 3, 8), np.float32)
    segments = np.array([[1, 1, 2, 2, 2, 0], [1] * 6]) if masked else np.ones((2, 6), int)

    def run(q: Any, k: Any, v: Any) -> Any:
        seen = ops.integers(segments, q) if masked else None
        mask = ops.attention_mask(q[:, :, 0], 6, segments=seen)
        return ops.attention(q, k, v, mask, scale=0.7, softcap=1.5)

    x = ops.to_device({"q": q, "k": k, "v": v})
    ours = ops.to_numpy({"x": compiled(ops, run)(x["q"], x["k"], x["v"])})["x"]
    scores = np.einsum("bthn,bshn->bhts", q, k.repeat(2, axis=2)) * 0.7
    allowed = np.tri(6, dtype=bool) & (segments[:, :, None] == segments[:, None, :])
    weights = np.exp(1.5 * np.tanh(scores / 1.5)) * allowed[:, None]
    weights /= weights.sum(-1, keepdims=True)
    right = np.einsum("bhts,bshn->bthn", weights, v.repeat(2, axis=2))
    real = segments != 0
    assert np.abs(ours - right)[real].max() <= 1e-5


def test_topk_descends_and_known_max_costs_nothing(ops: Any) -> None:
    x = ops.to_device({"x": WEIGHT})["x"]
    values, indices = (ops.to_numpy({"x": part})["x"] for part in ops.topk(x, 5))
    assert (values == -np.sort(-WEIGHT, axis=-1)[:, :5]).all()
    assert (np.take_along_axis(WEIGHT, indices, -1) == values).all()
    assert ops.known_max(ops.integers([[3, 9]], x)) in (None, 9)


LIBRARY = {"silu", "sigmoid", "softplus", "exp", "where", "topk", "stop_gradient"}


def test_both_backends_offer_the_whole_vocabulary(ops: Any) -> None:
    asked = {n: f for n, f in vars(Ops).items() if not n.startswith("_") and callable(f)}
    assert len(asked) >= 20 and ops.name in ("torch", "jax")
    for name, function in asked.items():
        wanted = list(inspect.signature(function).parameters.values())[1:]
        if not str(getattr(ops, name).__module__).startswith("sabia"):
            assert name in LIBRARY, name  # the library's own function, called by place
            assert all(p.kind == p.POSITIONAL_OR_KEYWORD for p in wanted), name
            continue
        given = list(inspect.signature(getattr(ops, name)).parameters.values())
        assert [(p.name, p.kind) for p in given[: len(wanted)]] == [
            (p.name, p.kind) for p in wanted
        ], name
        assert all(p.default is not p.empty for p in given[len(wanted) :]), name
