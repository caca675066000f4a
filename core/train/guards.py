"""Detection of loss spikes: limits computed from accepted steps, and the rows that are outliers.

A step whose loss or gradient norm is more than `sigmas` robust standard deviations above the median
of the last accepted steps, or not a number, makes no update. Then the loss of each row of the step
is computed. If some rows are outliers, the step is repeated without them; if none or most are, the
model itself has diverged: the run goes back to its last valid checkpoint and skips the outlier rows
from there on (`core.train.loop`).

A robust standard deviation is 1.4826 times the median absolute deviation (MAD; Rousseeuw and Croux,
JASA 88, 1993), which a few bad steps do not change, and at least MIN_SPREAD of the median, so that
noise does not stop a stable run (norms vary far more than losses, and clipping removes most of
that). OLMo skips steps by such a limit (OLMo 2, arXiv 2501.00656, section 3.3); PaLM's authors
rewound and skipped data by hand (arXiv 2204.02311, section 5.1).
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

MIN_SPREAD = {"loss": 0.02, "grad_norm": 10.0}  # least spread, as a share of the median
MAD_TO_SIGMA = 1.4826
NO_LIMITS = (math.inf, math.inf)


@dataclass(frozen=True)
class GuardConfig:
    """The definition of a spike, and what to do about it.

    action: rewind; stop with an error; or off, which accepts any finite step. window: accepted
    steps that limits are computed from; min_steps: as many before limits apply. row_sigmas:
    threshold for outlier rows. rewinds, max_skipped_share (of all rows): a run that needs more ends
    with an error.
    """

    action: str
    sigmas: float
    window: int
    min_steps: int
    row_sigmas: float
    rewinds: int
    max_skipped_share: float


class SpikeGuard:
    """The last accepted steps of a run, and the limits for the next step."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.accepted: dict[str, deque[float]] = {
            name: deque(maxlen=config.window) for name in ("loss", "grad_norm")
        }

    def limits(self) -> tuple[float, float]:
        """The largest loss and gradient norm of an accepted step."""
        if self.config.action == "off" or len(self.accepted["loss"]) < self.config.min_steps:
            return NO_LIMITS
        return self._limit("loss"), self._limit("grad_norm")

    def _limit(self, name: str) -> float:
        # [steps in the window]
        values = np.array(self.accepted[name])
        median = float(np.median(values))
        spread = MAD_TO_SIGMA * float(np.median(np.abs(values - median)))
        # median + sigmas · max(1.4826 MAD, MIN_SPREAD median)
        return median + self.config.sigmas * max(spread, MIN_SPREAD[name] * abs(median))

    def accept(self, loss: float, grad_norm: float) -> None:
        """Record the loss and gradient norm of an accepted step."""
        self.accepted["loss"].append(float(loss))
        self.accepted["grad_norm"].append(float(grad_norm))

    def reset(self) -> None:
        """Forget all steps, because those of another data mix are not comparable."""
        for values in self.accepted.values():
            values.clear()

    def state(self) -> dict[str, list[float]]:
        """The state for a checkpoint, so that a resumed run makes the same decisions."""
        return {name: list(values) for name, values in self.accepted.items()}

    def load(self, state: Mapping[str, Iterable[float]]) -> None:
        """Load a state."""
        for name, values in self.accepted.items():
            values.clear()
            values.extend(state.get(name, ()))


def outliers(losses: np.ndarray, groups: np.ndarray, sigmas: float) -> np.ndarray:
    """Whether each row is an outlier, bool[R], by its mean loss (NaN: a row without tokens).

    Rows are compared with those of their group (source); an infinite loss is always an outlier.
    """
    is_outlier = np.isinf(losses)
    for group in np.unique(groups):
        in_group = (groups == group) & np.isfinite(losses)
        # too few rows for a median
        if in_group.sum() < 4:
            continue
        median = np.median(losses[in_group])
        deviation = np.median(np.abs(losses[in_group] - median))
        spread = max(MAD_TO_SIGMA * deviation, MIN_SPREAD["loss"] * median)
        is_outlier |= in_group & (np.abs(losses - median) > sigmas * spread)
    return is_outlier
