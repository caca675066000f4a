"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783): pre-norm, grouped-query attention, SwiGLU.

Also the base of other families: their readers call `attention` and `decoder` and extend `NAMES`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from sabia.core.errors import UsageError
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Activation, Attention, GatedMlp, Layer
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.rope import read_rope
from sabia.core.spec.tensors import FileTemplate

LAYER = "model.layers.{layer}."
NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn.norm": LAYER + "input_layernorm.weight",
    "mlp.norm": LAYER + "post_attention_layernorm.weight",
}
NAMES |= {f"attn.{p}": LAYER + f"self_attn.{p}_proj.weight" for p in "qkvo"}
NAMES |= {f"attn.{p}_bias": LAYER + f"self_attn.{p}_proj.bias" for p in "qkvo"}
NAMES |= {f"mlp.{p}": LAYER + f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
NAMES |= {f"mlp.{p}_bias": LAYER + f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")}
QK_NORMS = {f"attn.{p}_norm": LAYER + f"self_attn.{p}_norm.weight" for p in "qk"}
ROTARY_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


def attention(
    fields: Fields,
    head_dim: int | None = None,
    theta: float = 10000.0,
    partial_rotary: bool = False,
    scaling: Mapping[str, Any] = MappingProxyType({}),
) -> Attention:
    """Read the attention fields.

    head_dim (None: hidden / heads), theta, scaling of the rotation: the family's defaults.
    """
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    size = fields.size("head_dim", head_dim or fields.hidden // heads)
    bias = fields.take("attention_bias", bool, False)
    fields.expect("attention_dropout", (0, 0.0), 0.0)
    if heads % kv_heads or size % 2:
        raise UsageError(
            f"config.json: {heads} heads, {kv_heads} key-value heads, head_dim {size} "
            "(expected heads divisible by key-value heads and an even head_dim)"
        )
    rope = read_rope(fields, size, theta, partial_rotary, scaling)
    return Attention(heads, kv_heads, size, size**-0.5, rope, qkv_bias=bias, output_bias=bias)


def decoder(
    fields: Fields,
    layers: tuple[Layer, ...],
    names: Mapping[str, FileTemplate],
    eps: float = 1e-6,
    eps_name: str = "rms_norm_eps",
) -> ModelSpec:
    """Read the fields around the layers and assemble the model; eps: the family's default."""
    return ModelSpec(
        family=fields.family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.hidden,
        layers=layers,
        norm_eps=fields.number(eps_name, eps),
        tied=fields.take("tie_word_embeddings", bool, False),
        init_std=fields.take("initializer_range", float, 0.02),
        max_positions=fields.positions,
        config={},
        names=names,
        ignored=(ROTARY_BUFFERS,),
    )


def mlp(fields: Fields, activation_name: str = "hidden_act", usual: str = "silu") -> GatedMlp:
    """Read the feed-forward fields."""
    activation = fields.expect(activation_name, get_args(Activation), usual)
    bias = fields.take("mlp_bias", bool, False)
    return GatedMlp(fields.size("intermediate_size"), activation, bias)


def read(fields: Fields) -> ModelSpec:
    """The model of a `llama` configuration."""
    layers = (Layer(attention(fields), mlp(fields)),) * fields.depth
    return decoder(fields, layers, NAMES)
