"""A longer context or a larger vocabulary of an existing model: config.json with other fields.

There are two methods for the context, which can be combined: a larger base `theta` lowers all
frequencies (adjusted base frequency, arXiv 2309.16039 section 4.1), and YaRN's `factor` divides the
low ones (arXiv 2309.00071). Weights are unchanged; the training that follows adapts them to the new
positions, and the exported model has the new fields.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.families import from_config
from sabia.core.spec.model import ModelSpec

_GLOBAL = "full_attention"  # families with two rotary bases: local layers are unchanged
_ORIGINAL = "original_max_position_embeddings"


def extend_context(
    config: Mapping[str, Any],
    max_positions: int,
    theta: float | None = None,
    factor: float | None = None,
) -> dict[str, object]:
    """A configuration for rows of up to `max_positions` tokens; `config` is not modified.

    theta: the new base. factor: YaRN's, relative to the original context; if the model already uses
    YaRN, it replaces the factor. Neither: only the number of positions changes. Raises UsageError
    for an impossible number, or if the model has another scaling that a factor would replace.
    """
    if "text_config" in config:
        inner = extend_context(config["text_config"], max_positions, theta, factor)
        return {**config, "text_config": inner}
    model = from_config(config)
    now = model.max_positions
    if max_positions <= now:
        raise UsageError(
            f"--context: {max_positions} positions (expected more than the model's {now})"
        )
    if theta is not None and theta <= 1:
        raise UsageError(f"--rope-theta: {theta} (expected above 1)")
    result = {**config, "max_position_embeddings": max_positions}
    values = dict(result.get("rope_parameters") or {})
    if _GLOBAL in values:
        inner = _rotation(values[_GLOBAL] or {}, theta, factor, now, max_positions)
        result["rope_parameters"] = values | {_GLOBAL: inner}
    elif values:
        result["rope_parameters"] = _rotation(values, theta, factor, now, max_positions)
    else:
        if theta is not None:
            result["rope_theta"] = float(theta)
        if factor is not None:
            scaling = result.get("rope_scaling") or {}
            result["rope_scaling"] = _rotation(scaling, None, factor, now, max_positions)
    changed = [rope for rope in from_config(result).ropes if rope not in model.ropes]
    if changed and theta is None and factor is None:
        raise UsageError(
            f"--context: rope_type is {changed[0].kind!r}, whose rotations depend on the number of "
            "positions (give --rope-theta)"
        )
    return result


def extend_vocabulary(spec: ModelSpec, vocab_size: int) -> ModelSpec:
    """The model with `vocab_size` rows of embedding and head, also in its configuration."""
    config, inner = {**spec.config}, spec.config.get("text_config")
    if inner is not None:
        config["text_config"] = {**inner, "vocab_size": vocab_size}
    if inner is None or "vocab_size" in config:
        config["vocab_size"] = vocab_size
    return replace(spec, vocab_size=vocab_size, config=config)


def _rotation(
    values: Mapping[str, Any], theta: float | None, factor: float | None, now: int, wanted: int
) -> dict[str, object]:
    """The rotary fields with the base `theta` and YaRN's `factor` over the original context."""
    rotary = dict(values)
    if theta is not None:
        rotary["rope_theta"] = float(theta)
    if factor is None:
        return rotary
    kind = rotary.pop("type", rotary.get("rope_type", "default"))
    if kind not in ("default", "yarn"):
        raise UsageError(
            f"--context: rope_type is {kind!r} (expected default or yarn; give --rope-theta)"
        )
    original = rotary.get(_ORIGINAL, now) if kind == "yarn" else now
    if factor <= 1 or original * factor < wanted:
        raise UsageError(
            f"--context: factor {factor} of {original} positions (expected {wanted / original:g} "
            f"or more for {wanted})"
        )
    rotary.pop("attention_factor", None)  # follows from the factor
    return rotary | {"rope_type": "yarn", "factor": float(factor), _ORIGINAL: original}
