"""Scaling laws: model size and tokens for a training budget, and with the cost of inference.

The parametric law: loss L(N, D) = E + A/N^α + B/D^β of a dense model with N parameters after D
tokens (Hoffmann et al. 2022, arXiv 2203.15556, approach 3). BESIROGLU: the same data with a
converged fit (Besiroglu et al. 2024, arXiv 2404.10102), which agrees with 20 tokens per parameter.
- Compute-optimal for C = 6ND: N = G·(C/6)^(β/(α+β)), D = C/6/N, G = (αA/βB)^(1/(α+β)).
- The rule of thumb: D = 20 N, so N = √(C/120).
- With T inference tokens over the model's lifetime (Sardana et al. 2023, arXiv 2401.00448): the
  cheapest pair of the same loss minimises 6ND + 2NT: a smaller model with longer training.
For an MoE model N is its active parameters, for which the law was not fitted: a rough guide.

What model to train with given chips and time: size and tokens by compute, memory and data.

Training FLOPs C = chips · peak · MFU · seconds are shared between parameters N and tokens D of a
dense model, C = 6ND. A curve over tokens per parameter gives the loss of each pair by a scaling law
(scaling.py, or one's own: fitted.py), and whether the chips hold its state. The best pair that fits
has the least loss: smaller models cost less to serve, and lose little over a wide range.

With fewer unique tokens than are trained on, repetitions count less (Muennighoff et al. 2023,
arXiv 2305.16264, section 3.1 and appendix A): the loss is that of D' = U + U·R(1 - e^(-(D/U-1)/R))
tokens, R = 15.39, and of N' likewise from the size that is optimal for U tokens, R = 5.31.
"""

import math
from dataclasses import dataclass

from sabia.core.errors import Infeasible
from sabia.core.plan.compute import FLOPS_PER_PARAM_TOKEN

RULE_TOKENS_PER_PARAM = 20
SERVE_FLOPS_PER_PARAM_TOKEN = 2


@dataclass(frozen=True)
class ScalingLaw:
    """Constants of L(N, D) = e + a/N^alpha + b/D^beta, in nats a token."""

    name: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """Predicted loss."""
        return self.e + self.a / params**self.alpha + self.b / tokens**self.beta

    def tokens_for(self, params: float, loss: float) -> float:
        """Tokens after which `params` parameters reach `loss`; inf if they never do."""
        left = loss - self.e - self.a / params**self.alpha
        return (self.b / left) ** (1 / self.beta) if left > 0 else math.inf

    def optimal(self, flops: float) -> "Pair":
        """The pair of least loss for `flops` of training."""
        both = self.alpha + self.beta
        scale = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        params = scale * (flops / FLOPS_PER_PARAM_TOKEN) ** (self.beta / both)
        return Pair(params, flops / FLOPS_PER_PARAM_TOKEN / params)


BESIROGLU = ScalingLaw("Besiroglu 2024", 1.8172, 482.01, 2085.43, 0.3478, 0.3658)


@dataclass(frozen=True)
class Pair:
    """A model's parameters and its training tokens."""

    params: float
    tokens: float

    @property
    def tokens_per_param(self) -> float:
        """Tokens per parameter; about 20 is compute-optimal."""
        return self.tokens / self.params

    def loss(self, law: ScalingLaw) -> float:
        """Predicted loss."""
        return law.loss(self.params, self.tokens)

    @property
    def over_training(self) -> float:
        """Tokens per parameter over the rule's 20."""
        return self.tokens_per_param / RULE_TOKENS_PER_PARAM

    @property
    def train_flops(self) -> float:
        """6ND."""
        return FLOPS_PER_PARAM_TOKEN * self.params * self.tokens

    def life_flops(self, inference_tokens: float) -> float:
        """FLOPs of training and inference: 6ND + 2NT."""
        return self.train_flops + SERVE_FLOPS_PER_PARAM_TOKEN * self.params * inference_tokens


def cheapest_pair(law: ScalingLaw, loss: float, inference_tokens: float = 0.0) -> Pair:
    """The pair that reaches `loss` with the fewest FLOPs of training and inference.

    6ND + 2NT along the curve of equal loss has one minimum in log N (golden-section search). Raises
    Infeasible if the law's irreducible loss is above `loss`.
    """
    if loss <= law.e:
        raise Infeasible(
            f"loss {loss:.3f} is below the irreducible loss {law.e:.3f} of {law.name} (expected a "
            "higher loss)"
        )

    def cost(log_params: float) -> float:
        params = math.exp(log_params)
        return Pair(params, law.tokens_for(params, loss)).life_flops(inference_tokens)

    # from the smallest model that reaches the loss at all
    low = math.log((law.a / (loss - law.e)) ** (1 / law.alpha)) + 1e-9
    high, share = low + math.log(1e4), (math.sqrt(5) - 1) / 2
    inner = [high - share * (high - low), low + share * (high - low)]
    costs = [cost(x) for x in inner]
    for _ in range(80):
        if costs[0] < costs[1]:
            high = inner[1]
            inner = [high - share * (high - low), inner[0]]
            costs = [cost(inner[0]), costs[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + share * (high - low)]
            costs = [costs[1], cost(inner[1])]
    params = math.exp((low + high) / 2)
    return Pair(params, law.tokens_for(params, loss))


REPEATED_TOKENS = 15.387756  # R*_D and R*_N of the paper's fit
REPEATED_PARAMS = 5.309743
RATIOS = (5, 10, 20, 40, 80, 160, 320, 640, 1280)  # tokens per parameter
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
