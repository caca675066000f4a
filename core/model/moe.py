"""Mixtures of experts: routing, the experts over sorted copies of tokens, and what is reported.

A token goes to k of E experts: `dispatch` makes k copies of each token and sorts them by expert,
`grouped_matmul` multiplies each group by its expert's matrix, `combine` adds the copies up again.
No token is dropped. Routing is computed in fp32 whatever the stream's dtype.

Reported through `block.stats`, where the pass wants it (`Context.wanted`), each per row of the
batch, over its tokens outside padding (segment 0):
expert_load[B, E]: copies that each expert got; a constant.
balance[B]: E/(k·T)·Σ_e load_e · mean_t p_te with p the scores normalised over all experts, the
sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, equations 17-20; 1 when even).
router_z[B]: mean_t logsumexp(scores)² (ST-MoE, arXiv 2202.08906, equation 5).
"""

from sabia.core.model.block import Block
from sabia.core.model.feed_forward import ACTIVATIONS
from sabia.core.model.ops import Array, Ops
from sabia.core.spec.experts import ClampedSwiglu, Experts, Router

EXPERT_INNER = ("copies", "mlp")
_TOKENS = ("batch", "sequence", None)
_WHOLE_ROWS = ("batch", None, None)


def experts(part: Experts, block: Block, y: Array) -> Array:
    """The shares-weighted sum of each token's experts, and the shared expert, of y[B, T, D]."""
    ops = block.ops
    scores = block.project("mlp.router", ops.cast(y, "float32"))
    chosen, shares = route(part.router, block, scores)
    report(part.router, block, scores, chosen)
    rows, plan = ops.dispatch(y, chosen, part.router.experts)
    gate = ops.shard(block.grouped("mlp.experts.gate", rows, plan), EXPERT_INNER)
    up = ops.shard(block.grouped("mlp.experts.up", rows, plan), EXPERT_INNER)
    rows = block.grouped("mlp.experts.down", activated(part, gate, up, ops), plan)
    out = ops.combine(rows, plan, shares)
    return out + shared(part, block, y) if part.shared else out


def route(router: Router, block: Block, scores: Array) -> tuple[Array, Array]:
    """(indices of the chosen experts, best first; their shares fp32), each [B, T, k]."""
    ops = block.ops
    if router.scores == "softmax_chosen":
        best, chosen = ops.topk(scores, router.chosen)
        return chosen, ops.softmax(best) * router.scale
    values = ops.sigmoid(scores) if router.scores == "sigmoid" else ops.softmax(scores)
    ranks = ops.stop_gradient(values)
    if router.correction:
        ranks = ranks + ops.cast(block.weights["mlp.correction"], "float32")
    if router.groups > 1:
        ranks = within_groups(router, ranks, ops)
    chosen = ops.topk(ranks, router.chosen)[1]
    shares = ops.take_along(values, chosen)
    if router.normalised:
        # The tiny term is DeepSeek's; softmax scores are far above it.
        shares = shares / (shares.sum(-1)[..., None] + 1e-20)
    return chosen, shares * router.scale


def within_groups(router: Router, ranks: Array, ops: Ops) -> Array:
    """ranks[B, T, E], -inf outside the best groups."""
    size = router.experts // router.groups
    grouped = ranks.reshape(*ranks.shape[:2], router.groups, size)
    sums = ops.topk(grouped, min(2, size))[0].sum(-1)
    best = ops.topk(sums, router.chosen_groups)[1]
    kept = (best[..., None] == ops.arange(router.groups, ranks)).any(-2)
    return ops.where(kept[..., None], grouped, float("-inf")).reshape(*ranks.shape)


def activated(part: Experts, gate: Array, up: Array, ops: Ops) -> Array:
    """The inner state of gate[M, F] and up[M, F]."""
    kind = part.activation
    if not isinstance(kind, ClampedSwiglu):
        return ACTIVATIONS[kind](ops, gate) * up
    gate = ops.where(gate > kind.limit, kind.limit, gate)
    up = ops.where(up > kind.limit, kind.limit, up)
    up = ops.where(up < -kind.limit, -kind.limit, up)
    return (up + 1) * (ops.silu(gate * kind.alpha) * (1 / kind.alpha))


def shared(part: Experts, block: Block, y: Array) -> Array:
    """The expert that every token visits."""
    ops = block.ops
    gate, up = block.project("mlp.shared.gate", y), block.project("mlp.shared.up", y)
    out = block.project("mlp.shared.down", activated(part, gate, up, ops))
    return out * ops.sigmoid(block.project("mlp.shared_gate", y)) if part.shared_gate else out


def report(router: Router, block: Block, scores: Array, chosen: Array) -> None:
    """Put what the pass wants to know into the block's stats."""
    wanted, ops = block.context.wanted, block.ops
    if not wanted:
        return
    real = _real_tokens(block, scores)
    if "expert_load" in wanted:
        block.stats["expert_load"] = _load(router, chosen, real, ops)
    if not wanted - {"expert_load"}:
        return
    # These two belong to whole rows, wherever their tokens are.
    scores, chosen = (ops.relayout(x, _TOKENS, _WHOLE_ROWS) for x in (scores, chosen))
    real = ops.relayout(real, _TOKENS[:2], _WHOLE_ROWS[:2])
    tokens = ops.where(real.sum(-1) > 0, real.sum(-1), 1.0)
    if "balance" in wanted:
        load = _load(router, chosen, real, ops)
        values = ops.sigmoid(scores) if router.scores == "sigmoid" else ops.softmax(scores)
        values = values / values.sum(-1)[..., None]
        mean = (values * real[..., None]).sum(1) / tokens[:, None]
        even = router.experts / router.chosen
        block.stats["balance"] = (load * mean).sum(-1) * even / tokens
    if "router_z" in wanted:
        block.stats["router_z"] = (ops.logsumexp(scores) ** 2 * real).sum(-1) / tokens


def _load(router: Router, chosen: Array, real: Array, ops: Ops) -> Array:
    """Copies that each expert got of each row's real tokens, fp32 [B, E]."""
    rows = chosen.shape[0]
    weights = (real[..., None] + ops.cast(chosen * 0, "float32")).reshape(rows, -1)
    return ops.tally(chosen.reshape(rows, -1), weights, router.experts)


def _real_tokens(block: Block, like: Array) -> Array:
    """1 where a token is not padding, fp32 [B, T]."""
    ops, segments = block.ops, block.context.segments
    if segments is None:
        return ops.full(like.shape[:2], 1.0, like)
    return ops.cast(segments > 0, "float32")
