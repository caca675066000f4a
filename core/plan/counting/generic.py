"""Counting families that the model core does not compute: one reader a `model_type`.

A field that changes a count and that the family's reader does not know is refused by name, so a
number is right or there is none. Of models that see images too, the language model is counted.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.dialects import deepseek_v4
from sabia.core.plan.counting.dialects.reading import CountFields
from sabia.core.spec import families

Reader = Callable[[CountFields], Architecture]
_DIALECTS: Mapping[str, Reader] = {
    "deepseek_v4": deepseek_v4.read,
}


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The model of a configuration; UsageError naming the field that is not understood."""
    family = str(config.get("model_type"))
    if family not in _DIALECTS:
        known = ", ".join(sorted({*families(), *_DIALECTS}))
        raise UsageError(f"config.json: model_type is {family!r} (expected one of {known})")
    fields = CountFields(config)
    found = _DIALECTS[family](fields)
    fields.finish()
    return found
