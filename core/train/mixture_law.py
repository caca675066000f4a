"""Find the best mix of data sources from the losses of small runs, with two methods.

Regression (after RegMix, Liu et al. 2025, arXiv 2407.01492, and data mixing laws, Ye et al. 2025,
arXiv 2403.16952): the held-out loss of each source is a function of the mix r on the simplex, here
    L_i(r) = c_i + sum_j a_ij r_j + sum_j b_ij ln(r_j + FLOOR),
fitted by ridge regression on the standardised terms; the penalty is the one with the least
leave-one-out error, which has a closed form. The best mix is the mean of the random mixes with the
lowest predicted losses.

DoReMi (Xie et al. 2023, arXiv 2305.10429, algorithm 1): while a proxy model trains, the weight of
a source grows with its excess loss over a reference model, w_i <- w_i exp(RATE * excess_i),
smoothed by the uniform mix; the best mix is the mean of the weights over the steps. Here the excess
is clipped at 0 per row (in the paper per token) and affects the weights from the next step on,
because the losses of a step are known only after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FLOOR = 0.01  # added to shares before the logarithm
PENALTIES = tuple(10.0**e for e in range(-4, 4))
DRAWS = 50_000
BEST = 50  # number of lowest predictions whose mixes are averaged
SMALLEST = 1e-3  # least Dirichlet concentration of a source
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
        return (_features(mixes) - self.center) / self.scale @ self.weights + self.offset


def fit(mixes: np.ndarray, losses: np.ndarray) -> Law:
    """The law fitted to losses float64[n, S] of mixes float64[n, S], n above 2."""
    terms = _features(mixes)
    center, scale = terms.mean(0), terms.std(0)
    scale[scale == 0] = 1.0
    x, offset = (terms - center) / scale, losses.mean(0)  # [n, 2 S] standardised, [S]
    weights = np.empty((x.shape[1], losses.shape[1]))
    loo_predictions = np.empty_like(losses)
    for source in range(losses.shape[1]):
        y = losses[:, source] - offset[source]
        fits = [_ridge(x, y, penalty) for penalty in PENALTIES]
        best = min(fits, key=lambda fit_: float(np.square(fit_[1] - y).sum()))
        weights[:, source], loo_predictions[:, source] = best[0], best[1] + offset[source]
    rank = np.array([spearman(a, b) for a, b in zip(losses.T, loo_predictions.T, strict=True)])
    error = np.sqrt(np.square(losses - loo_predictions).mean(0))
    return Law(center, scale, weights, offset, rank, error)


def _features(mixes: np.ndarray) -> np.ndarray:
    return np.concatenate((mixes, np.log(mixes + FLOOR)), axis=1)


def _ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """(weights, leave-one-out predictions of y); y has mean 0, the offset is refitted each time."""
    n, terms = x.shape
    design = np.concatenate((np.ones((n, 1)), x), axis=1)
    penalties = penalty * np.eye(terms + 1)
    penalties[0, 0] = 1e-12  # no penalty on the offset
    # β = (XᵀX + λ I)⁻¹ Xᵀ y
    inverse = np.linalg.inv(design.T @ design + penalties)
    coefficients = inverse @ design.T @ y
    # [n], the diagonal of X (XᵀX + λ I)⁻¹ Xᵀ
    leverage = np.einsum("ij,jk,ik->i", design, inverse, design)
    # leave-one-out residual: (y_i - x_i β) / (1 - h_i)
    residual = (y - design @ coefficients) / np.maximum(1 - leverage, 1e-9)
    return coefficients[1:], y - residual


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two samples, without correction for ties."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    ranks = [r - r.mean() for r in ranks]
    norm = np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum())
    return float(ranks[0] @ ranks[1] / max(norm, 1e-12))


def draw_mixes(prior: Sequence[float] | np.ndarray, count: int, seed: int) -> np.ndarray:
    """float64[count, S] mixes around a prior: Dirichlet draws of concentrations 1 to 10.

    The first is the prior itself.
    """
    rng = np.random.default_rng(seed)
    base = np.asarray(prior, np.float64) / sum(prior)
    # concentrations base · S · 10^u, u uniform in (0, 1)
    strength = len(base) * 10 ** rng.uniform(0, 1, count)
    mixes = np.array([rng.dirichlet(np.maximum(base * s, SMALLEST)) for s in strength])
    mixes[0] = base
    return mixes


def best_mix(
    law: Law, prior: Sequence[float] | np.ndarray, target: np.ndarray, limits: np.ndarray, seed: int
) -> tuple[np.ndarray, float]:
    """(mix float64[S], its predicted loss) with the least target-weighted loss of random mixes.

    limits [S]: the largest allowed share of each source (1: any).
    """
    # mixes around the prior and around the uniform mix
    uniform = np.ones(len(prior))
    candidates = np.concatenate([draw_mixes(base, DRAWS, seed) for base in (prior, uniform)])
    allowed = candidates[(candidates <= limits + 1e-9).all(1)]
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
        """Update with the mean clipped excess loss [S] of a step; NaN: source not in the step."""
        seen = np.where(np.isnan(excess), 0.0, excess)
        unnormalised = self.weights * np.exp(RATE * np.minimum(seen, 50.0))
        count = len(unnormalised)
        # normalise, then smooth by the uniform mix
        self.weights = (1 - SMOOTHING) * unnormalised / unnormalised.sum() + SMOOTHING / count
        self.total, self.steps = self.total + self.weights, self.steps + 1

    @property
    def mean(self) -> np.ndarray:
        """The mean of the weights over the steps."""
        return self.total / self.steps if self.steps else self.weights


def row_weights(weights: np.ndarray, source: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float32[B]: row weights with which a batch's loss is the weighted mean over its sources.

    source int[B], tokens with loss [B]. The weights summed over tokens give the number of tokens.
    """
    source_tokens = np.bincount(source, tokens, minlength=len(weights))
    present = source_tokens > 0
    present_weights = np.where(present, weights, 0.0)
    # weight of a source divided by its tokens in the batch
    share, zeros = present_weights / present_weights.sum(), np.zeros(len(weights))
    per_token = np.divide(share, source_tokens, out=zeros, where=present)
    return (per_token[source] * tokens.sum()).astype(np.float32)
