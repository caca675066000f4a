"""Parameters as a flax.nnx.State: the names and bits of every family, and gradients by them."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model.forward import hidden
from sabia.core.model.lora import LoraConfig, init_lora
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config

from .conftest import CONFIGS, perturbed

nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_bits_come_back(name: str) -> None:
    from sabia.core.model.nnx import host_params, params_of, state_of

    arrays = perturbed(from_config(CONFIGS[name]))
    narrow = {key: x.astype(ml_dtypes.bfloat16) if x.ndim > 1 else x for key, x in arrays.items()}
    state = state_of(narrow)
    assert isinstance(state, nnx.State) and state["layers"][1]["attn"]
    back = host_params(state)
    assert back.keys() == params_of(state).keys() == narrow.keys()
    for key, array in narrow.items():
        assert back[key].dtype == array.dtype and back[key].tobytes() == array.tobytes(), key


def test_adapters_lie_beside_their_matrices() -> None:
    from sabia.core.model.nnx import host_params, state_of

    spec = from_config(CONFIGS["qwen3-moe"])
    arrays = perturbed(spec) | init_lora(spec, LoraConfig(rank=2), 0)
    state = state_of(arrays)
    assert {"q", "q.lora_a", "q.lora_b"} <= set(state["layers"][0]["attn"])
    assert all(np.array_equal(x, arrays[name]) for name, x in host_params(state).items())
    assert host_params(state).keys() == arrays.keys()


def test_the_state_is_differentiated_as_a_tree() -> None:
    jax = pytest.importorskip("jax")
    from sabia.core.model.nnx import params_of, state_of

    spec, ops = from_config(CONFIGS["llama"] | {"num_hidden_layers": 1}), load_ops("jax")
    ids = np.arange(12).reshape(1, 12)
    arrays = ops.to_device(perturbed(spec), "float32")
    by_state = jax.grad(lambda s: (hidden(spec, params_of(s), ids, ops) ** 2).sum())(
        state_of(arrays)
    )
    by_name = jax.grad(lambda p: (hidden(spec, p, ids, ops) ** 2).sum())(arrays)
    for name, gradient in params_of(by_state).items():
        assert np.array_equal(gradient, by_name[name]), name


def test_a_dtype_that_jax_narrows_is_refused() -> None:
    from sabia.core.model.nnx import state_of

    with pytest.raises(UsageError, match="float64"):
        state_of({"embed": np.zeros((2, 2))})


def test_only_this_module_imports_flax_and_none_imports_optax() -> None:
    pattern = re.compile(r"^\s*(?:import|from) (flax|optax)\b", re.MULTILINE)
    importing = {
        str(path.relative_to(ROOT)): set(pattern.findall(path.read_text(encoding="utf-8")))
        for package in ("cli", "core", "kernels")
        for path in (ROOT / package).rglob("*.py")
    }
    assert {path: names for path, names in importing.items() if names} == {
        "core/model/nnx.py": {"flax"}
    }
