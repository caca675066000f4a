"""Attention in JAX: reference against a NumPy oracle; XLA, splash attention and the Pallas kernel
(both interpreted on CPU) against the reference, values and every gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, Case, interpreted, oracle

from sabia.kernels.attention import jax_impl
from sabia.kernels.attention.interface import attention, attention_mask, choose_attention
from sabia.kernels.runtime.dispatch import Unavailable

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALLAS_INTERPRET", "1")


def run(
    case: Case, implementation: str, dtype: Any = jnp.float32, traced: bool = False
) -> list[np.ndarray]:
    data = {n: None if x is None else jnp.asarray(x) for n, x in case.arrays().items()}
    q, k, v, grad = (data[n].astype(dtype) for n in ("q", "k", "v", "grad"))
    segments = data["segments"]

    def attend(q: Any, k: Any, v: Any, sinks: Any, start: Any) -> Any:
        mask = attention_mask(q, case.T, case.S, segments=segments, start=start, window=case.window)
        if implementation == "splash":
            scale = case.N**-0.5 if case.scale is None else case.scale
            return jax_impl.splash(q, k, v, mask, scale, case.softcap, sinks)
        return attention(
            q, k, v, mask, scale=case.scale, softcap=case.softcap, sinks=sinks,
            implementation=implementation,
        )  # fmt: skip

    @jax.jit
    def both(sinks: Any, start: Any) -> Any:
        start = start if traced else case.start
        out, pull = jax.vjp(lambda *x: attend(*x, start), q, k, v, sinks)
        return [out, *pull(grad)]

    results = both(data["sinks"], jnp.int32(case.start))
    return [np.asarray(x, np.float32) for x in results if x is not None]


def agree(got: list[np.ndarray], expected: list[np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        size = max(np.abs(other).max(), 1e-3)
        np.testing.assert_allclose(one / size, other / size, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", interpreted({"window", "everything", "slice of padding"}))
def test_reference_is_the_definition(case: Case) -> None:
    got = run(case, "reference")[0]
    np.testing.assert_allclose(got, oracle(case, case.arrays()), atol=5e-6)


@pytest.mark.parametrize("case", interpreted(set()))
def test_pallas_agrees(case: Case) -> None:
    agree(run(case, "pallas"), run(case, "reference"))


def test_pallas_takes_a_traced_start() -> None:
    case = next(c for c in CASES if c.name == "slice")
    agree(run(case, "pallas", traced=True), run(case, "reference"))


@pytest.mark.slow
def test_pallas_in_bfloat16() -> None:
    """Within 2 % of the largest value: p and ds are rounded to bfloat16 before products."""
    agree(run(CASES[6], "pallas", jnp.bfloat16), run(CASES[6], "reference"), 2e-2)


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[9]], ids=lambda c: c.name)
def test_library_agrees(case: Case) -> None:
    agree(run(case, "library"), run(case, "reference"))


SPLASH = [
    Case("documents", B=2, T=128, S=256, start=128, H=2, K=1, N=16, M=16),
    Case("everything", T=256, S=256, H=2, K=1, N=24, M=16, window=70, softcap=2.0, sinks=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLASH, ids=lambda c: c.name)
def test_splash_agrees(case: Case) -> None:
    agree(run(case, "splash"), run(case, "reference"))


def test_choice_is_said_and_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jnp.zeros((1, 128, 2, 16))
    mask = attention_mask(q, 128, 128)
    assert choose_attention(q, q, q, mask).implementation == "library"
    assert choose_attention(q, q, q, mask, softcap=1.0).implementation == "reference"
    with pytest.raises(Unavailable, match="cap or sinks"):
        attention(q, q, q, mask, softcap=1.0, implementation="library")
    monkeypatch.delenv("PALLAS_INTERPRET")
    with pytest.raises(Unavailable, match="PALLAS_INTERPRET=1"):
        attention(q, q, q, mask, implementation="pallas")
    monkeypatch.setattr(jax_impl, "jax_platform", lambda: "tpu")
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    assert choose_attention(q, q, q, mask, softcap=1.0).reason.startswith("splash")
    odd = attention_mask(q, 100, 128)
    assert choose_attention(q[:, :100], q, q, odd).implementation == "pallas"
