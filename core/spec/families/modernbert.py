"""ModernBERT (arXiv 2412.13663): an encoder with rotary positions, GeGLU and local layers.

Every third layer attends to the whole document, the others to a window centred on each token; the
two kinds have different rotary bases. LayerNorms have no biases, the first layer reads the
normalized embeddings without a further norm, and the files store queries, keys and values fused,
and gate and up. Dropout is not applied.
"""

from dataclasses import replace
from typing import get_args

from sabia.core.errors import UsageError
from sabia.core.spec.families import gemma3, llama
from sabia.core.spec.families.gemma2 import KINDS
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Activation, Attention, GatedMlp, Layer, Norms
from sabia.core.spec.model import ModelSpec, Transform
from sabia.core.spec.rope import rope_from
from sabia.core.spec.tensors import FileTemplate, FusedPart, fused_parts

_LAYER = llama.LAYER
NAMES = {
    "embed": "model.embeddings.tok_embeddings.weight",
    "embed_norm": "model.embeddings.norm.weight",
    "final_norm": "model.final_norm.weight",
    "transform": "head.dense.weight",
    "transform_bias": "head.dense.bias",
    "transform_norm": "head.norm.weight",
    "head": "decoder.weight",
    "head_bias": "decoder.bias",
    "classifier": "classifier.weight",
    "classifier_bias": "classifier.bias",
}
NAMES |= {f"{part}.norm": f"{_LAYER}{part}_norm.weight" for part in ("attn", "mlp")}
for _ours, _theirs in (("attn.o", "attn.Wo"), ("mlp.down", "mlp.Wo")):
    NAMES |= {_ours: f"{_LAYER}{_theirs}.weight", f"{_ours}_bias": f"{_LAYER}{_theirs}.bias"}
_UNUSED: dict[str, type] = {"gradient_checkpointing": bool, "reference_compile": bool}
_UNUSED |= {"repad_logits_with_grad": bool, "deterministic_flash_attn": bool, "cls_token_id": int}
_UNUSED |= {"position_embedding_type": str, "sparse_pred_ignore_index": int}
_UNUSED |= {"initializer_cutoff_factor": float, "layer_norm_eps": float, "mlp_dropout": float}
_UNUSED |= {"sparse_prediction": bool}
_UNUSED |= {"embedding_dropout": float, "attention_dropout": float, "classifier_dropout": float}


def fused(width: int, inner: int) -> dict[str, FusedPart]:
    """Queries, keys and values, gate and up, and their biases in the files."""
    tensors: dict[str, FusedPart] = {}
    for file, parts, size in (("attn.Wqkv", "qkv", width), ("mlp.Wi", ("gate", "up"), inner)):
        rows, prefix = len(parts) * size, file.partition(".")[0]
        for end, ours, shape in ((".weight", "", (rows, width)), (".bias", "_bias", (rows,))):
            sizes = {f"{prefix}.{part}{ours}": size for part in parts}
            tensors |= fused_parts(_LAYER + file + end, shape, shape, 0, sizes)
    return tensors


def read(fields: Fields) -> ModelSpec:
    """The model of a `modernbert` configuration; a classifier's pooling is read with its head."""
    fields.defaults(tie_word_embeddings=True, max_position_embeddings=8192)
    width, depth = fields.hidden, fields.depth
    for name, kind in _UNUSED.items():
        fields.take(name, kind, None)
    fields.expect("norm_bias", (False,), False)
    fields.expect("classifier_pooling", ("cls", "mean"), "cls")
    heads, bias = fields.size("num_attention_heads"), fields.take("attention_bias", bool, False)
    if width % (2 * heads):
        raise UsageError(
            f"config.json: hidden_size {width}, {heads} heads (expected an even size of each head)"
        )
    every = fields.size("global_attn_every_n_layers", 3)
    kinds = fields.each("layer_types", depth, KINDS, [KINDS[n % every == 0] for n in range(depth)])
    size, reach = width // heads, fields.size("local_attention", 128) // 2
    bases = ("local_rope_theta", "global_rope_theta")
    rotary = gemma3.rotations(fields, bases, 160000.0, scaled=KINDS)
    ropes = {kind: rope_from(*rotary[kind], size, fields) for kind in KINDS}
    full = Attention(heads, heads, size, size**-0.5, ropes[KINDS[1]], bias, bias)
    mixers = {KINDS[0]: replace(full, rope=ropes[KINDS[0]], window=reach + 1), KINDS[1]: full}
    mlp: GatedMlp = llama.mlp(fields, "hidden_activation", "gelu")
    norms = Norms(), Norms(bare="attn")
    layers = tuple(Layer(mixers[kind], mlp, norms[n == 0]) for n, kind in enumerate(kinds))
    activation = fields.expect("classifier_activation", get_args(Activation), "gelu")
    transform = Transform(activation, fields.take("classifier_bias", bool, False))
    names: dict[str, FileTemplate] = {**NAMES, **fused(width, mlp.width)}
    spec = llama.decoder(fields, layers, names, 1e-5, "norm_eps")
    spec = replace(spec, causal=False, norm_kind="layer", embed_norm=True, transform=transform)
    return replace(spec, head_bias=fields.take("decoder_bias", bool, True))
