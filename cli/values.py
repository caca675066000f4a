"""Names that complete an option's value and are data: chips, providers, precisions."""

import tomllib
from importlib.resources import files


def names(source: str) -> list[str]:
    """The names of a source that an option's `values` names: 'chips.toml', a table of the planner's
    data by name."""
    text = (files("sabia.core.plan") / "data" / source).read_text()
    return list(tomllib.loads(text))
