"""The planner's Architecture of a config.json.

Families that train here are counted from the tensors of core.spec, others by counting.generic.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.counting import generic
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import from_spec
from sabia.core.spec import families, from_config
from sabia.core.spec.families import read_config

MOST_LAYERS = 10_000  # each layer is an object in memory
# fields that change the computation, which core.spec refuses, but no count
_UNCOUNTED = ("output_gate_type", "language_model_only")
LARGEST = 10**12  # a larger size is a mistake, and products of such sizes overflow


def _beyond(value: object) -> bool:
    return isinstance(value, int | float) and not -LARGEST < value < LARGEST


def architecture_of(path: str | Path) -> Architecture:
    """The model of the config.json at `path`, or in that directory.

    Raises UsageError naming a field that is missing, wrong or unknown; BadData if it is not JSON.
    """
    return architecture_from(read_config(path))


def architecture_from(config: Mapping[str, Any]) -> Architecture:
    """The model of a configuration; UsageError as `architecture_of`."""
    if not isinstance(config.get("model_type", ""), str):
        raise UsageError("config.json: model_type is no text (expected the name of a family)")
    config = generic.texts(config)
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, dict) else {}):
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            depth = fields.get(name)
            if isinstance(depth, int | float) and depth > MOST_LAYERS:
                raise UsageError(
                    f"config.json: {name} is {str(depth)[:20]} (expected at most {MOST_LAYERS})"
                )
        large = [name for name, value in fields.items() if _beyond(value)]
        if large:
            raise UsageError(f"config.json: {large[0]} is too large (expected below {LARGEST:g})")
    family = str(config.get("model_type"))
    alike = read_data("families.toml")["alike"].get(family, family)
    if alike not in families():
        return generic.from_config(config)
    counted = {name: value for name, value in config.items() if name not in _UNCOUNTED}
    if isinstance(inner, dict):
        text = {name: value for name, value in inner.items() if name not in _UNCOUNTED}
        counted["text_config"] = text
    architecture = from_spec(from_config(counted | {"model_type": alike}))
    return replace(architecture, name=family, counted_only=alike != family)
