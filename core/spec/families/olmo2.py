"""OLMo 2 (arXiv 2501.00656): norms behind each part only, and over all heads of q and k at once."""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer, Norms
from sabia.core.spec.model import ModelSpec

_LAYER = "model.layers.{layer}."
NAMES = llama.NAMES | {
    "attn.post_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp.post_norm": _LAYER + "post_feedforward_layernorm.weight",
    "attn.q_norm": _LAYER + "self_attn.q_norm.weight",
    "attn.k_norm": _LAYER + "self_attn.k_norm.weight",
}


def read(fields: Fields) -> ModelSpec:
    """The model of an `olmo2` configuration."""
    fields.defaults(rms_norm_eps=1e-5)
    fields.expect("mlp_bias", (False,), False)
    width = fields.size("hidden_size")
    mixer = replace(llama.attention(fields, width), qk_norm_whole=True)
    layer = Layer(mixer, llama.mlp(fields), Norms(pre=False, post=True))
    layers = (layer,) * fields.size("num_hidden_layers")
    return llama.decoder(fields, width, layers, NAMES)
