"""Losses of preferences: DPO, IPO, KTO, ORPO, SimPO, and the Bradley-Terry loss of reward models.

A row of tokens holds whole documents, of which D are described by arrays [B, D]: an answer that is
to become likelier (`sides` 1) or less likely (-1), or one without weight (0). In pairs, the
documents are by turns the chosen and the rejected answer to a prompt. With c, r the log-ratios
log p - log p_ref of a pair's answers, summed over their tokens (`length_norm`: divided by their
numbers), m the mean log-probability of a token, h = beta (c - r) and s the logistic function:
  dpo     -(1 - e) log s(h) - e log s(-h), e the label smoothing (arXiv 2305.18290; Mitchell 2023)
  ipo     (c - r - 1 / (2 beta))^2 (arXiv 2310.12036, equation 17)
  simpo   -log s(beta (m_c - m_r) - margin) (arXiv 2405.14734, equation 6)
  orpo    nll - beta log s(o_c - o_r), o = m - log(1 - e^m) (arXiv 2403.07691, equations 6 and 7)
  kto     1 - s(beta (c - z)) and 1 - s(beta (z - r)) of single answers; z, a constant, is the mean
          log-ratio of mismatched answers, at least 0 (arXiv 2402.01306, equation 8)
  reward  -log s(v_c - v_r), v the score of an answer's last token (arXiv 2203.02155, equation 1)
The loss is the mean over pairs (kto: over answers). nll is the mean of -log p over all tokens of
chosen answers of the step; a coefficient adds it to the other losses.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from sabia.core.model.forward import gather_tensors, hidden, token_losses
from sabia.core.ops.base import Array, Ops, Params, Remat
from sabia.core.spec.model import ModelSpec
from sabia.core.train.losses.next_token import (
    OF_TOKENS,
    WHOLE_ROWS,
    Batch,
    Sums,
    of_whole_rows,
    sums_by_source,
    takes_some_tokens,
)

WITH_REFERENCE = ("dpo", "ipo", "kto")
_ALMOST_CERTAIN = -1e-6  # the largest mean log-probability of ORPO's odds


@dataclass(frozen=True)
class PreferenceLoss:
    """The settings of a loss; `undesirable`: weight of KTO's rejected answers."""

    kind: str
    beta: float = 0.1
    smoothing: float = 0.0
    length_norm: bool = False
    nll: float = 0.0
    margin: float = 0.0
    undesirable: float = 1.0


class Answers(NamedTuple):
    """Answers of one shape: the sums of log-probabilities over their tokens, of the model and of
    the reference, and the numbers of tokens. Of a reward model `logp` are the scores."""

    logp: Any
    reference: Any
    length: Any


def rewards(x: Answers, options: PreferenceLoss) -> Any:
    """What a loss compares: beta times the log-ratio or the mean log-probability, or the score."""
    if options.kind == "reward":
        return x.logp
    if options.kind in WITH_REFERENCE:
        ratio = x.logp - x.reference
        return options.beta * (ratio / x.length if options.length_norm else ratio)
    return options.beta * x.logp / x.length


def pair_losses(chosen: Answers, rejected: Answers, options: PreferenceLoss, ops: Ops) -> Any:
    """Losses of pairs without the term of the likelihood; all but kto."""
    h = rewards(chosen, options) - rewards(rejected, options)
    if options.kind == "ipo":
        distance = h / options.beta - 1 / (2 * options.beta)
        return distance * distance
    if options.kind == "orpo":
        odds = _log_odds(chosen, ops) - _log_odds(rejected, ops)
        return options.beta * ops.softplus(-odds)
    if options.kind == "simpo":
        h = h - options.margin
    e = options.smoothing
    loss = ops.softplus(-h)  # -log s(h)
    return (1 - e) * loss + e * ops.softplus(h) if e else loss


def answer_losses(x: Answers, sides: Array, z: Array, options: PreferenceLoss, ops: Ops) -> Any:
    """KTO's losses of single answers, with their weights; 0 where `sides` is 0."""
    distance = rewards(x, options) - options.beta * z
    # 1 - s(x) = s(-x)
    loss = ops.sigmoid(-distance * sides)
    return loss * ops.where(sides < 0, -options.undesirable * sides, sides)


def _log_odds(x: Answers, ops: Ops) -> Any:
    mean = x.logp / x.length
    mean = ops.where(mean > _ALMOST_CERTAIN, _ALMOST_CERTAIN, mean)
    return mean - ops.log1mexp(mean)


