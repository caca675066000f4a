"""Cases of attention that every implementation must agree on, and an oracle in NumPy (fp64)."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """Shapes: B batch, T queries of S keys from `start`, H heads, K key-value heads, N and M."""

    name: str
    B: int = 2
    T: int = 37
    S: int = 37
    H: int = 4
    K: int = 2
    N: int = 20
    M: int = 20
    start: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    documents: bool = True
    scale: float | None = None

    def arrays(self, seed: int = 0) -> dict[str, Any]:
        """q, k, v, grad and perhaps sinks (fp32), segments (int32) or None."""
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        B, T, S = self.B, self.T, self.S
        return {
            "q": normal(B, T, self.H, self.N),
            "k": normal(B, S, self.K, self.N),
            "v": normal(B, S, self.K, self.M),
            "grad": normal(B, T, self.H, self.M),
            "sinks": normal(self.H) if self.sinks else None,
            "segments": documents(rng, B, S) if self.documents else None,
        }


def documents(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Runs of 1.. of random lengths; the first row ends in padding, the last is full."""
    result = np.zeros((rows, length), np.int32)
    for row in range(rows):
        end = length - 5 if row == 0 else length
        cuts = np.sort(rng.choice(np.arange(1, end), size=3, replace=False))
        result[row, :end] = 1 + np.searchsorted(cuts, np.arange(end), side="right")
    return result


CASES = [
    Case("causal", documents=False),
    Case("documents"),
    Case("window", window=7),
    Case("window without documents", window=5, documents=False),
    Case("cap", softcap=3.0, N=36, M=36),
    Case("sinks", sinks=True, K=1),
    Case("everything", window=9, softcap=2.0, sinks=True, H=6, scale=0.3),
    Case("latent", H=2, K=2, N=24, M=16, B=1),
    Case("slice", T=13, S=37, start=17, window=20, softcap=4.0, sinks=True, N=24),
    Case("slice of padding", T=8, S=40, start=32, B=1),
    Case("a multiple of blocks", T=32, S=32, N=16, M=16),
]


def oracle(case: Case, data: dict[str, Any]) -> np.ndarray:
    """The definition in fp64, one query at a time: [B, T, H, M]."""
    q, k, v, segments = (data[n] for n in ("q", "k", "v", "segments"))
    out = np.zeros((case.B, case.T, case.H, case.M))
    scale = case.N**-0.5 if case.scale is None else case.scale
    for b, t, h in np.ndindex(case.B, case.T, case.H):
        p, group = case.start + t, h * case.K // case.H
        if segments is not None and segments[b, p] == 0:
            continue
        keys = [
            j
            for j in range(p + 1)
            if (segments is None or segments[b, j] == segments[b, p])
            and (case.window is None or p - j < case.window)
        ]
        s = scale * (k[b, keys, group].astype(np.float64) @ q[b, t, h])
        s = s if case.softcap is None else case.softcap * np.tanh(s / case.softcap)
        weight = np.exp(s)
        rest = np.exp(np.float64(data["sinks"][h])) if case.sinks else 0.0
        out[b, t, h] = weight @ v[b, keys, group] / (weight.sum() + rest)
    return out


def interpreted(fast: set[str]) -> list[Any]:
    """CASES for an interpreter: all but these are marked slow."""
    import pytest

    assert fast <= {case.name for case in CASES}
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in fast else [pytest.mark.slow])
        for case in CASES
    ]
