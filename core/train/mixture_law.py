"""Which mix of sources to train on, from the losses of small runs: two ways, arithmetic only.

Regression (after RegMix, Liu et al. 2025, arXiv 2407.01492, and data mixing laws, Ye et al. 2025,
arXiv 2403.16952): the held-out loss of each source is a function of the mix r on the simplex, here
    L_i(r) = c_i + sum_j a_ij r_j + sum_j b_ij ln(r_j + FLOOR),
fitted by ridge regression on the standardised terms; the penalty is the one with the least
leave-one-out error, which has a closed form. Of many mixes drawn at random the mean of those with
the lowest prediction is taken.

DoReMi (Xie et al. 2023, arXiv 2305.10429, algorithm 1): while a proxy trains, sources gain weight
by their excess loss over a reference model, w_i <- w_i exp(RATE * excess_i), smoothed by the
uniform mix; the answer is the mean of the weights over the steps. Here the excess is clipped at 0
by row (by token in the paper), and weighs from the next step on, as a step's losses are known when
it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FLOOR = 0.01  # share that a source is taken to have where it has none
PENALTIES = tuple(10.0**e for e in range(-4, 4))
DRAWS = 50_000
BEST = 50  # of the draws, whose mean is the answer
SMALLEST = 1e-3  # concentration of a source that hardly has any share
RATE = 1.0
SMOOTHING = 1e-3


@dataclass(frozen=True)
class Law:
    """Held-out losses [S] as a function of the mix [S]; see the module.

    rank: Spearman's correlation of each source's losses with their leave-one-out predictions;
    error: their root mean square difference in nats.
    """

    center: np.ndarray
    scale: np.ndarray
    weights: np.ndarray  # [terms, S]
    offset: np.ndarray
    rank: np.ndarray
    error: np.ndarray

    def __call__(self, mixes: np.ndarray) -> np.ndarray:
        """Predicted losses float64[n, S] of mixes [n, S]."""
        return (_terms(mixes) - self.center) / self.scale @ self.weights + self.offset


def fit(mixes: np.ndarray, losses: np.ndarray) -> Law:
    """The law of losses float64[n, S] seen with mixes float64[n, S], n above 2."""
    terms = _terms(mixes)
    center, scale = terms.mean(0), terms.std(0)
    scale[scale == 0] = 1.0
    x, offset = (terms - center) / scale, losses.mean(0)
    weights = np.empty((x.shape[1], losses.shape[1]))
    left_out = np.empty_like(losses)
    for source in range(losses.shape[1]):
        y = losses[:, source] - offset[source]
        tried = [_ridge(x, y, penalty) for penalty in PENALTIES]
        best = min(tried, key=lambda found: float(np.square(found[1] - y).sum()))
        weights[:, source], left_out[:, source] = best[0], best[1] + offset[source]
    rank = np.array([spearman(a, b) for a, b in zip(losses.T, left_out.T, strict=True)])
    error = np.sqrt(np.square(losses - left_out).mean(0))
    return Law(center, scale, weights, offset, rank, error)


def _terms(mixes: np.ndarray) -> np.ndarray:
    return np.concatenate((mixes, np.log(mixes + FLOOR)), axis=1)


def _ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """(weights, leave-one-out predictions of y, whose mean is 0 and refitted each time)."""
    n, terms = x.shape
    whole = np.concatenate((np.ones((n, 1)), x), axis=1)
    shrink = penalty * np.eye(terms + 1)
    shrink[0, 0] = 1e-12  # the offset is not shrunk
    inverse = np.linalg.inv(whole.T @ whole + shrink)
    found = inverse @ whole.T @ y
    leverage = np.einsum("ij,jk,ik->i", whole, inverse, whole)
    residual = (y - whole @ found) / np.maximum(1 - leverage, 1e-9)
    return found[1:], y - residual


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two samples without regard to ties."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    ranks = [r - r.mean() for r in ranks]
    return float(
        ranks[0] @ ranks[1] / max(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()), 1e-12)
    )


def draw_mixes(prior: Sequence[float] | np.ndarray, count: int, seed: int) -> np.ndarray:
    """float64[count, S] mixes around a prior: Dirichlet draws of concentrations 1 to 10.

    The first is the prior itself.
    """
    rng = np.random.default_rng(seed)
    base = np.asarray(prior, np.float64) / sum(prior)
    strength = len(base) * 10 ** rng.uniform(0, 1, count)
    drawn = np.array([rng.dirichlet(np.maximum(base * s, SMALLEST)) for s in strength])
    drawn[0] = base
    return drawn


def best_mix(
    law: Law,
    prior: Sequence[float] | np.ndarray,
    target: np.ndarray,
    limits: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, float]:
    """(mix float64[S], its predicted loss): least target-weighted loss among random mixes.

    limits [S]: the largest share that a source may have (1: any).
    """
    drawn = np.concatenate(
        (draw_mixes(prior, DRAWS, seed), draw_mixes(np.ones(len(prior)), DRAWS, seed))
    )
    allowed = drawn[(drawn <= limits + 1e-9).all(1)]
    if not len(allowed):
        allowed = np.minimum(limits, 1.0)[None] / np.minimum(limits, 1.0).sum()
    predicted = law(allowed) @ target
    mix = allowed[np.argsort(predicted, kind="stable")[:BEST]].mean(0)
    return mix, float((law(mix[None]) @ target)[0])


class Reweighting:
    """DoReMi's weights over the steps of a proxy run."""

    def __init__(self, sources: int) -> None:
        self.weights = np.full(sources, 1 / sources)
        self.total, self.steps = np.zeros(sources), 0

    def update(self, excess: np.ndarray) -> None:
        """Take in the mean clipped excess loss [S] of a step; NaN for a source not in it."""
        seen = np.where(np.isnan(excess), 0.0, excess)
        grown = self.weights * np.exp(RATE * np.minimum(seen, 50.0))
        count = len(grown)
        self.weights = (1 - SMOOTHING) * grown / grown.sum() + SMOOTHING / count
        self.total, self.steps = self.total + self.weights, self.steps + 1

    @property
    def mean(self) -> np.ndarray:
        """The answer: the mean of the weights."""
        return self.total / self.steps if self.steps else self.weights


def row_weights(weights: np.ndarray, source: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float32[B]: weights of rows that make a batch's loss the weighted mean over its sources.

    source int[B], tokens that count [B]. Their sum over tokens is the number of tokens.
    """
    of_source = np.bincount(source, tokens, minlength=len(weights))
    present = of_source > 0
    share = np.where(present, weights, 0.0)
    each = np.divide(share / share.sum(), of_source, out=np.zeros(len(weights)), where=present)
    return (each[source] * tokens.sum()).astype(np.float32)
