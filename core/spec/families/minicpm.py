"""MiniCPM 1, 2, 4 (arXiv 2404.06395, 2506.07900) and MiniCPM 3: Llama with three constant factors.

Embeddings are multiplied by scale_emb, what each part adds to the residual stream by
scale_depth / sqrt(layers), and the states that the head reads by dim_model_base / width. MiniCPM 3
has the multi-head latent attention of DeepSeek.
"""

from collections.abc import Mapping
from dataclasses import replace

from sabia.core.errors import UsageError
from sabia.core.spec.families import deepseek_v3, llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Attention, LatentAttention, Layer
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FileTemplate


def read(fields: Fields) -> ModelSpec:
    """The model of a `minicpm` configuration; the published files contain its code."""
    fields.expect("mlp_bias", (False,), False)
    fields.take("mup_denominator", int, None)  # of draft models only
    mixer, width = llama.attention(fields), fields.hidden
    if mixer.heads * mixer.head_dim != width:
        raise UsageError(
            f"config.json: {mixer.heads} heads of head_dim {mixer.head_dim} in a minicpm model "
            f"(expected that their product is hidden_size {width})"
        )
    if mixer.rope is not None and fields.positions > mixer.rope.original_length:
        # the published code has one table of rotations, made for the longest text
        mixer = replace(mixer, rope=replace(mixer.rope, short_factor=mixer.rope.long_factor))
    depth, base = fields.number("scale_depth"), fields.number("dim_model_base")
    return _decoder(fields, mixer, llama.NAMES, depth, base, 1e-6)


def read_latent(fields: Fields) -> ModelSpec:
    """The model of a `minicpm3` configuration; a scale that is null multiplies by 1."""
    fields.defaults(qk_rope_head_dim=32, qk_nope_head_dim=64, kv_lora_rank=256, q_lora_rank=768)
    fields.defaults(scale_emb=12, scale_depth=1.4, dim_model_base=256)
    fields.defaults(max_position_embeddings=32768, initializer_range=0.1, num_key_value_heads=40)
    fields.expect("rope_interleave", (False,), False)
    mixer = deepseek_v3.attention(fields, value_dim=None)
    depth = fields.number("scale_depth", fields.depth**0.5)
    base = fields.number("dim_model_base", float(fields.hidden))
    return _decoder(fields, mixer, deepseek_v3.NAMES, depth, base, 1e-5)


def _decoder(
    fields: Fields,
    mixer: Attention | LatentAttention,
    names: Mapping[str, FileTemplate],
    scale_depth: float,
    model_base: float,
    eps: float,
) -> ModelSpec:
    fields.defaults(tie_word_embeddings=True)
    layer = Layer(mixer, llama.mlp(fields), residual_scale=scale_depth / fields.depth**0.5)
    spec = llama.decoder(fields, (layer,) * fields.depth, names, eps)
    scale = fields.number("scale_emb")
    return replace(spec, embed_scale=scale, logit_scale=model_base / fields.hidden)
