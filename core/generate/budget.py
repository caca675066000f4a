"""The cost of model calls, and limits on it: money, requests, tokens.

Prices are US dollars per million tokens, for prompt and completion, read from a TOML or JSON table:
`[model-name]` with `prompt` and `completion`. A call is admitted only if the limits hold even if it
and all calls in flight use their estimates; the amount charged comes from the usage in the reply.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sabia.core.errors import Infeasible, UsageError
from sabia.core.files import unreadable
from sabia.core.generate.calls import Usage

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
        return {name: _price(entry) for name, entry in table.items()}
    except OSError as error:
        raise unreadable("--prices", path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--prices: {path}: {reason} (expected [model] with prompt and completion in US "
            "dollars per million tokens)"
        ) from error


def _price(entry: Mapping[str, float]) -> Price:
    return Price(float(entry["prompt"]), float(entry["completion"]))


@dataclass
class Budget:
    """Running totals and their limits (None: no limit)."""

    price: Price | None = None
    max_usd: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    requests: int = 0
    used: Usage = field(default_factory=Usage)
    reserved: Usage = field(default_factory=Usage)

    @property
    def usd(self) -> float | None:
        """Dollars spent; None without a price."""
        return None if self.price is None else self.price.cost_usd(self.used)

    def count_request(self) -> None:
        """Count one request about to be sent; raises BudgetExceeded at the limit."""
        if self.max_requests is not None and self.requests >= self.max_requests:
            raise BudgetExceeded(
                f"request budget reached: {self.requests} sent (cap {self.max_requests}); "
                "finished calls are kept: raise the cap and run again"
            )
        self.requests += 1

    def reserve(self, estimate: Usage) -> bool:
        """Reserve the estimate of one call; False: wait until a call in flight has finished.

        Raises BudgetExceeded if it would exceed a limit with no call in flight.
        """
        reason = self._over(self.used + self.reserved + estimate)
        if reason is None:
            self.reserved += estimate
            return True
        if self.reserved.total_tokens:
            return False
        raise BudgetExceeded(f"{reason}; finished calls are kept: raise the cap and run again")

    def settle(self, estimate: Usage, usage: Usage | None) -> None:
        """Replace a reservation by the usage of the call (None: the call failed)."""
        self.reserved += Usage(-estimate.prompt_tokens, -estimate.completion_tokens)
        self.used += usage or Usage()

    def _over(self, usage: Usage) -> str | None:
        if self.max_tokens is not None and usage.total_tokens > self.max_tokens:
            used = self.used.total_tokens
            return f"token budget reached: {used} used, next may exceed {self.max_tokens}"
        if self.max_usd is not None and self.price is not None:
            cost = self.price.cost_usd(usage)
            if cost > self.max_usd:
                spent = self.price.cost_usd(self.used)
                reason = f"money budget reached: ${spent:.4f} spent"
                return f"{reason}, next may exceed ${self.max_usd:g}"
        return None
