"""Qwen3 mixture of experts (arXiv 2505.09388): Qwen3 whose layers route to experts.

Every `decoder_sparse_step`-th layer has experts unless `mlp_only_layers` names it; the others are
dense. The softmax runs over all experts, and the chosen are normalised where `norm_topk_prob`.
"""

from dataclasses import replace

from sabia.core.errors import UsageError
from sabia.core.spec.experts import Experts, Router
from sabia.core.spec.families import llama, qwen3
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer
from sabia.core.spec.model import ModelSpec

_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."
NAMES = qwen3.NAMES | {"mlp.router": _MLP + "gate.weight"}
NAMES |= {f"mlp.experts.{p}": f"{_EXPERT}{p}_proj.weight" for p in ("gate", "up", "down")}


def training_remarks(fields: Fields) -> None:
    """Take the coefficients of a loss that only training adds; ours are options of the run."""
    fields.take("router_aux_loss_coef", float, 0.0)
    fields.take("output_router_logits", bool, False)


def router(fields: Fields, experts: int, chosen: int, **settings: object) -> Router:
    """A router; refuses to choose more experts than there are."""
    if chosen > experts:
        raise UsageError(
            f"config.json: num_experts_per_tok is {chosen} (expected at most the {experts} experts)"
        )
    return replace(Router(experts, chosen), **settings)


def sparse(fields: Fields, depth: int) -> tuple[bool, ...]:
    """Take the fields that say which layers have experts."""
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", list, [])
    return tuple((index + 1) % step == 0 and index not in dense for index in range(depth))


def read(fields: Fields) -> ModelSpec:
    """The model of a `qwen3_moe` configuration."""
    width = fields.size("hidden_size")
    mixer = replace(llama.attention(fields, width), qk_norm=True)
    fields.expect("mlp_bias", (False,), False)
    dense = llama.mlp(fields)
    depth = fields.size("num_hidden_layers")
    count = fields.size("num_experts", fields.size("num_local_experts", 128))  # either name
    chosen = fields.size("num_experts_per_tok", 8)
    normalised = fields.take("norm_topk_prob", bool, False)
    experts = Experts(
        router(fields, count, chosen, normalised=normalised), fields.size("moe_intermediate_size")
    )
    training_remarks(fields)
    windows = qwen3.windows(fields, depth)
    layers = tuple(
        Layer(replace(mixer, window=window), experts if routed else dense)
        for window, routed in zip(windows, sparse(fields, depth), strict=True)
    )
    return llama.decoder(fields, width, layers, NAMES)
