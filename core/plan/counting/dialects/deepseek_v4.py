"""DeepSeek-V4 (2026): one key-value head, compressed keys, grouped output, hyper-connections.

Queries have a latent (q_lora_rank). Keys and values are one head of `head_dim` in a sliding window,
and besides keys that are compressed from `ratio` tokens each. By compress_ratios: 128 attends to
all of them, with 4 an indexer selects index_topk, 0 has none. The output is projected in `o_groups`
groups of rank o_lora_rank. Each half of a layer mixes `hc_mult` residual streams by a matrix
[(2 + m)·m, m·hidden]. The MTP layer has a window only.
"""

from dataclasses import replace

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture, LayerKind, Sparse
from sabia.core.plan.counting.blocks import LayerHalf, Shape, layer, mixer_sizes, of_shapes
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields

_ALL, _CHOSEN = 128, 4


def read(fields: CountFields) -> Architecture:
    """The model of a `deepseek_v4` configuration."""
    hidden, depth = fields.hidden, fields.depth
    predicted = fields.take("num_nextn_predict_layers", int, 0)
    ratios = fields.take("compress_ratios", list)
    if len(ratios) != depth + predicted or not set(ratios) <= {0, _CHOSEN, _ALL}:
        raise UsageError(
            f"config.json: compress_ratios has {len(ratios)} entries of {sorted(set(ratios))} "
            f"(expected {depth + predicted} of 0, {_CHOSEN}, {_ALL})"
        )
    streams, hashed = fields.size("hc_mult"), fields.take("num_hash_layers", int, 0)
    mixers = _mixers(fields, hidden, set(ratios))
    # the first layers select experts by a table of token ids; the other routers have a bias
    by_table = reading.routed(fields, "n_routed_experts", alike="n_shared_experts")
    by_score = by_table + LayerHalf(vectors=by_table.sizes["experts"])

    def kind(index: int) -> LayerKind:
        plain = layer(mixers[ratios[index]], by_table if index < hashed else by_score, 2 * hidden)
        rows = (2 + streams) * streams  # of the hyper-connections of both halves
        return replace(
            plain,
            mixer_params=plain.mixer_params + rows * streams * hidden,
            mlp_params=plain.mlp_params + rows * streams * hidden,
            vector_params=plain.vector_params + 2 * (rows + 3),
        )

    head = streams * streams * hidden + streams + 1
    return reading.decoder(
        fields,
        map(kind, range(depth)),
        other=hidden + head,
        extra=tuple(kind(depth + n) for n in range(predicted)),
        extra_params=predicted * (2 * hidden * hidden + 3 * hidden + head),
    )


def _mixers(fields: CountFields, hidden: int, ratios: set[int]) -> dict[int, LayerHalf]:
    heads, size = fields.size("num_attention_heads"), fields.size("head_dim")
    rank, groups = fields.size("q_lora_rank"), fields.size("o_groups")
    window, low = fields.size("sliding_window"), fields.size("o_lora_rank")
    count, length = fields.size("index_n_heads"), fields.size("index_head_dim")
    most = fields.size("index_topk")
    base: list[Shape] = [(rank, hidden), (heads * size, rank), (size, hidden)]
    base += [(groups * low, heads * size // groups), (hidden, groups * low)]

    def mixer(ratio: int) -> LayerHalf:
        both = 1 + (ratio == _CHOSEN)  # overlapping windows: a compressed key reads two of them
        shapes = base + [(both * size, hidden)] * (2 * (ratio > 0))
        others: list[Shape] = [(ratio, both * size)] * (ratio > 0)
        vectors = heads + rank + size + size * (ratio > 0)
        # keys of the window are not in the cache: they are kept once per sequence
        cached = size // ratio if ratio else 0
        seen: dict[str, object] = {"sparse": Sparse(window, ratio)} if ratio else {"window": window}
        if ratio == _CHOSEN:
            cached = (size + length) // ratio
            seen = {"sparse": Sparse(window, ratio, most, count * length)}
            shapes += [(2 * length, hidden)] * 2 + [(count * length, rank), (count, hidden)]
            others += [(ratio, 2 * length)]
            vectors += length
        return of_shapes(
            shapes,
            others=others,
            vectors=vectors,
            **mixer_sizes(heads, 1, heads * size, size, size),
            query_latent=rank,
            score_width=2 * heads * size,
            cache_width=cached,
            state_width=window * size,
            **seen,
        )

    return {ratio: mixer(ratio) for ratio in ratios}
