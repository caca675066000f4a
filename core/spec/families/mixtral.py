"""Mixtral (arXiv 2401.04088): Llama with MoE layers whose top-2 scores are normalized."""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.families.qwen3_moe import read_router_losses
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Experts, Layer, Router
from sabia.core.spec.model import ModelSpec

_MLP = llama.LAYER + "block_sparse_moe."
_EXPERT = _MLP + "experts.{expert}."
NAMES = llama.NAMES | {
    "mlp.router": _MLP + "gate.weight",
    "mlp.experts.gate": _EXPERT + "w1.weight",
    "mlp.experts.up": _EXPERT + "w3.weight",
    "mlp.experts.down": _EXPERT + "w2.weight",
}


def read(fields: Fields) -> ModelSpec:
    """The model of a `mixtral` configuration."""
    fields.defaults(num_key_value_heads=8, max_position_embeddings=131072)
    fields.expect("attention_bias", (False,), False)
    mixer = llama.attention(fields, theta=1e6)
    window = fields.size("sliding_window", None)
    fields.expect("hidden_act", ("silu",), "silu")
    fields.expect("router_jitter_noise", (0, 0.0), 0.0)
    chosen, count = fields.size("num_experts_per_tok", 2), fields.size("num_local_experts", 8)
    experts = Experts(Router(count, chosen), fields.size("intermediate_size"))
    read_router_losses(fields)
    layers = (Layer(replace(mixer, window=window), experts),) * fields.depth
    return llama.decoder(fields, layers, NAMES, eps=1e-5)
