"""What tests of meshes share: small models whose sizes fit many meshes, batches, and comparisons.

The sizes are awkward (head_dim is not width/heads, an odd vocabulary, widths that are no powers of
two) but divide by 2 where a mesh splits them. Rows are packed, and documents cross every boundary.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from sabia.core.model.forward import pool_weights
from sabia.core.model.init import init_params
from sabia.core.spec import ModelSpec, from_config, new_config
from sabia.core.train.losses.classification import classification_loss
from sabia.core.train.losses.next_token import next_token_loss

LENGTH = 24
SHAPE = {"hidden": 36, "layers": 2, "vocab": 131, "heads": 6, "kv_heads": 2, "head_dim": 10}
SHAPE |= {"ffn": 44, "context": 64}
LLAMA = new_config("llama", **SHAPE, tied=False)
MOE = {k: v for k, v in new_config("llama", **SHAPE).items() if k != "attention_bias"}
MOE |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
MOE |= {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}

HYBRID = LLAMA | {"model_type": "qwen3_5_text", "rope_theta": None}
HYBRID |= {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.6}}
HYBRID |= {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
HYBRID |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
HYBRID |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5}
WITHOUT_GROUPS = {k: v for k, v in SHAPE.items() if k != "kv_heads"}
# fsdp splits the latent of keys and values (12), and cannot split that of queries (17)
LATENT = new_config("deepseek_v3", **WITHOUT_GROUPS, experts=6, chosen=2, expert_ffn=22, shared=2)
LATENT |= {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "kv_lora_rank": 12}
LATENT |= {"qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 9, "q_lora_rank": 17}
SINKS = new_config("mixtral", **SHAPE, experts=6, chosen=2, expert_ffn=22)
SINKS |= {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "sliding_window": 7}
SINKS |= {"attention_bias": True, "swiglu_limit": 0.5}
ENCODER = {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}
ENCODER |= {"vocab_size": 130, "hidden_size": 36, "intermediate_size": 22, "pad_token_id": 0}
ENCODER |= {"num_hidden_layers": 2, "num_attention_heads": 6, "local_attention": 8}
ENCODER |= {"max_position_embeddings": 64, "initializer_range": 1 / 6, "attention_bias": True}
LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}, "classifier_pooling": "mean"}
LABELS |= {"architectures": ["ModernBertForSequenceClassification"]}
NORMED = LLAMA | {"model_type": "olmo2", "head_dim": 6}
# rotations by the length of each document; rows have documents within and beyond 9 tokens
DYNAMIC = LLAMA | {"rope_theta": None, "max_position_embeddings": 9}
DYNAMIC |= {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}}
STRETCHES = [1.0 + 0.4 * pair for pair in range(5)]
LONGROPE = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "rope_theta")}
LONGROPE |= {"model_type": "phi3", "hidden_size": 60, "original_max_position_embeddings": 9}
LONGROPE |= {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}}
LONGROPE["rope_parameters"] |= {"short_factor": STRETCHES[::-1], "long_factor": STRETCHES}


def models() -> dict[str, dict[str, Any]]:
    """Name → config.json of each kind of model."""
    return {"dense": LLAMA, "tied": LLAMA | {"vocab_size": 130, "tie_word_embeddings": True},
            "moe": MOE, "hybrid": HYBRID, "latent": LATENT, "sinks": SINKS,
            "normed": NORMED, "encoder": ENCODER,
            "dynamic": DYNAMIC, "longrope": LONGROPE,
            "classifier": ENCODER | LABELS}  # fmt: skip


def loss(spec: ModelSpec) -> Callable[..., Any]:
    """The loss that a model is trained by; an encoder's targets are in sight."""
    if spec.classifier is None:
        return next_token_loss
    return partial(classification_loss, problem="single_label_classification")


def model(name: str) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """(spec, parameters) of a model by name."""
    spec = from_config(models()[name])
    params = init_params(spec, 3)
    for key in params:  # states that fade fast make gradients that fp32 knows to 1e-5 only
        if key.endswith("a_log"):
            params[key] = np.linspace(-1.2, 0, params[key].size, dtype=np.float32)
    return spec, params


def batch(spec: ModelSpec, step: int, rows: int = 8, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Packed rows of three documents each, with padding behind the last."""
    draw = np.random.default_rng(step)
    ids = np.cumsum(draw.integers(0, 5, (rows, length)), 1) % spec.vocab_size
    edges = np.sort(draw.permuted(np.tile(np.arange(2, length - 2), (rows, 1)), axis=1)[:, :2], 1)
    column = np.arange(length)
    segments = 1 + (column >= edges[:, :1]) + (column >= edges[:, 1:])
    first = np.where(segments == 1, 0, np.where(segments == 2, edges[:, :1], edges[:, 1:]))
    padding = column >= length - (1 + np.arange(rows)[:, None] % 2) * (length // LENGTH)
    follows = np.zeros(ids.shape, np.float32)
    follows[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & ~padding[:, 1:]
    if spec.classifier is not None:
        return labelled(ids, spec)
    return {
        "input_ids": ids.astype(np.int32),
        "targets": np.roll(ids, -1, 1).astype(np.int32),
        "loss_mask": follows,
        "segments": np.where(padding, 0, segments).astype(np.int32),
        "positions": np.where(padding, 0, column - first).astype(np.int32),
        "source": np.eye(2, dtype=np.float32)[np.arange(rows) % 2],
    }


def labelled(ids: np.ndarray, spec: ModelSpec) -> dict[str, np.ndarray]:
    """A document a row, of about half of its tokens or more, whose label is in its ids."""
    assert spec.classifier is not None
    length = ids.shape[1]
    size = length - np.arange(len(ids)) * 3 % 11 * (length // LENGTH)
    inside = np.arange(length) < size[:, None]
    return {
        "input_ids": np.where(inside, ids, 0).astype(np.int32),
        "segments": inside.astype(np.int32),
        "positions": np.where(inside, np.arange(length), 0).astype(np.int32),
        "pool": pool_weights(size, length, spec.classifier.pooling),
        "labels": np.eye(spec.classifier.labels, dtype=np.float32)[ids[:, 0] % 3],
        "loss_mask": 1 + (ids[:, :1] % 2).astype(np.float32),
        "tokens": size[:, None].astype(np.float32),
        "source": np.eye(2, dtype=np.float32)[np.arange(len(ids)) % 2],
    }


def apart(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> dict[str, float]:
    """|a - b| / |a| of each array (2-norms), absolute where a is 0."""
    assert set(one) == set(other)
    return {
        name: float(np.linalg.norm(a - other[name]) / (np.linalg.norm(a) or 1.0))
        for name, a in one.items()
    }
