"""OLMo 2 (arXiv 2501.00656): norms after each part only, and one norm over all heads of q and k."""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer, Norms
from sabia.core.spec.model import ModelSpec

NAMES = llama.NAMES | {"attn.post_norm": llama.LAYER + "post_attention_layernorm.weight"}
NAMES |= {"mlp.post_norm": llama.LAYER + "post_feedforward_layernorm.weight"} | llama.QK_NORMS


def read(fields: Fields) -> ModelSpec:
    """The model of an `olmo2` configuration."""
    fields.defaults(rms_norm_eps=1e-5)
    fields.expect("mlp_bias", (False,), False)
    mixer = replace(llama.attention(fields), qk_norm_whole=True)
    layer = Layer(mixer, llama.mlp(fields), Norms(pre=False, post=True))
    return llama.decoder(fields, (layer,) * fields.depth, NAMES)
