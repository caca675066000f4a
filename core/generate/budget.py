"""The cost of model calls, and limits on it: money, requests, tokens.

Prices are US dollars per million tokens, for prompt and completion, read from a TOML or JSON table:
`[model-name]` with `prompt` and `completion`. A call is admitted only if the limits hold even if it
and all calls in flight use their estimates; the amount charged comes from the usage in the reply.
The limits are those of a run: of all its processes and starts, which share a `Ledger`.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sabia.core import units
from sabia.core.errors import Infeasible, UsageError
from sabia.core.files import unreadable
from sabia.core.generate.calls import Usage
from sabia.core.generate.ledger import Ledger, Ticket

MILLION = 1_000_000


class BudgetExceeded(Infeasible):
    """The next call might exceed a limit; finished calls are kept."""


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens."""

    prompt_usd: float
    completion_usd: float

    def cost_usd(self, usage: Usage) -> float:
        """Dollars for the tokens."""
        prompt = usage.prompt_tokens * self.prompt_usd
        return (prompt + usage.completion_tokens * self.completion_usd) / MILLION


def load_prices(path: str | Path) -> dict[str, Price]:
    """Prices by model name; raises UsageError if the file is not a price table."""
    file = Path(path)
    try:
        text = file.read_text("utf-8")
        table = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        return {n: Price(float(e["prompt"]), float(e["completion"])) for n, e in table.items()}
    except OSError as error:
        raise unreadable("--prices", path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--prices: {path}: {reason} (expected [model] with prompt and completion in US "
            "dollars per million tokens)"
        ) from error


@dataclass(frozen=True)
class Spent:
    """What calls have cost; usd: None without a price for every model."""

    requests: int
    usage: Usage
    usd: float | None

    def text(self) -> str:
        """Such as '40 requests, 900 prompt and 80 completion tokens, $0.12'."""
        cost = "" if self.usd is None else f", {units.format_money(self.usd)}"
        prompt, completion = self.usage.prompt_tokens, self.usage.completion_tokens
        tokens = f"{prompt:,} prompt and {completion:,} completion tokens"
        return f"{self.requests:,} requests, {tokens}{cost}"


@dataclass
class Budget:
    """Prices by model, limits (None: no limit) and the ledger of the run that they hold for."""

    prices: Mapping[str, Price] = field(default_factory=dict)
    max_usd: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def cost_usd(self, used: Mapping[str, Usage]) -> float | None:
        """Dollars for the tokens of each model; None without a price for one of them."""
        if not used.keys() <= self.prices.keys():
            return None
        return sum(self.prices[model].cost_usd(usage) for model, usage in used.items())

    def check_prices(self, *models: str) -> None:
        """Raise UsageError if there is a cap in dollars and a model has no price."""
        unknown = [model for model in (*models, *self.ledger.used) if model not in self.prices]
        if self.max_usd is not None and unknown:
            raise UsageError(f"no price for model {unknown[0]} (a cap in dollars needs its price)")

    @property
    def spent(self) -> Spent:
        """What the run has cost so far, with the estimates of calls that were lost."""
        ledger = self.ledger
        with ledger.locked():
            used, requests = dict(ledger.total), sum(ledger.requests.values())
        return Spent(requests, sum(used.values(), Usage()), self.cost_usd(used))

    def admit(self, model: str, estimate: Usage) -> Ticket | None:
        """Charge a request that is about to be sent; None: wait until a call in flight has ended.

        Raises BudgetExceeded if it would exceed a limit with no call in flight.
        """
        ledger = self.ledger
        with ledger.locked():
            self._check_requests(sum(ledger.requests.values()))
            if (reason := self._over(model, estimate)) is None:
                return ledger.charge(model, estimate)
            if ledger.waits():
                return None
            raise self._exceeded(reason)

    def _check_requests(self, sent: int) -> None:
        if self.max_requests is not None and sent >= self.max_requests:
            raise self._exceeded(f"request budget reached: {sent} sent (cap {self.max_requests})")

    def _over(self, model: str, estimate: Usage) -> str | None:
        """Which limit one more call would exceed."""
        total, used = self.ledger.total, self.ledger.used
        if self.max_tokens is not None:
            tokens = sum(usage.total_tokens for usage in total.values()) + estimate.total_tokens
            if tokens > self.max_tokens:
                spent = sum(usage.total_tokens for usage in used.values())
                return f"token budget reached: {spent} used, next may exceed {self.max_tokens}"
        if self.max_usd is not None:
            usd = (self.cost_usd(total) or 0.0) + (self.cost_usd({model: estimate}) or 0.0)
            if usd > self.max_usd:
                reason = f"money budget reached: ${self.cost_usd(used) or 0.0:.4f} spent"
                return f"{reason}, next may exceed ${self.max_usd:g}"
        return None

    def _exceeded(self, reason: str) -> BudgetExceeded:
        path = self.ledger.path
        where = f" by all processes and starts of the run ({path})" if path else ""
        return BudgetExceeded(
            f"{reason}{where}; finished calls are kept: raise the cap and run again"
        )
