"""The feed-forward parts of a layer, by the class of their settings.

Mixture of experts: routing, expert products over rows sorted by expert, and router statistics.

The router assigns each token to k of E experts: `dispatch` makes one row per token–expert
assignment and sorts the rows by expert, `Block.products` multiplies each group by its expert's
matrix, `combine` sums the k rows of each token, weighted by its gates. No token is dropped. Routing
is computed in fp32 whatever the dtype of the residual stream.

Statistics in `block.stats`, if requested (`Context.wanted`), each per row of the batch, over its
tokens outside padding (segment 0), but where it says otherwise:
expert_load[B, E]: assignments of each expert; has no gradient.
experts[B, T, k]: the experts of each token; of all tokens, no gradient.
rerouted[B]: how many of the experts that `Context.routing` gives are not those that the router
would have chosen; no gradient.
balance[B]: E/(k·T)·Σ_e load_e · mean_t p_te with p the scores normalised over all experts, the
sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, equations 17-20; 1 if balanced).
router_z[B]: mean_t logsumexp(scores)² (ST-MoE, arXiv 2202.08906, equation 5).
"""

from collections.abc import Callable, Mapping

from sabia.core.model.block import INNER, Block
from sabia.core.ops.base import Array, Ops
from sabia.core.spec.layers import ClampedSwiglu, Experts, GatedMlp, Router

ACTIVATIONS: Mapping[str, Callable[[Ops, Array], Array]] = {
    "silu": lambda ops, x: ops.silu(x),
    "gelu": lambda ops, x: ops.gelu(x),
    "gelu_pytorch_tanh": lambda ops, x: ops.gelu(x, tanh=True),
}


def gated(activation: str, ops: Ops, gate: Array, up: Array) -> Array:
    """activation(gate) · up."""
    if activation == "silu":
        return ops.silu_product(gate, up)
    return ACTIVATIONS[activation](ops, gate) * up


def gated_mlp(part: GatedMlp, block: Block, y: Array) -> Array:
    """down(activation(gate(y)) · up(y)) of y[B, T, D] (SwiGLU, GeGLU: arXiv 2002.05202)."""
    ops = block.ops
    gate, up = (ops.shard(x, INNER) for x in block.products(y, "mlp.gate", "mlp.up"))  # [B, T, F]
    return block.project("mlp.down", gated(part.activation, ops, gate, up))


EXPERT_INNER = ("copies", "mlp")  # axes of [M, F]: rows of assignments, inner width
_TOKENS = ("batch", "sequence", None)
_WHOLE_ROWS = ("batch", None, None)


def experts(part: Experts, block: Block, y: Array) -> Array:
    """The gate-weighted sum of each token's experts, plus the shared expert, of y[B, T, D]."""
    ops = block.ops
    scores = block.project("mlp.router", ops.cast(y, "float32"))  # [B, T, E]
    chosen, gates = route(part.router, block, scores)
    add_stats(part.router, block, scores, chosen)
    rows, plan = ops.dispatch(y, chosen, part.router.experts)  # [M, D], M = B·T·k
    both = block.products(rows, "mlp.experts.gate", "mlp.experts.up", plan=plan)
    gate, up = (ops.shard(x, EXPERT_INNER) for x in both)  # [M, F]
    inner = activated(part, gate, up, ops)
    (rows,) = block.products(inner, "mlp.experts.down", plan=plan)  # [M, D]
    out = ops.combine(rows, plan, gates)  # [B, T, D]
    return out + shared(part, block, y) if part.shared else out


def route(router: Router, block: Block, scores: Array) -> tuple[Array, Array]:
    """(indices of the top-k experts, best first, or those to replay; their gates, fp32), each
    [B, T, k]."""
    ops, values = block.ops, scores  # [B, T, E]
    if router.scores != "softmax_top_k":
        values = ops.sigmoid(scores) if router.scores == "sigmoid" else ops.softmax(scores)
    ranks = ops.stop_gradient(values)
    if router.expert_bias:
        # the expert bias (e_score_correction_bias) affects selection only, not the gates
        ranks = ranks + ops.cast(block.weights["mlp.correction"], "float32")
    if router.groups > 1:
        ranks = mask_groups(router, ranks, ops)
    chosen = _replayed(block, ops.topk(ranks, router.top_k)[1])  # [B, T, k]
    gates = ops.take_along(values, chosen)  # [B, T, k]
    if router.scores == "softmax_top_k":
        gates = ops.softmax(gates)  # over the selected experts only
    elif router.normalised:
        # gate_i = s_i / Σ_j s_j; DeepSeek's code adds the 1e-20
        gates = gates / (gates.sum(-1)[..., None] + 1e-20)
    return chosen, gates * router.scale


