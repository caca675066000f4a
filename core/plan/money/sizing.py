"""What model to train with given chips and time: size and tokens by compute, memory and data.

Training FLOPs C = chips · peak · MFU · seconds are shared between parameters N and tokens D of a
dense model, C = 6ND. A curve over tokens per parameter gives the loss of each pair by a scaling law
(scaling.py, or one's own: fitted.py), and whether the chips hold its state. The best pair that fits
has the least loss: smaller models cost less to serve, and lose little over a wide range.

With fewer unique tokens than are trained on, repetitions count less (Muennighoff et al. 2023,
arXiv 2305.16264, section 3.1 and appendix A): the loss is that of D' = U + U·R(1 - e^(-(D/U-1)/R))
tokens, R = 15.39, and of N' likewise from the size that is optimal for U tokens, R = 5.31.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sabia.core.plan.compute import FLOPS_PER_PARAM_TOKEN
from sabia.core.plan.money.scaling import Pair, ScalingLaw

REPEATED_TOKENS = 15.387756  # R*_D and R*_N of the paper's fit
REPEATED_PARAMS = 5.309743
CURVE = (5, 10, 20, 40, 80, 160, 320, 640, 1280)  # tokens per parameter
RANGE = 0.1, 1e5  # the same, of all that is tried


@dataclass(frozen=True)
class Budget:
    """Training FLOPs, the law, the unique tokens (None: enough), the parameters that fit."""

    flops: float
    law: ScalingLaw
    unique: float | None
    most_params: float

    def pair(self, tokens_per_param: float) -> Pair:
        """The pair that uses all FLOPs at this ratio."""
        params = math.sqrt(self.flops / FLOPS_PER_PARAM_TOKEN / tokens_per_param)
        return Pair(params, params * tokens_per_param)

    def loss(self, pair: Pair, law: ScalingLaw | None = None) -> float:
        """Predicted loss, with repetitions of the data."""
        law = law or self.law
        if self.unique is None or pair.tokens <= self.unique:
            return law.loss(pair.params, pair.tokens)
        optimal = params_for(law, self.unique)
        return law.loss(
            worn(pair.params, min(pair.params, optimal), REPEATED_PARAMS),
            worn(pair.tokens, self.unique, REPEATED_TOKENS),
        )

    def curve(self) -> Iterator[Pair]:
        """The pairs of CURVE, largest model first."""
        return (self.pair(ratio) for ratio in CURVE)

    def best(self, law: ScalingLaw | None = None) -> Pair:
        """The pair of least loss that the chips hold: the best of a fine grid."""
        low, high = map(math.log, RANGE)
        steps = [self.pair(math.exp(low + (high - low) * n / 4000)) for n in range(4001)]
        fitting = [pair for pair in steps if pair.params <= self.most_params] or steps[-1:]
        return min(fitting, key=lambda pair: self.loss(pair, law))


def worn(whole: float, once: float, repeats: float) -> float:
    """What `whole`, of which `once` is new, is worth: once + once·R(1 - e^(-(whole/once-1)/R))."""
    return once + once * repeats * -math.expm1(-(whole / once - 1) / repeats)


def params_for(law: ScalingLaw, tokens: float) -> float:
    """The size for which `tokens` are compute-optimal: αA/N^α = βB/D^β; inf where A or B is 0."""
    if not law.a or not law.b:
        return math.inf
    return (law.alpha * law.a / (law.beta * law.b) * tokens**law.beta) ** (1 / law.alpha)
