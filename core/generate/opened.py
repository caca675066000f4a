"""Open the client of an endpoint from options; every command does it here."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from sabia.core import units
from sabia.core.generate.budget import Budget, load_prices
from sabia.core.generate.calls import ModelRequest
from sabia.core.generate.client import REFUSED_AFTER, Client, ClientStats, Estimate
from sabia.core.generate.ledger import Ledger
from sabia.core.options.model_calls import ApiCalls
from sabia.core.shards.job import Job
from sabia.kernels.runtime.cache_folder import cache_folder


class Spender(Protocol):
    """A client, or several of them together."""

    @property
    def stats(self) -> ClientStats:
        """Counts so far."""


def open_budget(options: ApiCalls, job: Job, max_tokens: int | None = None) -> Budget:
    """The caps of `options` for all clients of a run, and the ledger of what it has spent.

    `max_tokens` caps the tokens of prompts and replies. Raises UsageError.
    """
    prices = load_prices(options.prices) if options.prices else {}
    ledger = Ledger(spending_path(job))
    return Budget(prices, options.max_usd, options.max_requests, max_tokens, ledger)


def open_client(
    urls: Sequence[str], model: str, options: ApiCalls, cache: str, budget: Budget,
    timeout_s: float = 600.0, api_key_env: str = "", refused_after: int | None = REFUSED_AFTER,
) -> Client:  # fmt: skip
    """A client of `model` behind `urls`, whose calls are charged to `budget`.

    `cache` is the directory of finished calls ('': the default one); `api_key_env` names the
    variable of the key ('': that of the options). Raises UsageError.
    """
    return Client(
        urls,
        model,
        api_key_env=api_key_env or options.api_key_env,
        cache_dir=cache or default_cache(),
        budget=budget,
        max_concurrency=options.concurrency,
        timeout_s=timeout_s,
        refused_after=refused_after,
    )


def cost_so_far(clients: Sequence[Spender]) -> str:
    """What the calls of this process were and have cost, in short; '' without clients."""
    if not clients:
        return ""
    first, *others = (client.stats for client in clients)
    stats = sum(others, first)
    cost = "" if stats.usd is None else f", {units.format_money(stats.usd)}"
    share = stats.cached / max(stats.calls + stats.cached, 1)
    tokens = f"{stats.usage.total_tokens:,} tokens"
    return f"{stats.requests:,} requests, {tokens}{cost}, {share:.0%} from the cache"


def print_estimate(client: Client, requests: Iterable[ModelRequest]) -> Estimate:
    """Print the most that requests would cost (`--dry-run`)."""
    calls = client.estimate(requests)
    print(
        f"call {client.model} at {', '.join(client.urls)}: {calls.requests:,} requests "
        f"({calls.cached:,} more are in the cache), about {calls.usage.prompt_tokens:,} prompt and "
        f"at most {calls.usage.completion_tokens:,} completion tokens{_at_most(calls.usd)}"
    )
    return calls


def print_total(estimates: Sequence[Estimate]) -> None:
    """Print the sum of the estimates, if there are several."""
    if len(estimates) > 1:
        usd = [one.usd for one in estimates if one.usd is not None]
        total = sum(usd) if len(usd) == len(estimates) else None
        print(f"calls in all: {sum(one.requests for one in estimates):,} requests{_at_most(total)}")


def _at_most(usd: float | None) -> str:
    return "" if usd is None else f", at most {units.format_money(usd)}"


def default_cache() -> Path:
    """The directory of finished calls if none is given."""
    return cache_folder("calls")


def spending_path(job: Job) -> Path | None:
    """The ledger of a job, `.NAME.spending` beside its output; None if that is a stream.

    That of a remote output is in the default cache.
    """
    if job.to_stdout:
        return None
    out = str(job.out).rstrip("/")
    if "://" in out:
        digest = hashlib.blake2b(out.encode(), digest_size=16).hexdigest()
        return default_cache() / f"{digest}.spending"
    path = Path(os.path.abspath(out))
    return path.with_name(f".{path.name}.spending")
