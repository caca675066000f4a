"""Losses over the shared forward pass: pure functions `loss(spec, params, batch, ops)`.

A loss returns (loss_sum, weight_sum, extras): sums over the batch it was given, never means, so
that micro-batches, processes and devices add up and one division by the global weight gives the
exact mean. `extras` are further sums (scalars or vectors) and are added up in the same way. The
stepper differentiates loss_sum alone. Bind settings with functools.partial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sabia.core.model.forward import hidden, token_losses
from sabia.core.model.ops import Array, Ops, Params, Remat
from sabia.core.spec.model import ModelSpec

Loss = Callable[
    [ModelSpec, Params, Mapping[str, Array], Ops], tuple[Array, Array, dict[str, Array]]
]


def next_token_loss(
    spec: ModelSpec,
    params: Params,
    batch: Mapping[str, Array],
    ops: Ops,
    *,
    remat: Remat = "none",
) -> tuple[Array, Array, dict[str, Array]]:
    """Cross-entropy (nats) of targets[B, T] given input_ids[B, T], weighted by loss_mask[B, T].

    Optional in the batch: segments and positions [B, T] of packed documents, and source[B, S]
    (one-hot), for which extras hold `source_loss` and `source_weight`, sums [S] of each source.
    """
    x = hidden(
        spec,
        params,
        batch["input_ids"],
        ops,
        positions=batch.get("positions"),
        segments=batch.get("segments"),
        remat=remat,
    )
    nll, _ = token_losses(spec, params, x, batch["targets"], ops)
    mask = batch["loss_mask"]
    rows, weights = (nll * mask).sum(-1), mask.sum(-1)
    extras: dict[str, Any] = {}
    if "source" in batch:
        extras = {"source_loss": rows @ batch["source"], "source_weight": weights @ batch["source"]}
    return rows.sum(), weights.sum(), extras
