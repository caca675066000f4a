"""Qwen3 MoE (arXiv 2505.09388): Qwen3 with MoE layers.

Every `decoder_sparse_step`-th layer has experts unless `mlp_only_layers` names it; the others are
dense. The softmax is over all experts; with `norm_topk_prob` the selected scores are normalized.
"""

from dataclasses import replace

from sabia.core.spec.families import llama, qwen3
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Activation, Experts, Layer, Router
from sabia.core.spec.model import ModelSpec

_MLP = llama.LAYER + "mlp."
_EXPERT = _MLP + "experts.{expert}."
NAMES = qwen3.NAMES | {"mlp.router": _MLP + "gate.weight"}
NAMES |= {f"mlp.experts.{p}": f"{_EXPERT}{p}_proj.weight" for p in ("gate", "up", "down")}


def read_router_losses(fields: Fields) -> None:
    """Read the coefficients of router losses, which are not used: ours are options of the run."""
    fields.take("router_aux_loss_coef", float, 0.0)
    fields.take("output_router_logits", bool, False)
    fields.take("aux_loss_alpha", float, 0.0)
    fields.take("seq_aux", bool, False)


def sparse(fields: Fields) -> tuple[bool, ...]:
    """Read which layers are MoE layers."""
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", list, [])
    return tuple((index + 1) % step == 0 and index not in dense for index in range(fields.depth))


def experts(
    fields: Fields,
    count: int,
    chosen: int,
    width: int,
    activation: Activation = "silu",
    normalised: bool = False,
) -> Experts:
    """Read the fields of the routed experts; the numbers and `normalised` are defaults."""
    count = fields.size("num_experts", count, alias="num_local_experts")
    chosen = fields.size("num_experts_per_tok", chosen)
    normalised = fields.take("norm_topk_prob", bool, normalised)
    inner = fields.size("moe_intermediate_size", width)
    read_router_losses(fields)
    return Experts(Router(count, chosen, normalised=normalised), inner, activation)


def read(fields: Fields) -> ModelSpec:
    """The model of a `qwen3_moe` configuration."""
    fields.defaults(num_key_value_heads=4)
    window = qwen3.window(fields)  # of all layers, as in transformers
    fields.take("max_window_layers", int, None)
    kind = qwen3.KINDS[window is not None]
    fields.each("layer_types", fields.depth, (kind,), [kind] * fields.depth)
    mixer = replace(llama.attention(fields), qk_norm=True, window=window)
    for name, only in (("qkv_bias", False), ("use_qk_norm", True), ("mlp_bias", False)):
        fields.expect(name, (only,), only)
    fields.expect("shared_expert_intermediate_size", (0,), 0)
    dense = llama.mlp(fields)
    moe = experts(fields, 128, 8, 768, dense.activation)
    layers = tuple(Layer(mixer, moe if routed else dense) for routed in sparse(fields))
    return llama.decoder(fields, layers, NAMES)
