"""Small models of three gated delta nets to one gated attention."""

from typing import Any

import numpy as np

from sabia.core.spec import from_config, new_config
from sabia.core.spec.model import ModelSpec

SHAPE = {"hidden": 48, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 80, "vocab": 211,
         "context": 512, "tied": False}  # fmt: skip
HYBRID = new_config("llama", **SHAPE) | {
    "rope_theta": None,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 44,
           "shared_expert_intermediate_size": 52}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-next": HYBRID | MIXTURE | {"model_type": "qwen3_next"},
    "qwen3.5": HYBRID | {"model_type": "qwen3_5_text"},
}


def hybrid(name: str, **sizes: Any) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """(spec, parameters that make the model sure of nothing by accident)."""
    spec, draw = from_config(CONFIGS[name] | sizes), np.random.default_rng(0)
    params = {}
    for tensor in spec.tensors():
        scale = 1.2 * tensor.shape[-1] ** -0.5 if len(tensor.shape) > 1 else 0.2
        noise = draw.standard_normal(tensor.shape) * scale + (tensor.init.kind == "ones")
        params[tensor.name] = noise.astype(np.float32)
    return spec, params
