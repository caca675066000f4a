"""Learning-rate schedules for both backends: WSD, cosine, constant.

Convention: `step` is the number of updates already made, 0 … steps - 1. The warm-up counts the
update itself, (step + 1) / warmup, and the decay the remaining steps, (steps - step) / decay, so
neither the first nor the last update has rate 0. With 1000 steps, a warm-up of 100 and a linear
decay of 200: lr(50) = 0.51, lr(99 … 800) = 1, lr(900) = 0.5, lr(999) = 0.005, lr(1000) = 0.
With x the elapsed share of the decay, 0 … 1, its shapes are 1 - x (linear), 2 · 2^-x - 1
(exponential), (1 + cos πx) / 2 (cosine) and 1 - sqrt x (1-sqrt); Megatron-LM's four shapes.
Sources: WSD, Hu et al. 2024 (arXiv 2404.06395); its 1 - sqrt tail, Hägele et al. 2024 (arXiv
2405.18392); cosine, Loshchilov and Hutter 2017 (arXiv 1608.03983).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sabia.core.errors import UsageError

TAILS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "exponential": lambda done: 2 * 0.5**done - 1,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}


@dataclass(frozen=True)
class ScheduleConfig:
    """peak: largest rate; final: last rate as a share of it; steps: in all, of which `warmup` at
    the start and `decay` (WSD) at the end; kind: wsd, cosine, constant; tail: one of TAILS."""

    peak: float
    steps: int
    warmup: int
    kind: str
    decay: int
    tail: str
    final: float

    def __post_init__(self) -> None:
        if self.warmup + (self.decay if self.kind == "wsd" else 0) > self.steps:
            raise UsageError(
                f"--warmup: {self.warmup} steps of warm-up and {self.decay} of decay in "
                f"{self.steps} steps (expected at most {self.steps} together)"
            )


def learning_rate(step: int, config: ScheduleConfig) -> float:
    """The rate of the update made after `step` updates (see the convention above)."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    start, value = decay_start(config), 1.0
    if start < config.steps:
        # elapsed share of the decay, 0 … 1
        done = min(max(step - start, 0) / (config.steps - start), 1.0)
        value = TAILS["cosine" if config.kind == "cosine" else config.tail](done)
    return config.peak * warm * (config.final + (1 - config.final) * value)


def decay_start(config: ScheduleConfig) -> int:
    """Number of updates before the decay: this step is the last at the peak rate.

    WSD: steps - decay; cosine: the end of the warm-up; without a decay: steps.
    """
    if config.kind == "cosine":
        return config.warmup
    return config.steps - (config.decay if config.kind == "wsd" else 0)
