"""The next-token loss, and the form of all losses: pure functions `loss(spec, params, batch, ops)`.

A loss returns (loss_sum, weight_sum, extras): sums over its batch, never means, so that
micro-batches, processes and devices add up, and one division by the global weight gives the exact
mean. `extras` are further sums (scalars or vectors) and are added up in the same way. The stepper
differentiates only loss_sum. Bind settings with functools.partial.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sabia.core.model.forward import Stats, hidden_and_stats, logits, token_losses
from sabia.core.ops.base import Array, Ops, Params, Remat
from sabia.core.spec.model import ModelSpec

Batch = Mapping[str, Array]
Sums = tuple[Array, Array, dict[str, Array]]
Loss = Callable[[ModelSpec, Params, Batch, Ops], Sums]
LossFunction = TypeVar("LossFunction", bound=Callable[..., Sums])

# arrays of a batch that say where its tokens are, and which of them a loss needs; not all are given
OF_TOKENS = ("positions", "segments", "keys", "queries", "outputs")
TAKE_SOME_TOKENS: list[Callable[..., Sums]] = []  # losses of batches of losses.computed_tokens
_NEVER = -1e30  # the score of a token that is left out
WHOLE_ROWS = ("batch", "sequence"), ("batch", None)


@dataclass(frozen=True)
class Distillation:
    """The divergence of a teacher as a loss: KL(teacher ‖ model) for each token.

    share: of it in the loss; the rest is the cross-entropy of the labels. top: how many of the
    teacher's likeliest tokens are compared, 0 for all; their probabilities are divided by their
    sum.
    """

    share: float = 1.0
    top: int = 0


def takes_some_tokens(loss: LossFunction) -> LossFunction:
    """A loss that reads OF_TOKENS, so that not all tokens of its batches are computed."""
    TAKE_SOME_TOKENS.append(loss)
    return loss


@takes_some_tokens
def next_token_loss(
    spec: ModelSpec,
    params: Params,
    batch: Batch,
    ops: Ops,
    *,
    remat: Remat = "none",
    balance: float = 0.0,
    router_z: float = 0.0,
    z_loss: float = 0.0,
    teacher: Distillation | None = None,
) -> Sums:
    """Cross-entropy (nats) of targets[B, T] given input_ids[B, T], weighted by loss_mask[B, T].

    Optional in the batch: segments and positions [B, T] of packed documents, the arrays of
    core.train.losses.computed_tokens, and source[B, S] (one-hot), for which extras hold
    `source_loss` and `source_weight`, sums [S] of each source.

    Coefficients of terms added per unit of weight: z_loss · logsumexp(logits)² (PaLM, arXiv
    2204.02311 section 5), and balance and router_z times the statistics of core.model.feed_forward,
    which are per row, averaged over the layers with experts. With any of them extras hold `nll`,
    the sum without them. With experts, extras hold `expert_load` [layers with experts, E], the
    assignments of each expert in the rows with weight.

    teacher: its divergence takes the place of a share of the cross-entropy; the batch has the
    arrays of core.train.teacher. Extras then hold `nll` too, and `kl`, the sum of divergences.
    """
    requested = {"expert_load": True, "balance": balance, "router_z": router_z}
    options: Any = {"wanted": frozenset(name for name, flag in requested.items() if flag)}
    options |= {name: batch.get(name) for name in OF_TOKENS}
    x, stats = hidden_and_stats(spec, params, batch["input_ids"], ops, remat=remat, **options)
    nll, lse = token_losses(spec, params, x, batch["targets"], ops)  # [B, T] each
    mask = batch["loss_mask"]
    rows, weights = (nll * mask).sum(-1), mask.sum(-1)  # [B] each
    extras: dict[str, Any] = {}
    if "source" in batch:
        extras = sums_by_source(rows, weights, batch["source"], ops)
    if balance or router_z or z_loss or teacher:
        extras["nll"] = rows.sum()
    if teacher is not None:
        kl = (divergence(logits(spec, params, x, ops), batch, ops) * mask).sum(-1)  # [B]
        extras["kl"] = kl.sum()
        rows = kl if teacher.share == 1 else teacher.share * kl + (1 - teacher.share) * rows
    if z_loss:
        # z-loss: coefficient · Σ_t mask · logsumexp²
        rows = rows + z_loss * (lse * lse * mask).sum(-1)
    for name, coefficient in (("balance", balance), ("router_z", router_z)):
        if coefficient and name in stats:
            # a statistic of a row counts once per token of the row
            rows = rows + coefficient * _layer_mean(stats, name) * weights
    if "expert_load" in stats:
        extras["expert_load"] = _expert_loads(stats, ops.relayout(mask, *WHOLE_ROWS), ops)
    return rows.sum(), weights.sum(), extras


def divergence(scores: Array, batch: Batch, ops: Ops) -> Array:
    """Σ p log p + logsumexp(z) - Σ p z of scores z[..., V], [...].

    With teacher_ids the sums are over these tokens. With teacher_rest all other tokens together are
    one more outcome, whose probability is the rest of the teacher's: for z in its place stands the
    logsumexp of their scores.
    """
    normalizer = ops.logsumexp(scores)
    chosen, rest = scores, 0.0
    if "teacher_ids" in batch:
        ids = ops.integers(batch["teacher_ids"], scores)
        chosen = ops.take_along(scores, ids)
        if "teacher_rest" in batch:
            others = ops.logsumexp(ops.put_along(scores, ids, _NEVER))
            rest = batch["teacher_rest"] * others
    expected = (batch["teacher_probabilities"] * chosen).sum(-1)
    return batch["teacher_information"] + normalizer - expected - rest


def sums_by_source(losses: Array, weights: Array, source: Array, ops: Ops) -> dict[str, Array]:
    """source_loss, source_weight: sums [S] of figures [B] of rows with source[B, S] (one-hot); NaN
    affects only its own source."""
    figures = {"source_loss": losses, "source_weight": weights}
    return {
        name: ops.where(source > 0, figure[:, None] * source, 0.0).sum(0)
        for name, figure in figures.items()
    }


def of_whole_rows(sums: Sums, ids: Array | None, ops: Ops) -> Sums:
    """The share of one of the processes that hold tokens of the same rows, as ids[B, T], and that
    have all computed these sums over the whole rows."""
    own = 1.0 if ids is None else ids.shape[1] / ops.whole_segments(ids).shape[1]
    if own == 1:
        return sums
    total, weight, more = sums
    return total * own, weight * own, {name: x * own for name, x in more.items()}


def _layer_mean(stats: Stats, name: str) -> Array:
    """Mean over layers of a statistic [B]."""
    values = list(stats[name].values())
    return sum(values[1:], values[0]) / len(values)


def _expert_loads(stats: Stats, mask: Array, ops: Ops) -> Array:
    """[layers with experts, E]: loads of the rows with weight (the others are padding)."""
    counts = ops.cast(mask.sum(-1) > 0, "float32")  # [B], 1 for rows with weight
    loads = stats["expert_load"]
    return ops.concat([(counts @ loads[index])[None] for index in sorted(loads)], 0)