def _replayed(block: Block, chosen: Array) -> Array:
    """The experts that `Context.routing` gives, and chosen[B, T, k] where it gives none."""
    ops, routing = block.ops, block.context.routing
    if routing is None:
        return chosen
    given = routing[block.index] - 1  # [B, T, k]
    if "rerouted" in block.context.wanted:
        agrees = (given[..., None] == chosen[..., None, :]).any(-1) | (given < 0)
        block.stats["rerouted"] = ops.where(agrees, 0.0, 1.0).sum((1, 2))
    return ops.where(given < 0, chosen, given)


def mask_groups(router: Router, ranks: Array, ops: Ops) -> Array:
    """ranks[B, T, E], -inf outside the best groups (DeepSeek-V3's node-limited routing)."""
    size = router.experts // router.groups
    grouped = ranks.reshape(*ranks.shape[:2], router.groups, size)  # [B, T, G, E/G]
    # [B, T, G]: the score of a group is the sum of its two best
    sums = ops.topk(grouped, min(2, size))[0].sum(-1)
    best = ops.topk(sums, router.top_k_groups)[1]  # [B, T, groups kept]
    kept = (best[..., None] == ops.arange(router.groups, ranks)).any(-2)  # [B, T, G]
    return ops.where(kept[..., None], grouped, float("-inf")).reshape(*ranks.shape)


def activated(part: Experts, gate: Array, up: Array, ops: Ops) -> Array:
    """activation(gate) · up of gate[M, F] and up[M, F]."""
    kind = part.activation
    if not isinstance(kind, ClampedSwiglu):
        return gated(kind, ops, gate, up)
    # (clamp(up) + 1) · gate · sigmoid(alpha · gate), gate clamped from above
    gate = ops.where(gate > kind.limit, kind.limit, gate)
    up = ops.where(up > kind.limit, kind.limit, up)
    up = ops.where(up < -kind.limit, -kind.limit, up)
    return (up + 1) * (ops.silu(gate * kind.alpha) * (1 / kind.alpha))


def shared(part: Experts, block: Block, y: Array) -> Array:
    """The shared expert, which processes every token."""
    ops = block.ops
    gate, up = block.products(y, "mlp.shared.gate", "mlp.shared.up")
    out = block.project("mlp.shared.down", activated(part, gate, up, ops))
    return out * ops.sigmoid(block.project("mlp.shared_gate", y)) if part.shared_gate else out


def add_stats(router: Router, block: Block, scores: Array, chosen: Array) -> None:
    """Add the requested statistics to the block's stats."""
    wanted, ops = block.context.wanted - {"rerouted"}, block.ops
    if "experts" in wanted:
        block.stats["experts"] = chosen
    if not wanted - {"experts"}:
        return
    segments = block.context.segments
    if segments is None:
        not_padding = ops.full(scores.shape[:2], 1.0, scores)
    else:
        not_padding = ops.cast(segments > 0, "float32")  # [B, T]
    if "expert_load" in wanted:
        block.stats["expert_load"] = _expert_load(router, chosen, not_padding, ops)
    if not wanted - {"experts", "expert_load"}:
        return
    # balance and router_z are means over whole rows, which a mesh may split
    scores, chosen = (ops.relayout(x, _TOKENS, _WHOLE_ROWS) for x in (scores, chosen))
    not_padding = ops.relayout(not_padding, _TOKENS[:2], _WHOLE_ROWS[:2])
    tokens = ops.where(not_padding.sum(-1) > 0, not_padding.sum(-1), 1.0)  # [B], at least 1
    if "balance" in wanted:
        load = _expert_load(router, chosen, not_padding, ops)  # [B, E]
        values = ops.sigmoid(scores) if router.scores == "sigmoid" else ops.softmax(scores)
        values = values / values.sum(-1)[..., None]  # p_te, [B, T, E]
        # mean over t of p_te, [B, E]
        mean = (values * not_padding[..., None]).sum(1) / tokens[:, None]
        uniform = router.experts / router.top_k
        # E/(k·T) · Σ_e load_e · mean_t p_te
        block.stats["balance"] = (load * mean).sum(-1) * uniform / tokens
    if "router_z" in wanted:
        block.stats["router_z"] = (ops.logsumexp(scores) ** 2 * not_padding).sum(-1) / tokens


def _expert_load(router: Router, chosen: Array, not_padding: Array, ops: Ops) -> Array:
    """Number of assignments of each expert by each row's non-padding tokens, fp32 [B, E]."""
    rows = chosen.shape[0]
    # chosen · 0 only broadcasts to [B, T, k]
    weights = (not_padding[..., None] + ops.cast(chosen * 0, "float32")).reshape(rows, -1)
    return ops.weighted_bincount(chosen.reshape(rows, -1), weights, router.experts)


FEED_FORWARD: Mapping[type, Callable[..., Array]] = {GatedMlp: gated_mlp, Experts: experts}
