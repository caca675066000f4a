"""Qwen3 dense (arXiv 2505.09388): Llama with a norm on each head's query and key.

With `use_sliding_window` the layers from `max_window_layers` on have a sliding window;
`layer_types` lists the kind of each layer.
"""

from dataclasses import replace

from sabia.core.errors import UsageError
from sabia.core.spec.families import llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer
from sabia.core.spec.model import ModelSpec

NAMES = llama.NAMES | llama.QK_NORMS
KINDS = ("full_attention", "sliding_attention")


def windows(fields: Fields) -> tuple[int | None, ...]:
    """Read the window fields: the window of each layer, None for none."""
    used = fields.take("use_sliding_window", bool, False)
    size = fields.size("sliding_window", 4096)
    first = fields.take("max_window_layers", int, 28)
    usual = [KINDS[used and index >= first] for index in range(fields.depth)]
    kinds = fields.each("layer_types", fields.depth, KINDS, usual)
    windowed = [kind == "sliding_attention" for kind in kinds]
    if any(windowed) and not used:
        raise UsageError(
            "config.json: use_sliding_window is false (expected true, as layer_types has windows)"
        )
    return tuple(size if flag else None for flag in windowed)


def read(fields: Fields) -> ModelSpec:
    """The model of a `qwen3` configuration."""
    mixer = replace(llama.attention(fields, head_dim=128), qk_norm=True)
    fields.expect("mlp_bias", (False,), False)
    mlp = llama.mlp(fields)
    layers = tuple(Layer(replace(mixer, window=window), mlp) for window in windows(fields))
    return llama.decoder(fields, layers, NAMES)