@takes_some_tokens
def preference_loss(
    spec: ModelSpec,
    params: Params,
    batch: Batch,
    ops: Ops,
    *,
    options: PreferenceLoss,
    remat: Remat = "none",
) -> Sums:
    """The loss of a micro-batch as (numerator, its share of the denominator, sums).

    Besides the arrays of a packed batch (input_ids, targets, loss_mask, segments, positions
    [B, T], and those of core.train.losses.computed_tokens): sides, reference [B, D]; z (of kto) and
    per_token [B, 1], constants of the whole step: per_token is pairs / tokens of chosen answers.
    loss_mask: the tokens that are predicted, or with `reward` the last token of each document.
    Sums: of rewards and log-probabilities by side, of margins and of pairs in the right order; with
    slot[B, M] also `documents` [M, D], the log-probabilities of each row's documents.
    """
    given: Any = {name: batch.get(name) for name in OF_TOKENS}
    x = hidden(spec, params, batch["input_ids"], ops, remat=remat, **given)
    if options.kind == "reward":
        w = gather_tensors(params, ops, "classifier", "classifier_bias")
        scores = ops.linear(x, w["classifier"], w.get("classifier_bias"), name="classifier")
        values = ops.cast(scores, "float32")[:, :, 0]
    else:
        values = -token_losses(spec, params, x, batch["targets"], ops)[0]
    answers = _answers(values * batch["loss_mask"], batch, ops)
    sides = batch["sides"]
    is_chosen, is_rejected = (ops.where(s > 0, s, 0.0) for s in (sides, -sides))  # [B, D]
    if options.kind == "kto":
        losses = answer_losses(answers, sides, batch["z"], options, ops)  # [B, D]
        weights = is_chosen + is_rejected
    else:
        weights = sides[:, 0::2]
        chosen, rejected = (Answers(*(x[:, side::2] for x in answers)) for side in (0, 1))
        losses = pair_losses(chosen, rejected, options, ops)
        losses = ops.where(weights > 0, losses, 0.0)  # [B, P]
    rows, counts = losses.sum(-1), weights.sum(-1)  # [B]
    nll = 1.0 if options.kind == "orpo" else options.nll
    if nll:
        rows = rows - nll * (answers.logp * is_chosen).sum(-1) * batch["per_token"][:, 0]
    sums = _figures(ops.stop_gradient(rewards(answers, options)), answers, sides, ops)
    sums["tokens"] = ops.relayout(batch["loss_mask"], *WHOLE_ROWS).sum()
    sums |= sums_by_source(rows, counts, batch["source"], ops)
    if "slot" in batch:
        sums["documents"] = (batch["slot"][:, :, None] * answers.logp[:, None, :]).sum(0)
    return of_whole_rows((rows.sum(), counts.sum(), sums), batch["input_ids"], ops)


def _answers(values: Array, batch: Batch, ops: Ops) -> Answers:
    """Sums [B, D] over the documents of whole rows of values[B, T]; a length is at least 1."""
    values, mask = (ops.relayout(x, *WHOLE_ROWS) for x in (values, batch["loss_mask"]))
    segments = ops.whole_segments(ops.integers(batch["segments"], values))
    if "outputs" in batch:
        segments = ops.take_along(segments, ops.integers(batch["outputs"], values))
    numbers = ops.arange(batch["sides"].shape[1], values) + 1
    inside = ops.cast(segments[:, :, None] == numbers, "float32")  # [B, T, D]
    logp, length = ((x[:, :, None] * inside).sum(1) for x in (values, mask))
    return Answers(logp, batch["reference"], ops.where(length > 1, length, 1.0))


def _figures(reward: Array, answers: Answers, sides: Array, ops: Ops) -> dict[str, Array]:
    """Sums over answers of each side, and over pairs: documents d and d + 1 of the two sides."""
    sums: dict[str, Array] = {}
    logp = ops.stop_gradient(answers.logp)
    for name, weights in (("chosen", sides), ("rejected", -sides)):
        weights = ops.where(weights > 0, weights, 0.0)
        for what, figure in (("reward", reward), ("logp", logp)):
            sums[f"{what}_{name}"] = (figure * weights).sum()
        sums[f"count_{name}"] = weights.sum()
    pair = ops.where(sides[:, 1:] < 0, ops.where(sides[:, :-1] > 0, 1.0, 0.0), 0.0)  # [B, D - 1]
    margin = reward[:, :-1] - reward[:, 1:]
    sums["margin"] = (margin * pair).sum()
    sums["right"] = ops.where(margin > 0, pair, 0.0).sum()
    sums["pairs"] = pair.sum()
    return sums
