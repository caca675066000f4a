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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.files import read_toml
from sabia.core.generate.model_servers import ModelServer, model_server
from sabia.core.judge.lookup import LookupTable

TABLE = {"lookup-key": "key", "lookup-text": "text", "lookup-about": "about"}
KEYS = ("url", "model", "weight", "prompt", "completion", "api-key-env", "audit", "lookup", *TABLE)


@dataclass(frozen=True)
class JudgeServer(ModelServer):
    """One judge of a file."""

    weight: float = 1.0
    audit: bool = False
    table: LookupTable | None = None


def load_judges(path: str | Path) -> list[JudgeServer]:
    """The judges of a file; raises UsageError if it is not such a file."""
    tables = read_toml("--judge", path)
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
    model = model_server(name, table, KEYS)
    weight = float(table.get("weight", 1.0))
    if not weight > 0:
        raise ValueError(f"{name}: weight {weight:g} is not above 0")
    if not isinstance(audit := table.get("audit", False), bool):
        raise ValueError(f"{name}: audit {audit!r} is not true or false")
    if audit and "weight" in table:
        raise ValueError(f"{name}: an auditor has no weight, because it decides nothing")
    lookup = _lookup(name, table, folder)
    return JudgeServer(**vars(model), weight=weight, audit=audit, table=lookup)


def _lookup(name: str, table: Mapping[str, Any], folder: Path) -> LookupTable | None:
    given = {field: str(table[key]) for key, field in TABLE.items() if key in table}
    if "lookup" not in table:
        if given:
            raise ValueError(f"{name}: {sorted(TABLE.keys() & table.keys())[0]} without lookup")
        return None
    return LookupTable(str(folder / str(table["lookup"])), **given)
