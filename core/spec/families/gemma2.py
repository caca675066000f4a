"""Gemma 2 (arXiv 2408.00118): norms around each part, capped scores and logits, local layers.

Every other layer has a sliding window. Norm weights are stored minus one, embeddings are multiplied
by sqrt(width), and scores are scaled by query_pre_attn_scalar instead of the head's size.
"""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Attention, GatedMlp, Layer, Norms
from sabia.core.spec.model import ModelSpec

NAMES = llama.NAMES | {
    "attn.post_norm": llama.LAYER + "post_attention_layernorm.weight",
    "mlp.norm": llama.LAYER + "pre_feedforward_layernorm.weight",
    "mlp.post_norm": llama.LAYER + "post_feedforward_layernorm.weight",
}
KINDS = ("sliding_attention", "full_attention")
NORMS = Norms(pre=True, post=True, offset=1.0)


def attention(fields: Fields) -> Attention:
    """Read the attention fields, except for the window."""
    fields.defaults(head_dim=256, query_pre_attn_scalar=256, num_key_value_heads=4)
    fields.expect("use_bidirectional_attention", (False,), False)
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    cap = fields.number("attn_logit_softcapping", None)
    return replace(llama.attention(fields), scale=scale, softcap=cap)


def mlp(fields: Fields) -> GatedMlp:
    """Read the feed-forward fields; if both names are given, `hidden_activation` is used."""
    fields.take("hidden_act", str, "")
    fields.expect("mlp_bias", (False,), False)
    return llama.mlp(fields, "hidden_activation", "gelu_pytorch_tanh")


def decoder(fields: Fields, layers: tuple[Layer, ...], names: dict[str, str]) -> ModelSpec:
    """Read the fields around the layers."""
    fields.defaults(tie_word_embeddings=True)
    cap = fields.number("final_logit_softcapping", None)
    spec = llama.decoder(fields, layers, names)
    return replace(spec, embed_scale=fields.hidden**0.5, norm_offset=1.0, logit_softcap=cap)


def read(fields: Fields) -> ModelSpec:
    """The model of a `gemma2` configuration."""
    fields.defaults(sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    fields.defaults(max_position_embeddings=8192)
    depth = fields.depth
    kinds = fields.each("layer_types", depth, KINDS, [KINDS[n % 2] for n in range(depth)])
    window = fields.size("sliding_window", None)
    full, feed = attention(fields), mlp(fields)
    mixers = {KINDS[0]: replace(full, window=window), KINDS[1]: full}
    layers = tuple(Layer(mixers[kind], feed, NORMS) for kind in kinds)
    return decoder(fields, layers, NAMES)
