"""Qwen2 and Qwen2.5 dense (arXiv 2407.10671): Llama with biases of queries, keys and values."""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.families.qwen3 import windows
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer
from sabia.core.spec.model import ModelSpec


def read(fields: Fields) -> ModelSpec:
    """The model of a `qwen2` configuration."""
    fields.defaults(num_key_value_heads=32)
    fields.expect("attention_bias", (True,), True)
    fields.expect("mlp_bias", (False,), False)
    mixer, mlp = replace(llama.attention(fields), qkv_bias=True), llama.mlp(fields)
    layers = tuple(Layer(replace(mixer, window=window), mlp) for window in windows(fields))
    return llama.decoder(fields, layers, llama.NAMES)
