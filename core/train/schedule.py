"""Learning-rate schedules in NumPy, one for both backends: WSD, cosine, constant.

Convention: `step` is the number of updates already made, 0 … steps - 1. The warm-up counts the
update itself, (step + 1) / warmup, and the tail what is left, (steps - step) / decay, so neither
the first nor the last update is made at rate 0. With 1000 steps, a warm-up of 100 and a linear
tail of 200: lr(50) = 0.51, lr(99 … 800) = 1, lr(900) = 0.5, lr(999) = 0.005, lr(1000) = 0.
Sources: WSD, Hu et al. 2024 (arXiv 2404.06395); its 1 - sqrt tail, Hägele et al. 2024 (arXiv
2405.18392); cosine, Loshchilov and Hutter 2017 (arXiv 1608.03983).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sabia.core.errors import UsageError

KINDS = ("wsd", "cosine", "constant")
TAILS = ("linear", "1-sqrt")


@dataclass(frozen=True)
class ScheduleConfig:
    """peak and final rate, and the steps of warm-up, of the decay (WSD) and in all."""

    peak: float
    steps: int
    warmup: int = 0
    kind: str = "wsd"
    decay: int = 0
    tail: str = "linear"
    final: float = 0.0  # share of the peak that is left after the last step

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"schedule: {self.kind!r} (expected one of {', '.join(KINDS)})")
        if self.tail not in TAILS:
            raise UsageError(f"decay shape: {self.tail!r} (expected {' or '.join(TAILS)})")
        if self.steps < 1 or self.warmup < 0 or self.decay < 0 or not 0 <= self.final <= 1:
            raise UsageError(
                f"schedule: {self.steps} steps, {self.warmup} warm-up, {self.decay} decay, final "
                f"share {self.final} (expected 1 step or more, no negative part, 0 to 1)"
            )
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise UsageError(f"learning rate: {self.peak} (expected above 0)")
        if self.warmup + (self.decay if self.kind == "wsd" else 0) > self.steps:
            raise UsageError(
                f"schedule: {self.warmup} warm-up and {self.decay} decay steps in {self.steps} "
                "(expected at most that many together)"
            )


def learning_rate(step: int, config: ScheduleConfig) -> float:
    """The rate of the update made after `step` updates (see the convention above)."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    return config.peak * warm * (config.final + (1 - config.final) * _shape(step, config))


def _shape(step: int, config: ScheduleConfig) -> float:
    """The part of 1 … 0 that the schedule has come down to, warm-up apart."""
    if config.kind == "cosine":
        span = max(1, config.steps - config.warmup)
        done = min(max(step - config.warmup, 0) / span, 1.0)
        return 0.5 * (1 + math.cos(math.pi * done))
    if config.kind == "constant" or not config.decay:
        return 1.0
    left = min(max(config.steps - step, 0) / config.decay, 1.0)
    return left if config.tail == "linear" else 1 - math.sqrt(1 - left)
