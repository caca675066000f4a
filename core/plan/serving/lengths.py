"""How long answers are: a distribution with a tail, cut at a limit.

Weibull survival S(t) = e^(−(t/λ)^k) up to the limit, where the rest is cut. k = 1 says that an
answer is as likely to end after any token, whatever its length; k < 1 has a heavier tail, k > 1 a
lighter one. λ is found so that the mean, the cut ones included, is the given one: a mean near the
limit means that many answers reach it. The longest of n answers ends a batch; its expectation is
∫ 1 − (1 − S(t))^n dt.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from sabia.core.errors import UsageError

STEPS = 120
FAR = 60.0  # S is below e^-60 beyond λ·60^(1/k)


@dataclass(frozen=True)
class Lengths:
    """Answers of `mean` tokens on average and at most `limit` (None: no limit)."""

    mean: float
    limit: float | None = None
    shape: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no distribution has."""
        if not self.mean > 0 or not self.shape > 0:
            raise UsageError(
                f"answers of {self.mean:g} tokens, shape {self.shape:g} (expected > 0)"
            )
        if self.limit is not None and self.mean >= self.limit:
            raise UsageError(
                f"answers of {self.mean:g} tokens on average with a limit of {self.limit:g} "
                "(expected a mean below the limit)"
            )

    @functools.cached_property
    def scale(self) -> float:
        """λ: found by bisection where there is a limit, λ = mean / Γ(1 + 1/k) where not."""
        if self.limit is None:
            return self.mean / math.gamma(1 + 1 / self.shape)
        low, high = self.mean / 4, self.mean * 1e4
        for _ in range(45):
            middle = math.sqrt(low * high)
            short = _integral(functools.partial(self._alive, scale=middle), self.limit) < self.mean
            low, high = (middle, high) if short else (low, middle)
        return math.sqrt(low * high)

    def _alive(self, t: float, scale: float) -> float:
        return math.exp(-((t / scale) ** self.shape))

    @property
    def reach(self) -> float:
        """The limit, or a length that practically no answer has."""
        far = self.scale * FAR ** (1 / self.shape)
        return far if self.limit is None else min(self.limit, far)

    def survival(self, t: float) -> float:
        """Share of answers longer than `t` tokens."""
        return 0.0 if t >= self.reach else self._alive(t, self.scale)

    def quantile(self, share: float) -> float:
        """The length that `share` of the answers do not exceed."""
        return min(self.reach, self.scale * (-math.log1p(-share)) ** (1 / self.shape))

    def longest_of(self, count: float) -> float:
        """Expected length of the longest of `count` answers."""
        return _integral(lambda t: 1 - (1 - self._alive(t, self.scale)) ** count, self.reach)

    def strata(self, count: int) -> list[float]:
        """`count` answers that stand for all: the middles of equal shares, with the exact mean."""
        lengths = [self.quantile((i + 0.5) / count) for i in range(count)]
        correction = self.mean * count / sum(lengths)
        return [length * correction for length in lengths]


def _integral(f: Callable[[float], float], end: float) -> float:
    """∫ f from 0 to `end`, Simpson's rule on a grid that is fine near 0."""
    nodes = [end * (i / STEPS) ** 2 for i in range(STEPS + 1)]
    total = 0.0
    for a, b in itertools.pairwise(nodes):
        total += (b - a) / 6 * (f(a) + 4 * f((a + b) / 2) + f(b))
    return total
