"""A tiny random Llama as spec and parameters, and token rows to calibrate it on."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="session")
def tiny() -> tuple[Any, dict[str, np.ndarray]]:
    """(spec, fp32 parameters) of 3 layers whose weights have a few large columns."""
    return _model(hidden=64, layers=3, heads=4, kv_heads=2, ffn=160)


@pytest.fixture(scope="session")
def wide() -> tuple[Any, dict[str, np.ndarray]]:
    """The same with 2 layers whose widths all groups of number formats divide."""
    return _model(hidden=128, layers=2, heads=4, kv_heads=2, ffn=256)


def _model(**shape: int) -> tuple[Any, dict[str, np.ndarray]]:
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config

    spec = from_config(new_config(**shape, vocab=300, tied=False))
    rng = np.random.default_rng(0)
    params = {}
    for name, array in hub.init_params(spec, 0).items():
        wide = array.ndim > 1
        factor = np.exp(rng.standard_normal(array.shape[-1])) if wide else 1.0
        size = 0.06 / array.std() if wide else 1.0  # whatever a fresh model starts with
        params[name] = (array * factor * size).astype(np.float32)
    return spec, params


@pytest.fixture(scope="session")
def token_rows() -> list[list[int]]:
    """40 rows of 10 to 40 ids with a skewed distribution."""
    rng = np.random.default_rng(1)
    return [np.minimum(rng.zipf(1.3, rng.integers(10, 41)), 299).tolist() for _ in range(40)]
