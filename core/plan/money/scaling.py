"""Scaling laws: model size and tokens for a training budget, and with the cost of inference.

The parametric law: loss L(N, D) = E + A/N^α + B/D^β of a dense model with N parameters after D
tokens. HOFFMANN: Hoffmann et al. 2022 (arXiv 2203.15556), approach 3, with the digits of its
source. BESIROGLU, the default: the same data with a converged fit (Besiroglu et al. 2024,
arXiv 2404.10102); only this one agrees with 20 tokens per parameter.
- Compute-optimal for C = 6ND: N = G·(C/6)^(β/(α+β)), D = C/6/N, G = (αA/βB)^(1/(α+β)).
- The rule of thumb: D = 20 N, so N = √(C/120).
- With T inference tokens over the model's lifetime (Sardana et al. 2023, arXiv 2401.00448): the
  cheapest pair of the same loss minimises 6ND + 2NT: a smaller model with longer training.
For an MoE model N is its active parameters, for which the law was not fitted: a rough guide.
"""

import math
from dataclasses import dataclass

from sabia.core.errors import Infeasible, UsageError
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


HOFFMANN = ScalingLaw("Hoffmann 2022", 1.6934, 406.4, 410.7, 0.3392, 0.2849)
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


@dataclass(frozen=True)
class Advice:
    """A planned run and better ones by the same law.

    same_flops: least loss for the plan's training FLOPs; same_loss: fewest FLOPs of training and
    inference for the plan's loss. saving: share of the plan's FLOPs that same_loss saves.
    """

    law: ScalingLaw
    planned: Pair
    inference_tokens: float
    same_flops: Pair
    same_loss: Pair

    @property
    def loss(self) -> float:
        """Predicted loss of the plan."""
        return self.law.loss(self.planned.params, self.planned.tokens)

    @property
    def saving(self) -> float:
        """Share of the FLOPs of training and inference that same_loss saves."""
        return 1 - self.same_loss.life_flops(self.inference_tokens) / self.planned.life_flops(
            self.inference_tokens
        )


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
    smallest = (law.a / (loss - law.e)) ** (1 / law.alpha)

    def cost(log_params: float) -> float:
        params = math.exp(log_params)
        return Pair(params, law.tokens_for(params, loss)).life_flops(inference_tokens)

    low = math.log(smallest) + 1e-9
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


def advise(
    params: float, tokens: float, inference_tokens: float = 0.0, law: ScalingLaw = BESIROGLU
) -> Advice:
    """Compare training `params` on `tokens`, with `inference_tokens`, with better pairs.

    Raises UsageError on a negative number of inference tokens.
    """
    if not inference_tokens >= 0:
        raise UsageError(f"--serve-tokens: {inference_tokens:g} (expected 0 or more)")
    planned = Pair(params, tokens)
    return Advice(
        law=law,
        planned=planned,
        inference_tokens=inference_tokens,
        same_flops=law.optimal(planned.train_flops),
        same_loss=cheapest_pair(law, law.loss(params, tokens), inference_tokens),
    )
