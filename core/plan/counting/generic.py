"""Count families that do not train here: one reader of the configuration per `model_type`.

A field that can change a count and that the reader does not know is an error that names the field,
so a count is either right or refused. In vision-language models only the language model
(`text_config`) is counted. A family that differs from one of core.spec only in what is not counted
is read as that family.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.spec import families

_DIALECTS = "sabia.core.plan.counting.dialects"


def texts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model; `config` itself for a text-only model."""
    family, whole = config.get("model_type"), read_data("families.toml")["whole"]
    if family not in whole:
        return config
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise UsageError(f"config.json: text_config is missing (expected in a {family} model)")
    tied = config.get("tie_word_embeddings")
    outer = {} if tied is None else {"tie_word_embeddings": tied}
    return {"model_type": whole[family], **outer, **inner}


def from_config(config: Mapping[str, Any]) -> Architecture:
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

    module = import_module(f"{_DIALECTS}.{reader['module']}")
    read = getattr(module, reader.get("reader", family))
    fields = CountFields(config)
    architecture: Architecture = read(fields)
    fields.finish()
    return replace(architecture, counted_only=True)
