"""The file of --judge, which has a table for each judge:

    [strict]
    url = "http://localhost:8000/v1"   # or a list: servers that share the calls
    model = "NAME"
    weight = 2.0                       # default 1
    prompt = 0.5                       # US dollars per million tokens, optional
    completion = 2.0
    api-key-env = "STRICT_KEY"         # default: --api-key-env
    audit = true                       # asked about a share of the answers; decides nothing
    lookup = "statutes.parquet"        # a table that the model may look things up in
    lookup-key = "article"             # its columns; default: id and text
    lookup-text = "text"
    lookup-about = "Brazilian statutes"

Paths are relative to the file. See `lookup` for how a table is searched.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.files import unreadable
from sabia.core.generate.budget import Price
from sabia.core.judge.lookup import LookupTable

TABLE = {"lookup-key": "key", "lookup-text": "text", "lookup-about": "about"}
KEYS = ("url", "model", "weight", "prompt", "completion", "api-key-env", "audit", "lookup", *TABLE)


@dataclass(frozen=True)
class JudgeServer:
    """One judge of a file; api_key_env '': that of the command."""

    name: str
    urls: tuple[str, ...]
    model: str
    weight: float = 1.0
    price: Price | None = None
    api_key_env: str = ""
    audit: bool = False
    table: LookupTable | None = None


def load_judges(path: str | Path) -> list[JudgeServer]:
    """The judges of a file; raises UsageError if it is not such a file."""
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise unreadable("--judge", path, error) from error
    except ValueError as error:
        raise UsageError(f"--judge: {path}: {error} (expected TOML)") from error
    try:
        judges = [_judge(name, table, Path(path).parent) for name, table in tables.items()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"--judge: {path}: {error} (expected [NAME] tables with url, model, and optionally "
            f"{', '.join(KEYS[2:])})"
        ) from error
    models = [judge.model for judge in judges]
    if not judges or len(set(models)) < len(models):
        raise UsageError(f"--judge: {path}: models {models} (expected one or more, all different)")
    auditors = [judge.name for judge in judges if judge.audit]
    if len(auditors) > 1 or len(auditors) == len(judges):
        raise UsageError(
            f"--judge: {path}: auditors {', '.join(auditors)} (expected at most one, and a judge "
            "without audit = true)"
        )
    return judges


def _judge(name: str, table: Mapping[str, Any], folder: Path) -> JudgeServer:
    if odd := sorted(table.keys() - set(KEYS)):
        raise ValueError(f"{name}: no key {odd[0]!r}")
    if missing := [key for key in KEYS[:2] if not table.get(key)]:
        raise ValueError(f"{name}: {missing[0]} is missing")
    url, weight, price = table["url"], float(table.get("weight", 1.0)), None
    if not weight > 0:
        raise ValueError(f"{name}: weight {weight:g} is not above 0")
    if not isinstance(audit := table.get("audit", False), bool):
        raise ValueError(f"{name}: audit {audit!r} is not true or false")
    if audit and "weight" in table:
        raise ValueError(f"{name}: an auditor has no weight, because it decides nothing")
    if {"prompt", "completion"} & table.keys():
        price = Price(float(table["prompt"]), float(table["completion"]))
    urls = (url,) if isinstance(url, str) else tuple(map(str, url))
    key = str(table.get("api-key-env", ""))
    lookup = _lookup(name, table, folder)
    return JudgeServer(name, urls, str(table["model"]), weight, price, key, audit, lookup)


def _lookup(name: str, table: Mapping[str, Any], folder: Path) -> LookupTable | None:
    given = {field: str(table[key]) for key, field in TABLE.items() if key in table}
    if "lookup" not in table:
        if given:
            raise ValueError(f"{name}: {sorted(TABLE.keys() & table.keys())[0]} without lookup")
        return None
    return LookupTable(str(folder / str(table["lookup"])), **given)
