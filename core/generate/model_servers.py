"""Files of models: TOML with a table for each model.

    [large]
    url = "http://localhost:8000/v1"   # or a list: servers that share the calls
    model = "NAME"
    prompt = 0.5                       # US dollars per million tokens, optional
    completion = 2.0
    api-key-env = "LARGE_KEY"          # default: --api-key-env

For models in the process, a table has the key `model` alone, a model directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.files import read_toml
from sabia.core.generate.budget import Price

KEYS = ("url", "model", "prompt", "completion", "api-key-env")


@dataclass(frozen=True)
class ModelServer:
    """One model of a file; no urls: a model directory. api_key_env '': that of the command."""

    name: str
    urls: tuple[str, ...]
    model: str
    price: Price | None = None
    api_key_env: str = ""


def load_servers(option: str, path: str, addressed: bool = True) -> list[ModelServer]:
    """The models of a file of an option, two or more; raises UsageError.

    addressed: whether they have addresses, or are model directories.
    """
    keys = KEYS if addressed else ("model",)
    try:
        models = [
            model_server(name, table, keys) for name, table in read_toml(option, path).items()
        ]
    except (TypeError, ValueError, AttributeError) as error:
        required = "url and model" if addressed else "model (a directory)"
        raise UsageError(
            f"{option}: {path}: {error} (expected [NAME] tables with {required})"
        ) from error
    named = [one.model for one in models]
    if len(named) < 2 or len(set(named)) < len(named):
        raise UsageError(f"{option}: {path}: models {named} (expected two or more, all different)")
    return models


def model_server(name: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> ModelServer:
    """The model of a table with keys among `keys`. Raises TypeError or ValueError."""
    if odd := sorted(table.keys() - set(keys)):
        raise ValueError(f"{name}: no key {odd[0]!r}")
    if missing := [key for key in ("url", "model") if key in keys and not table.get(key)]:
        raise ValueError(f"{name}: {missing[0]} is missing")
    url, price = table.get("url", ()), None
    if {"prompt", "completion"} & table.keys():
        if lacking := [key for key in ("prompt", "completion") if key not in table]:
            raise ValueError(f"{name}: {lacking[0]} is missing")
        price = Price(float(table["prompt"]), float(table["completion"]))
    urls = (url,) if isinstance(url, str) else tuple(map(str, url))
    return ModelServer(name, urls, str(table["model"]), price, str(table.get("api-key-env", "")))
