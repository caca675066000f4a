"""Losses over the shared forward pass: pure functions `loss(spec, params, batch, ops)`.

A loss returns (loss_sum, weight_sum, extras): sums over the batch it was given, never means, so
that micro-batches, processes and devices add up and one division by the global weight gives the
exact mean. `extras` are further sums (scalars or vectors) and are added up in the same way. The
stepper differentiates loss_sum alone. Bind settings with functools.partial.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sabia.core.model.forward import Stats, hidden_and_stats, token_losses
from sabia.core.model.ops import Array, Ops, Params, Remat
from sabia.core.spec.model import ModelSpec

Loss = Callable[
    [ModelSpec, Params, Mapping[str, Array], Ops], tuple[Array, Array, dict[str, Array]]
]

_WHOLE_ROWS = ("batch", "sequence"), ("batch", None)


def next_token_loss(
    spec: ModelSpec,
    params: Params,
    batch: Mapping[str, Array],
    ops: Ops,
    *,
    remat: Remat = "none",
    balance: float = 0.0,
    router_z: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Array, Array, dict[str, Array]]:
    """Cross-entropy (nats) of targets[B, T] given input_ids[B, T], weighted by loss_mask[B, T].

    Optional in the batch: segments and positions [B, T] of packed documents, and source[B, S]
    (one-hot), for which extras hold `source_loss` and `source_weight`, sums [S] of each source.

    Coefficients of terms added per unit of weight: z_loss · logsumexp(logits)² (PaLM, arXiv
    2204.02311 section 5), and balance and router_z times the figures of core.model.moe, which
    belong to a row, averaged over the layers with experts. With any of them extras hold `nll`, the
    sum without them. A model with experts gives `expert_load` [layers with experts, E], the token
    copies that each got in the rows that count.
    """
    x, stats = hidden_and_stats(
        spec,
        params,
        batch["input_ids"],
        ops,
        positions=batch.get("positions"),
        segments=batch.get("segments"),
        remat=remat,
        wanted=_wanted(balance, router_z),
    )
    nll, lse = token_losses(spec, params, x, batch["targets"], ops)
    mask = batch["loss_mask"]
    rows, weights = (nll * mask).sum(-1), mask.sum(-1)
    extras: dict[str, Any] = {}
    if "source" in batch:
        extras = {name: by_source(x, batch["source"], ops)
                  for name, x in (("source_loss", rows), ("source_weight", weights))}  # fmt: skip
    if balance or router_z or z_loss:
        extras["nll"] = rows.sum()
    if z_loss:
        rows = rows + z_loss * (lse * lse * mask).sum(-1)
    for name, coefficient in (("balance", balance), ("router_z", router_z)):
        if coefficient and name in stats:
            rows = rows + coefficient * _layer_mean(stats, name) * weights
    if "expert_load" in stats:
        extras["expert_load"] = _loads(stats, ops.relayout(mask, *_WHOLE_ROWS), ops)
    return rows.sum(), weights.sum(), extras


def by_source(figures: Array, source: Array, ops: Ops) -> Array:
    """Sums [S] of figures[B] by source[B, S]; what is not a number stays in its source."""
    return ops.where(source > 0, figures[:, None] * source, 0.0).sum(0)


def _wanted(balance: float, router_z: float) -> frozenset[str]:
    asked = {"expert_load": True, "balance": balance, "router_z": router_z}
    return frozenset(name for name, flag in asked.items() if flag)


def _layer_mean(stats: Stats, name: str) -> Array:
    """Mean over layers of a figure [B]."""
    found = list(stats[name].values())
    return sum(found[1:], found[0]) / len(found)


def _loads(stats: Stats, mask: Array, ops: Ops) -> Array:
    """[layers with experts, E]: loads of the rows with weight (the others pad a batch)."""
    counts = ops.cast(mask.sum(-1) > 0, "float32")
    found = stats["expert_load"]
    return ops.concat([(counts @ found[index])[None] for index in sorted(found)], 0)
