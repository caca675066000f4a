"""Qwen3.5 (Qwen team, 2026): the hybrid, dense or MoE, text-only or in a vision-language model.

The q, k and v projections of the delta nets are stored fused, the others separately; experts are
stored one by one or stacked.
"""

from dataclasses import replace

from sabia.core.spec.families import composite, llama, qwen3_hybrid
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Experts, FeedForward, GatedDeltaNet
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FileTemplate, FusedPart, fused_parts

NAMES = qwen3_hybrid.NAMES | {
    f"delta.{ours}": f"{qwen3_hybrid.DELTA}in_proj_{theirs}.weight"
    for ours, theirs in (("z", "z"), ("beta", "b"), ("decay", "a"))
}
_UNUSED = {"mtp_num_hidden_layers": int, "mtp_use_dedicated_embeddings": bool}
_UNUSED |= {"mamba_ssm_dtype": str}
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def projections(delta: GatedDeltaNet, width: int) -> dict[str, FusedPart]:
    """The queries, keys and values of the delta nets in the files."""
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    sizes = {"delta.q": keys, "delta.k": keys, "delta.v": values}
    shape = (2 * keys + values, width)
    return fused_parts(qwen3_hybrid.DELTA + "in_proj_qkv.weight", shape, shape, 0, sizes)


def stacked(count: int, inner: int, width: int) -> dict[str, FileTemplate]:
    """The experts in files that store a layer's experts in one tensor, as the published ones do."""
    file, shape = "model.layers.{layer}.mlp.experts.", (count, 2 * inner, width)
    sizes = {"mlp.experts.gate": inner, "mlp.experts.up": inner}
    names: dict[str, FileTemplate] = {"mlp.experts.down": file + "down_proj"}
    return names | fused_parts(file + "gate_up_proj", shape, shape, 1, sizes)


def _feed(fields: Fields) -> FeedForward:
    fields.expect("mlp_only_layers", ([],), [])
    if "moe" not in fields.family:
        return llama.mlp(fields)
    fields.expect("norm_topk_prob", (True,), True)
    return qwen3_hybrid.experts(fields, 256, 8)


def read(fields: Fields) -> ModelSpec:
    """The model of a `qwen3_5_text` or `qwen3_5_moe_text` configuration."""
    for name, kind in _UNUSED.items():
        fields.take(name, kind, None)
    width = fields.hidden
    fields.defaults(num_key_value_heads=2 if "moe" in fields.family else 4)
    fields.expect("mlp_bias", (False,), False)
    delta, full = qwen3_hybrid.mixers(fields)
    names = NAMES | qwen3_hybrid.fused(delta, full, width) | projections(delta, width)
    feed = _feed(fields)
    spec = qwen3_hybrid.decoder(fields, delta, full, [feed] * fields.depth, names)
    if isinstance(feed, Experts):
        others = stacked(feed.router.experts, feed.width, width)
        return replace(spec, other_names=others)
    return spec


def read_whole(fields: Fields) -> ModelSpec:
    """The language model of a `qwen3_5` or `qwen3_5_moe` configuration."""
    for name in _TOKENS:
        fields.take(name, int, 0)

    def file_name(name: str) -> str:
        inside = name.removeprefix("model.")
        return name if inside == name else f"model.language_model.{inside}"

    return composite.language_model(fields, read, file_name, (r"model\.visual\..*",))
