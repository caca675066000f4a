"""Gemma (arXiv 2403.08295): Llama with GELU, scaled embeddings, and norm weights stored minus one.

`hidden_act` is taken as the tanh approximation, which older files call `gelu`.
"""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer, Norms
from sabia.core.spec.model import ModelSpec


def read(fields: Fields) -> ModelSpec:
    """The model of a `gemma` configuration."""
    fields.defaults(head_dim=256, num_key_value_heads=16, max_position_embeddings=8192)
    fields.defaults(tie_word_embeddings=True)
    fields.expect("use_bidirectional_attention", (False,), False)
    fields.expect("mlp_bias", (False,), False)
    fields.expect("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    feed = llama.mlp(fields, "hidden_act", "gelu_pytorch_tanh")
    if feed.activation == "gelu":
        feed = replace(feed, activation="gelu_pytorch_tanh")
    layer = Layer(llama.attention(fields), feed, Norms(offset=1.0))
    spec = llama.decoder(fields, (layer,) * fields.depth, llama.NAMES)
    return replace(spec, embed_scale=fields.hidden**0.5, norm_offset=1.0)
