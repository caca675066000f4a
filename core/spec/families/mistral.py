"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer (null: no window)."""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer
from sabia.core.spec.model import ModelSpec


def read(fields: Fields) -> ModelSpec:
    """The model of a `mistral` configuration."""
    fields.defaults(sliding_window=4096, num_key_value_heads=8, max_position_embeddings=131072)
    for name in ("attention_bias", "mlp_bias"):
        fields.expect(name, (False,), False)
    window = fields.size("sliding_window", None)
    layer = Layer(replace(llama.attention(fields), window=window), llama.mlp(fields))
    return llama.decoder(fields, (layer,) * fields.depth, llama.NAMES)
