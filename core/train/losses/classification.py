"""The losses of sequence classifiers: cross-entropy, binary cross-entropy per label, squared error.

A batch has labels[B, L] fp32 (a distribution over labels; 0 or 1 each; numbers), weights of its
rows as loss_mask[B, 1], and pool[B, T] (core.model.forward). Returns sums, as
core.train.losses.next_token does. Their quotient is the weighted mean over rows of transformers
(and of torch with class weights).
"""

from sabia.core.errors import UsageError
from sabia.core.model.forward import class_logits, hidden
from sabia.core.ops.base import Array, Ops, Params, Remat
from sabia.core.spec.model import ModelSpec, Problem
from sabia.core.train.losses.next_token import Batch, Sums, sums_by_source


def classification_loss(
    spec: ModelSpec, params: Params, batch: Batch, ops: Ops, problem: Problem, remat: Remat = "none"
) -> Sums:
    """Sums of loss and weight over rows; extras: the same by source, and the number of tokens."""
    packing = {name: batch.get(name) for name in ("positions", "segments")}
    x = hidden(spec, params, batch["input_ids"], ops, remat=remat, **packing)
    scores = class_logits(spec, params, x, batch["pool"], ops)  # [B, L]
    weights = batch["loss_mask"][:, 0]  # [B]
    rows = row_losses(scores, batch["labels"], problem, ops) * weights
    extras = sums_by_source(rows, weights, batch["source"], ops)
    extras["tokens"] = batch["tokens"].sum()
    return rows.sum(), weights.sum(), extras


def row_losses(scores: Array, labels: Array, problem: Problem, ops: Ops) -> Array:
    """Losses [B] of scores[B, L] and labels[B, L]."""
    if problem == "single_label_classification":  # -Σ_l y_l log softmax(s)_l with Σ_l y_l = 1
        return ops.logsumexp(scores) - (scores * labels).sum(-1)
    if problem == "multi_label_classification":  # mean over labels of log(1 + e^s) - y s
        return (ops.softplus(scores) - scores * labels).mean(-1)
    if problem == "regression":
        return ((scores - labels) * (scores - labels)).mean(-1)
    raise UsageError(f"problem: {problem!r} (expected a kind of sequence classification)")
