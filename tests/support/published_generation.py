"""Published speeds of generation and of RL steps: read the data file, expand its tables and shapes.

The data are tests/core/plan/published_generation.toml, which says what each field means; shapes
that it does not have are those of published_steps.toml.
"""

import tomllib
from pathlib import Path
from typing import Any

import published_steps

FILE = Path(__file__).parents[1] / "core" / "plan" / "published_generation.toml"

Row = dict[str, Any]


def load() -> tuple[dict[str, Row], dict[str, list[Row]]]:
    """(shapes by model name, rows by kind); each row knows its table's id and source."""
    data = tomllib.loads(FILE.read_text())
    shapes, _ = published_steps.load()
    for group in data["models"]:
        shapes |= {row["name"]: row for row in published_steps.expand(group)}
    kinds: dict[str, list[Row]] = {}
    for table in data["table"]:
        rows = [row | {"table": table["id"]} for row in published_steps.expand(table)]
        kinds.setdefault(table["kind"], []).extend(rows)
    return shapes, kinds
