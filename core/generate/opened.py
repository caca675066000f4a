"""Open the client of an endpoint from options; every command does it here."""

from pathlib import Path

from sabia.core.generate.budget import load_prices
from sabia.core.generate.client import Client
from sabia.core.options.model_calls import ApiCalls
from sabia.kernels.runtime.cache_folder import cache_folder


def open_client(
    url: str, model: str, options: ApiCalls, cache: str,
    max_tokens: int | None = None, timeout_s: float = 600.0,
) -> Client:  # fmt: skip
    """A client of `model` behind `url` with the caps of `options`.

    `cache` is the directory of finished calls ('': the default one); `max_tokens` caps the tokens
    of prompts and replies of the whole run. Raises UsageError.
    """
    return Client(
        url,
        model,
        api_key_env=options.api_key_env,
        cache_dir=cache or default_cache(),
        max_concurrency=options.concurrency,
        max_usd=options.max_usd,
        max_requests=options.max_requests,
        max_tokens=max_tokens,
        prices=load_prices(options.prices) if options.prices else None,
        timeout_s=timeout_s,
    )


def default_cache() -> Path:
    """The directory of finished calls if none is given."""
    return cache_folder("calls")
