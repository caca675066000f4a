"""Attention that is not causal: every implementation that takes it, and refusals by name."""

from typing import Any

import numpy as np
import pytest

from sabia.kernels.attention.interface import attention, attention_mask
from sabia.kernels.runtime.dispatch import Unavailable

B, T, H, K, N = 2, 150, 4, 2, 16
SEGMENTS = np.repeat([[1, 2, 0], [3, 3, 4]], 50, axis=1).astype(np.int32)
CASES = {"whole": (None, None), "window": (None, 9), "documents": (SEGMENTS, 70)}
CASES |= {"packed": (SEGMENTS, None)}


def drawn() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((B, T, heads, N), np.float32) for heads in (H, K, K)]


def oracle(segments: np.ndarray | None, window: int | None) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in drawn())
    k, v = (np.repeat(x, H // K, 2) for x in (k, v))
    segments = np.ones((B, T), int) if segments is None else segments
    distance = np.abs(np.arange(T)[:, None] - np.arange(T))
    allowed = (segments[:, :, None] == segments[:, None]) & (distance < (window or T))
    scores = np.einsum("bthn,bshn->bhts", q, k) * N**-0.5
    weights = np.where(allowed[:, None], np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhts,bshn->bthn", weights, v)
    return np.where((segments > 0)[:, :, None, None], out, 0)


def computed(
    library: Any, name: str, implementation: str | None, start: int = 0, causal: bool = False
) -> np.ndarray:
    segments, window = CASES[name]
    q, k, v = (library(x) for x in drawn())
    given = None if segments is None else library(segments)
    shape: dict[str, Any] = {"segments": given, "window": window, "start": start}
    mask = attention_mask(q, T - start, T, **shape, causal=causal)
    if implementation == "flex":
        from sabia.kernels.attention.torch_impl import flex

        return np.asarray(flex(q[:, start:], k, v, mask, N**-0.5, None, None))
    return np.asarray(attention(q[:, start:], k, v, mask, implementation=implementation))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["reference", "library", "flex", None])
def test_torch(name: str, implementation: str | None) -> None:
    torch = pytest.importorskip("torch")
    for start in (0, 37):
        got = computed(torch.from_numpy, name, implementation, start)
        np.testing.assert_allclose(got, oracle(*CASES[name])[:, start:], atol=5e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["reference", "library"])
def test_jax(name: str, implementation: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    got = computed(jnp.asarray, name, implementation)
    np.testing.assert_allclose(got, oracle(*CASES[name]), atol=5e-6)


@pytest.mark.slow
def test_splash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TPU kernel that JAX carries, interpreted: documents and windows on both sides."""
    jnp = pytest.importorskip("jax.numpy")
    from sabia.kernels.attention.jax_impl import splash

    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    arrays = [jnp.asarray(x[:, :128]) for x in drawn()]
    for segments, window in ((None, None), (jnp.asarray(SEGMENTS[:, :128]), 40)):
        mask = attention_mask(arrays[0], 128, 128, segments=segments, window=window, causal=False)
        got = splash(*arrays, mask, N**-0.5, None, None)
        expected = attention(*arrays, mask, implementation="reference")
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_causal_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    with pytest.raises(Unavailable, match="causal"):
        computed(torch.from_numpy, "whole", "triton")
    with pytest.raises(Unavailable, match="causal"):
        computed(jnp.asarray, "whole", "pallas")
