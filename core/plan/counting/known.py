"""The planner's Architecture of a config.json.

Families that train here are counted from the tensors of core.spec, others by counting.dialects.

Count families that do not train here: one reader of the configuration per `model_type`.

A field that can change a count and that the reader does not know is an error that names the field,
so a count is either right or refused. In vision-language models only the language model
(`text_config`) is counted. A family that differs from one of core.spec only in what is not counted
is read as that family.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import from_spec
from sabia.core.spec import families, from_config
from sabia.core.spec.families import read_config

_DIALECTS = "sabia.core.plan.counting.dialects"


def texts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model; `config` itself for a text-only model."""
    family, whole = config.get("model_type", ""), read_data("families.toml")["whole"]
    if not isinstance(family, str):
        raise UsageError("config.json: model_type is no text (expected the name of a family)")
    if family not in whole:
        return config
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise UsageError(f"config.json: text_config is missing (expected in a {family} model)")
    tied = config.get("tie_word_embeddings")
    outer = {} if tied is None else {"tie_word_embeddings": tied}
    return {"model_type": whole[family], **outer, **inner}


def _counted(config: Mapping[str, Any]) -> Architecture:
    """The model of a configuration; UsageError naming a field that is not known."""
    family, data = str(config.get("model_type")), read_data("families.toml")
    reader = data["family"].get(family)
    if reader is None:
        known = {*families(), *data["family"], *data["alike"], *data["whole"]}
        near = difflib.get_close_matches(family, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"config.json: model_type {family[:40]!r} is none of {len(known)} known families "
            f"(expected --params and --active instead of --model){hint}"
        )
    from sabia.core.plan.counting.dialects.reading import CountFields

    module = reader.get("module", "described")
    name = reader.get("reader", family if "module" in reader else module)
    read = getattr(import_module(f"{_DIALECTS}.{module}"), name)
    fields = CountFields(config)
    architecture: Architecture = read(fields)
    fields.finish()
    return replace(architecture, counted_only=True)


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


def positions_of(path: str | Path) -> int | None:
    """Positions for which the model of a configuration was made; None where it does not say."""
    fields = texts(read_config(path))
    sizes = (fields.get(name) for name in ("max_position_embeddings", "n_positions"))
    return next((size for size in sizes if type(size) is int and size > 0), None)


def architecture_from(config: Mapping[str, Any]) -> Architecture:
    """The model of a configuration; UsageError as `architecture_of`."""
    config = texts(config)
    nested = config.get("text_config")
    inner: Mapping[str, Any] = nested if isinstance(nested, dict) else {}
    for fields in (config, inner):
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
        return _counted(config)
    counted, text = (
        {name: value for name, value in fields.items() if name not in _UNCOUNTED}
        for fields in (config, inner)
    )
    counted |= {"model_type": alike} | ({"text_config": text} if inner else {})
    return replace(from_spec(from_config(counted)), name=family, counted_only=alike != family)
