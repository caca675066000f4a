"""Gemma 3 text models (arXiv 2503.19786): Gemma 2 with norms on queries and keys instead of caps.

Five local layers, with a rotary base of their own (10,000), are followed by a global one.
"""

from dataclasses import replace
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.families import composite, gemma2, llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.rope import read_scaling, rope_from

NAMES = gemma2.NAMES | llama.QK_NORMS
_LOCAL, _GLOBAL = gemma2.KINDS


def rotations(
    fields: Fields,
    names: tuple[str, str] = ("rope_local_base_freq", "rope_theta"),
    usual: float = 1000000.0,
    scaled: tuple[str, ...] = (_GLOBAL,),
) -> dict[str, tuple[dict[str, Any], float]]:
    """Read the rotary fields: scaling and base of each kind of layer.

    names: fields of the local and the global base; usual: default of the global base; scaled: the
    kinds that `rope_scaling` is of.
    """
    bases = {
        _LOCAL: fields.number(names[0], 10000.0),
        _GLOBAL: fields.number(names[1], usual),
    }
    values = read_scaling(fields, scaled)
    odd = set(values) - set(bases)
    if odd:
        raise UsageError(
            f"config.json: rope_parameters has {min(odd)!r} (expected {_LOCAL} and {_GLOBAL})"
        )
    given = {kind: dict(values.get(kind) or {}) for kind in bases}
    if any(value.get("truncate") is False for value in given.values()):
        raise UsageError(
            "config.json: rope truncate is False (expected true, as transformers truncates if "
            "kinds of layers have rotations of their own)"
        )
    return {kind: (given[kind], base) for kind, base in bases.items()}


def read(fields: Fields) -> ModelSpec:
    """The model of a `gemma3_text` configuration."""
    fields.defaults(sliding_window=4096, max_position_embeddings=131072)
    every = fields.size("sliding_window_pattern", 6)
    fields.take("_sliding_window_pattern", int, None)  # repeats what layer_types tell
    usual = [_LOCAL if (index + 1) % every else _GLOBAL for index in range(fields.depth)]
    kinds = fields.each("layer_types", fields.depth, gemma2.KINDS, usual)
    rotary = rotations(fields)
    # attn_logit_softcapping is read and has no effect, as in transformers
    base = replace(gemma2.attention(fields), qk_norm=True, norm_offset=1.0, softcap=None)
    window = fields.size("sliding_window", None)
    ropes = {kind: rope_from(*rotary[kind], base.head_dim, fields) for kind in gemma2.KINDS}
    mixers = {
        _LOCAL: replace(base, rope=ropes[_LOCAL], window=window),
        _GLOBAL: replace(base, rope=ropes[_GLOBAL]),
    }
    feed = gemma2.mlp(fields)
    layers = tuple(Layer(mixers[kind], feed, gemma2.NORMS) for kind in kinds)
    return gemma2.decoder(fields, layers, NAMES)


def read_whole(fields: Fields) -> ModelSpec:
    """The language model of a `gemma3` configuration (4B and larger, which also read images)."""
    tokens = ("image_token_index", "boi_token_index", "eoi_token_index", "image_token_id")
    for name in (*tokens, "boi_token_id", "eoi_token_id", "mm_tokens_per_image"):
        fields.take(name, int, 0)
    others = (r"vision_tower\..*", r"multi_modal_projector\..*")
    return composite.language_model(fields, read, lambda name: f"language_model.{name}", others)
