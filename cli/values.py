"""Names that complete an option's value and are data: chips, providers, software."""

import tomllib
from importlib.resources import files
from typing import Any


def names(source: str) -> list[str]:
    """The names of a source that an option's `values` names: of a file of the planner's data the
    keys, or what lies along the keys behind it ('chips.toml', 'prices.toml offer provider')."""
    file, *keys = source.split()
    found: Any = tomllib.loads((files("sabia.core.plan") / "data" / file).read_text())
    for key in keys:
        found = [entry[key] for entry in found] if isinstance(found, list) else found[key]
    return list(dict.fromkeys(found))
