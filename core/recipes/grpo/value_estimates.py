"""Advantages by a value head: from the rewards and values of a step's samples to its batches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sabia.core.options.grpo import ValueOptions
from sabia.core.recipes.grpo.sample_batch import Batch
from sabia.core.train.losses.value import mean_and_scale, moments, token_advantages


class Estimates(NamedTuple):
    """Sums over the trained tokens of a step: their number, the returns, the returns less the
    values, and the squares of both."""

    valued: float = 0.0
    returns: float = 0.0
    returns_squared: float = 0.0
    residuals: float = 0.0
    residuals_squared: float = 0.0

    @property
    def explained_variance(self) -> float:
        """1 - variance of returns less values / variance of returns; 0 where those are equal."""
        n = max(self.valued, 1.0)
        variance = self.returns_squared / n - (self.returns / n) ** 2
        left = self.residuals_squared / n - (self.residuals / n) ** 2
        return 1 - left / variance if variance > 1e-12 else 0.0


def estimated(batch: Batch, values: np.ndarray, options: ValueOptions) -> Batch:
    """advantage, returns, values [R, g, C] of a batch that has rewards as advantage: those of the
    last tokens [R, g, 1], or of all tokens [R, g, C]."""
    present = batch["targets"] >= 0
    last = np.eye(present.shape[-1], dtype=bool)[present.sum(-1) - 1] & present
    values = np.where(present, values, 0.0)
    of_tokens = batch["advantage"].shape[-1] > 1
    rewards = batch["advantage"] if of_tokens else np.where(last, batch["advantage"], 0.0)
    given = (rewards, values.astype(np.float64), present, options.discount, options.gae_lambda)
    advantage = token_advantages(*given)
    made = {"advantage": advantage, "returns": advantage + values, "values": values}
    return {name: x.astype(np.float32) for name, x in made.items()}


def normalise(
    batches: Sequence[Batch], share: float, gather: Callable[[Any], Sequence[Any]]
) -> Estimates:
    """Normalise the advantages of a step's batches, in place, over all processes; this process's
    sums.

    share: the part of its tokens that a process counts, where several have the same; gather: the
    objects of all processes.
    """
    masks = [batch["loss_mask"] for batch in batches]
    own = share * moments([batch["advantage"] for batch in batches], masks)
    mean, scale = mean_and_scale(np.sum(gather(own), 0))
    for batch, mask in zip(batches, masks, strict=True):
        batch["advantage"] = ((batch["advantage"] - mean) * scale * mask).astype(np.float32)
    returns = [batch["returns"] for batch in batches]
    residuals = [batch["returns"] - batch["values"] for batch in batches]
    parts = share * moments(returns, masks), share * moments(residuals, masks)[1:]
    return Estimates(*np.concatenate(parts).tolist())
