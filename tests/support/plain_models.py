"""Models, times and checks of the planner that tests need and the command does not.

`decoder`, `attention_layer`, `with_experts` make an Architecture from plain sizes: the decoder that
papers and tables describe in one line. Grouped-query attention `h·d·(2·n_q + 2·n_kv)`, a gated
(3·h·f) or plain (2·h·f) MLP, mixtures `E·m·h·f_m` with a router of h·E and shared experts, two
norms a layer. Biases are not counted.
"""

from dataclasses import replace

from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.serving.decode import Replica, decode_step, find_format, prefill, weight_bytes
from sabia.core.plan.stops.process import exposed


def attention_layer(
    hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, *, gated: bool = True
) -> LayerKind:
    """One dense layer (count 1) of grouped-query attention and an MLP of inner width `ffn`."""
    matrices = 3 if gated else 2
    query, key = heads * head_dim, kv_heads * head_dim
    return LayerKind(
        count=1,
        mixer_params=hidden * 2 * (query + key),
        mlp_params=matrices * hidden * ffn,
        vector_params=2 * hidden,
        heads=heads,
        kv_heads=kv_heads,
        query_width=query,
        key_width=key,
        value_width=key,
        score_width=2 * query,
        cache_width=2 * key,
        mlp_width=ffn,
        matrices=matrices,
        adapter_edges=4 * hidden + 2 * (query + key) + matrices * (hidden + ffn),
    )


def with_experts(
    layer: LayerKind, hidden: int, experts: int, top_k: int, width: int, shared_width: int = 0
) -> LayerKind:
    """The layer with a mixture of `experts` of inner `width` in place of its MLP."""
    dense = layer.matrices * (hidden + layer.mlp_width) if layer.mlp_width else 0
    shared = layer.matrices * (hidden + shared_width) if shared_width else 0
    return replace(
        layer,
        adapter_edges=layer.adapter_edges - dense + shared,
        mlp_params=layer.matrices * hidden * shared_width + hidden * experts,
        mlp_width=shared_width,
        expert_params=experts * layer.matrices * hidden * width,
        experts=experts,
        top_k=top_k,
        expert_width=width,
    )


def decoder(
    name: str,
    hidden: int,
    vocab: int,
    layers: tuple[LayerKind, ...],
    *,
    tied: bool = False,
    positions: int = 0,
) -> Architecture:
    """Layers between an embedding (and `positions` learned ones), a final norm and a head."""
    return Architecture(
        name=name,
        hidden=hidden,
        vocab=vocab,
        layers=layers,
        embedding_params=(vocab + positions) * hidden,
        head_params=0 if tied else vocab * hidden,
        other_params=hidden,
    )


def weights_fit(architecture: Architecture, chip: Chip, chips: int, weights: str) -> bool:
    """Whether all weights lie in the usable memory of `chips`, nothing else counted."""
    return weight_bytes(architecture, find_format(weights)) <= chips * chip.usable_hbm_bytes


def fixed_batch_seconds(replica: Replica, prompt: float, output: float, batch: float) -> float:
    """`batch` requests together, all alike: one prefill of all, then output − 1 steps."""
    step = decode_step(replica, batch, prompt + output / 2)
    return prefill(replica, prompt, batch).seconds + (output - 1) * step.seconds


def expected_wall(
    work_s: float,
    interval_s: float,
    offload_s: float,
    mean_s: float,
    restart_s: float,
    upload_s: float = 0.0,
) -> float:
    """Expected seconds for `work_s` of work with stops every `mean_s`, without waits or limits.

    The intervals need not divide the work. inf where the exponent is beyond a double.
    """
    return exposed(work_s / interval_s, interval_s + offload_s, upload_s, restart_s, mean_s)
