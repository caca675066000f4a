"""Small awkward checkpoints: head_dim ≠ width/heads, odd vocabulary, 3 key-value heads.

Every tensor is drawn anew, norms and biases too, with matrices large enough (1.2/sqrt(fan-in))
that attention is far from uniform.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.parallel import build_ops
from sabia.core.spec import ModelSpec, from_config, new_config

from .mixtures import MIXTURES

SHAPE = {"hidden": 72, "layers": 2, "vocab": 293, "heads": 6, "kv_heads": 3, "head_dim": 20}
SHAPE |= {"ffn": 104, "context": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ALTERNATING = ["sliding_attention", "full_attention"]
GEMMA = new_config("llama", **SHAPE) | {"query_pre_attn_scalar": 28, "sliding_window": 7}
GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "layer_types": ALTERNATING}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
HYBRID = new_config("llama", **SHAPE, tied=False) | {
    "rope_theta": None,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.3},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 44}
MIXTURE |= {"shared_expert_intermediate_size": 52}
HURRY = {"xla_backend_optimization_level": 0}  # half the time of tests is compilation
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": new_config("llama", **SHAPE, tied=False, rope_theta=30000.0),
    "llama3": new_config("llama", **SHAPE, rope_theta=5e5) | {"rope_scaling": LLAMA3},
    "llama-bias": new_config("llama", **SHAPE)
    | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}
    | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen3": new_config("qwen3", **SHAPE, tied=False),
    "qwen3-window": new_config("qwen3", **SHAPE)
    | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "mistral": new_config("llama", **SHAPE) | {"model_type": "mistral", "sliding_window": 7},
    "qwen2": new_config("llama", **SHAPE)
    | {"model_type": "qwen2", "attention_bias": None, "use_sliding_window": True}
    | {"sliding_window": 7, "max_window_layers": 1},
    "gemma": new_config("llama", **SHAPE) | {"model_type": "gemma", "hidden_act": "gelu"},
    "gemma2": GEMMA
    | {"model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3": GEMMA
    | {"model_type": "gemma3_text", "rope_theta": None, "rope_parameters": GEMMA3_ROPE},
    "olmo2": new_config("llama", **SHAPE, tied=False) | {"model_type": "olmo2", "head_dim": 12},
    "qwen3-next": HYBRID | MIXTURE | {"model_type": "qwen3_next"},
    "qwen3.5": HYBRID | {"model_type": "qwen3_5_text", "attention_bias": True},
    "qwen3.5-moe": HYBRID | MIXTURE | {"model_type": "qwen3_5_moe_text", "intermediate_size": None},
}
# rows of the tests have 33 tokens: LONG is beyond the original context, SHORT within it
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
STRETCHES = [1.0 + 0.3 * pair for pair in range(9)]
LONGROPE = {"rope_type": "longrope", "short_factor": STRETCHES[::-1], "long_factor": STRETCHES}
PHI = new_config("llama", **SHAPE, tied=False) | {"model_type": "phi3", "sliding_window": 7}
PHI |= {"architectures": ["Phi3ForCausalLM"], "num_attention_heads": 3, "pad_token_id": 0}
PHI = {name: value for name, value in PHI.items() if name not in ("head_dim", "rope_theta")}
CONFIGS |= {
    f"{name}-{reach}": CONFIGS["llama"]
    | {"rope_theta": None, "rope_parameters": DYNAMIC, "max_position_embeddings": context}
    for name, reach, context in (("dynamic", "long", 20), ("dynamic", "short", 64))
}
CONFIGS |= {
    f"phi3-{reach}": PHI
    | {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75}}
    | {"original_max_position_embeddings": original, "max_position_embeddings": 256}
    for reach, original in (("long", 20), ("short", 64))
}
CONFIGS |= MIXTURES


def perturbed(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters that make every part of the model matter."""
    random = np.random.default_rng(seed)
    params = {}
    for tensor in spec.tensors():
        noise = random.standard_normal(tensor.shape, np.float32)
        scale = np.float32(1.2 * tensor.shape[-1] ** -0.5 if len(tensor.shape) > 1 else 0.2)
        params[tensor.name] = noise * scale + np.float32(tensor.init.kind == "ones")
    return params


@pytest.fixture(scope="session", params=CONFIGS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A model directory of each configuration."""
    spec = from_config(CONFIGS[request.param])
    path = tmp_path_factory.mktemp("models") / request.param
    hub.save_model(path, spec, perturbed(spec))
    yield path


@pytest.fixture(params=build_ops.BACKENDS)
def ops(request: pytest.FixtureRequest) -> Any:
    """Each backend's operations."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return build_ops.load_ops(request.param)


def compiled(ops: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as callers run it: jitted under jax (compiled in a hurry), eager under torch."""
    if ops.name == "torch":
        return function
    import jax

    return jax.jit(function, compiler_options=HURRY)


def states(spec: ModelSpec, params: Any, ids: Any, ops: Any, **rows: Any) -> np.ndarray:
    """`forward.hidden` as a NumPy array."""
    run = compiled(ops, lambda params, ids, rows: forward.hidden(spec, params, ids, ops, **rows))
    return ops.to_numpy({"x": run(params, ids, rows)})["x"]


@pytest.fixture
def tiny() -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """(spec, parameters) of a Qwen3 of one layer."""
    spec = from_config(CONFIGS["qwen3"] | {"num_hidden_layers": 1})
    return spec, perturbed(spec)
