"""Guards against bad data and bad steps: limits from what was seen, and which rows are to blame.

A step whose loss or gradient norm lies more than `sigmas` above the median of the last accepted
steps, or is not a number, is not taken (the update is withheld inside the step). Then the rows of
the step are judged one by one. Where some stand out they are left out and the step is taken without
them; where none or most do, the model itself has gone wrong: the run goes back to its last good
checkpoint, and on without the rows that stand out there (`core.train.loop`).

Spread is 1.4826 times the median absolute deviation (Rousseeuw and Croux, JASA 88, 1993), which a
few bad steps do not widen, and at least FLOOR of the median, so that noise does not stop a quiet
run (norms vary far more than losses, and clipping tames most of that). Skipping a step by such a
limit is OLMo's (OLMo 2, arXiv 2501.00656, section 3.3), going back and leaving data out is what
PaLM's authors did by hand (arXiv 2204.02311, section 5.1).
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

FLOOR = {"loss": 0.02, "grad_norm": 10.0}  # least spread, as a share of the median
NORMAL = 1.4826
INFINITE = (math.inf, math.inf)


@dataclass(frozen=True)
class GuardConfig:
    """What to do about a spike, and when a step is one.

    action: rewind; stop with an error; or off, which takes any finite step. least: accepted steps
    before any is judged. row_sigmas: how far the loss of a row stands out to be left out. rewinds,
    most_left_out (a share of the rows): of one run, before it gives up.
    """

    action: str
    sigmas: float
    window: int = 64
    least: int = 32
    row_sigmas: float = 8.0
    rewinds: int = 8
    most_left_out: float = 0.1


class SpikeGuard:
    """The last accepted steps of a run, and the limits they set for the next."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.seen: dict[str, deque[float]] = {
            name: deque(maxlen=config.window) for name in ("loss", "grad_norm")
        }

    def limits(self) -> tuple[float, float]:
        """The largest loss and gradient norm of a step that may be taken."""
        if self.config.action == "off" or len(self.seen["loss"]) < self.config.least:
            return INFINITE
        return self._limit("loss"), self._limit("grad_norm")

    def _limit(self, name: str) -> float:
        values = np.array(self.seen[name])
        middle = float(np.median(values))
        spread = NORMAL * float(np.median(np.abs(values - middle)))
        return middle + self.config.sigmas * max(spread, FLOOR[name] * abs(middle))

    def accept(self, figures: Mapping[str, Any]) -> None:
        """Take in a step that was taken."""
        for name, values in self.seen.items():
            values.append(float(figures[name]))

    def forget(self) -> None:
        """Begin anew: what comes is not to be judged by what was (another mix of data)."""
        for values in self.seen.values():
            values.clear()

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint: a resumed run decides as one that was never stopped."""
        return {name: list(values) for name, values in self.seen.items()}

    def load(self, state: Mapping[str, Iterable[float]]) -> None:
        """Take over a state."""
        for name, values in self.seen.items():
            values.clear()
            values.extend(state.get(name, ()))


def outliers(losses: np.ndarray, groups: np.ndarray, sigmas: float) -> np.ndarray:
    """Which rows stand out, bool[R], by their mean losses[R] (NaN: a row without tokens).

    Rows are compared with those of their group (source); infinite losses always stand out.
    """
    found = np.isinf(losses)
    for group in np.unique(groups):
        here = (groups == group) & np.isfinite(losses)
        if here.sum() < 4:
            continue
        middle = np.median(losses[here])
        spread = max(NORMAL * np.median(np.abs(losses[here] - middle)), FLOOR["loss"] * middle)
        found |= here & (np.abs(losses - middle) > sigmas * spread)
    return found
