"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with fused projections and LongRoPE.

Queries, keys and values are stored in one matrix, gate and up in another. Dropout is not applied.
"""

from dataclasses import replace

from sabia.core.spec.families import llama
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Layer
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FileTemplate, fused_parts


def read(fields: Fields) -> ModelSpec:
    """The model of a `phi3` configuration."""
    fields.defaults(max_position_embeddings=4096, original_max_position_embeddings=4096)
    for name in ("attention_bias", "mlp_bias"):
        fields.expect(name, (False,), False)
    for name in ("resid_pdrop", "embd_pdrop"):
        fields.take(name, float, 0.0)
    mixer, mlp = llama.attention(fields, partial_rotary=True), llama.mlp(fields)
    mixer = replace(mixer, window=fields.size("sliding_window", None))
    names: dict[str, FileTemplate] = {**llama.NAMES}
    keys = mixer.kv_heads * mixer.head_dim
    for file, sizes in (
        (
            "self_attn.qkv_proj",
            {"attn.q": mixer.heads * mixer.head_dim, "attn.k": keys, "attn.v": keys},
        ),
        ("mlp.gate_up_proj", {"mlp.gate": mlp.width, "mlp.up": mlp.width}),
    ):
        shape = (sum(sizes.values()), fields.hidden)
        names |= fused_parts(f"{llama.LAYER}{file}.weight", shape, shape, 0, sizes)
    layers = (Layer(mixer, mlp),) * fields.depth
    return llama.decoder(fields, layers, names, eps=1e-5)
