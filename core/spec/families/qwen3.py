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


def window(fields: Fields) -> int | None:
    """Read the size of the windows; None if they are not used."""
    fields.defaults(sliding_window=4096, max_position_embeddings=32768)
    size = fields.size("sliding_window", None)
    return size if fields.take("use_sliding_window", bool, False) else None


def windows(fields: Fields) -> tuple[int | None, ...]:
    """Read the window fields: the window of each layer, None for none."""
    size, first = window(fields), fields.take("max_window_layers", int, 28)
    usual = [KINDS[size is not None and index >= first] for index in range(fields.depth)]
    kinds = fields.each("layer_types", fields.depth, KINDS, usual)
    if size is None and KINDS[1] in kinds:
        raise UsageError(
            "config.json: use_sliding_window is false or sliding_window null (expected a window, "
            "as layer_types has windows)"
        )
    return tuple(size if kind == KINDS[1] else None for kind in kinds)


def read(fields: Fields) -> ModelSpec:
    """The model of a `qwen3` configuration."""
    fields.defaults(num_key_value_heads=32)
    mixer = replace(llama.attention(fields, head_dim=128), qk_norm=True)
    fields.expect("mlp_bias", (False,), False)
    mlp = llama.mlp(fields)
    layers = tuple(Layer(replace(mixer, window=window), mlp) for window in windows(fields))
    return llama.decoder(fields, layers, NAMES)
