"""A longer context or a larger vocabulary for a model that exists: config.json with other fields.

A context has two ways, which go together: a larger base `theta` slows all rotations (adjusted base
frequency, arXiv 2309.16039 section 4.1), and YaRN's `factor` stretches those that have not turned
often enough in the original context (arXiv 2309.00071). Weights stay as they are; what follows
trains them to the new positions, and the export carries the new fields.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.families import from_config
from sabia.core.spec.model import ModelSpec

_GLOBAL = "full_attention"  # families with two rotations: local layers see no further than before
_ORIGINAL = "original_max_position_embeddings"


def extend_context(
    config: Mapping[str, Any],
    max_positions: int,
    theta: float | None = None,
    factor: float | None = None,
) -> dict[str, Any]:
    """A configuration for rows of up to `max_positions` tokens; `config` is left as it is.

    theta: the new base. factor: YaRN's, relative to the context before any stretching; of a model
    that is stretched by YaRN already it replaces the factor. Neither: the positions are longer and
    turn as before. Raises UsageError where a number makes no sense or the model has another
    scaling that a factor would have to replace.
    """
    if "text_config" in config:
        inner = extend_context(config["text_config"], max_positions, theta, factor)
        return {**config, "text_config": inner}
    now = from_config(config).max_positions
    if max_positions <= now:
        raise UsageError(
            f"--context: {max_positions} positions (expected more than the model's {now})"
        )
    if theta is not None and theta <= 1:
        raise UsageError(f"--rope-theta: {theta} (expected above 1)")
    result = {**config, "max_position_embeddings": max_positions}
    _change(result, theta, factor, now)
    from_config(result)
    return result


def extend_vocabulary(spec: ModelSpec, vocab_size: int) -> ModelSpec:
    """The same model with so many rows of embedding and head, also in its configuration."""
    config, inner = {**spec.config}, spec.config.get("text_config")
    if inner is not None:
        config["text_config"] = {**inner, "vocab_size": vocab_size}
    if inner is None or "vocab_size" in config:
        config["vocab_size"] = vocab_size
    return replace(spec, vocab_size=vocab_size, config=config)


def _change(result: dict[str, Any], theta: float | None, factor: float | None, now: int) -> None:
    """Put the new fields where this configuration keeps its rotary fields."""
    values = dict(result.get("rope_parameters") or {})
    if _GLOBAL in values:
        inner = _rotation(values[_GLOBAL] or {}, theta, factor, now, result)
        result["rope_parameters"] = values | {_GLOBAL: inner}
    elif values:
        result["rope_parameters"] = _rotation(values, theta, factor, now, result)
    else:
        if theta is not None:
            result["rope_theta"] = float(theta)
        if factor is not None:
            scaling = result.get("rope_scaling") or {}
            result["rope_scaling"] = _rotation(scaling, None, factor, now, result)


def _rotation(
    values: Mapping[str, Any],
    theta: float | None,
    factor: float | None,
    now: int,
    result: Mapping[str, Any],
) -> dict[str, Any]:
    found = dict(values)
    if theta is not None:
        found["rope_theta"] = float(theta)
    return found if factor is None else _stretched(found, factor, now, result)


def _stretched(
    found: dict[str, Any], factor: float, now: int, result: Mapping[str, Any]
) -> dict[str, Any]:
    """The rotary fields with YaRN's `factor` over the original context."""
    kind = found.pop("type", found.get("rope_type", "default"))
    if kind not in ("default", "yarn"):
        raise UsageError(
            f"--context: rope_type is {kind!r} (expected default or yarn; give --rope-theta)"
        )
    original = found.get(_ORIGINAL, now) if kind == "yarn" else now
    wanted = result["max_position_embeddings"]
    if factor <= 1 or original * factor < wanted:
        raise UsageError(
            f"--context: factor {factor} of {original} positions (expected {wanted / original:g} "
            f"or more for {wanted})"
        )
    found.pop("attention_factor", None)  # follows from the factor
    return found | {"rope_type": "yarn", "factor": float(factor), _ORIGINAL: original}
