"""Relatives of DeepSeek-V3: DeepSeek-V2, and V3.2 and GLM-5, whose keys an indexer chooses.

The indexer (DeepSeek-V3.2, 2025) scores all keys by small heads of its own and attention sees the
index_topk best. In GLM-5.2 most layers take the choice of a layer before them.
"""

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture, Sparse
from sabia.core.plan.counting.blocks import Block, layer, mixer_block, of_shapes, with_sizes
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields

_KIND = "deepseek_sparse_attention"
_GLM_REMARKS: tuple[str, ...] = ("indexer_rope_interleave", "index_share_for_mtp_iteration")
_GLM_REMARKS += ("index_skip_topk_offset", "index_topk_freq", "index_topk_pattern")


def deepseek_v2(fields: CountFields) -> Architecture:
    """DeepSeek-V2 and V2-Lite (arXiv 2405.04434): no balancing bias."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("mlp_bias", (False,), False)
    fields.ignore("head_dim")
    mixer = mixer_block(reading.latent(fields, hidden), hidden)
    return _stack(fields, hidden, [mixer] * depth, correction=False)


def indexed(fields: CountFields) -> Architecture:
    """DeepSeek-V3.2 and GLM-5."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("mlp_bias", (False,), False)
    fields.ignore("head_dim", "num_nextn_predict_layers", *_GLM_REMARKS[:2])
    fields.each("layer_types", depth, (_KIND,), [_KIND] * depth)
    own = fields.each("indexer_types", depth, ("full", "shared"), ["full"] * depth)
    if "shared" in own:
        fields.ignore(*_GLM_REMARKS)
    plain = reading.latent(fields, hidden)
    heads, size = fields.size("index_n_heads"), fields.size("index_head_dim")
    rank, most = plain.q_rank, fields.size("index_topk")
    if rank is None:
        raise UsageError("config.json: q_lora_rank is None (expected the indexer's own input)")
    base = mixer_block(plain, hidden)
    shapes = ((heads * size, rank), (size, hidden), (heads, hidden))
    cache = base.sizes["cache_width"]
    mixers = {
        "shared": with_sizes(base, sparse=Sparse(chosen=most)),
        "full": with_sizes(
            base + of_shapes(shapes, vectors=2 * size),
            sparse=Sparse(chosen=most, index_width=heads * size),
            cache_width=cache + size,
        ),
    }
    return _stack(fields, hidden, [mixers[kind] for kind in own], correction=True)


def _stack(
    fields: CountFields, hidden: int, mixers: list[Block], *, correction: bool
) -> Architecture:
    feeds = reading.dense_first(fields, hidden, len(mixers), correction=correction)
    kinds = [layer(*halves, 2 * hidden) for halves in zip(mixers, feeds, strict=True)]
    return reading.decoder(fields, hidden, kinds)
