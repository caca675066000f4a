"""Rotary fields of a config.json, in the old and the new form.

Older files have `rope_theta` and `rope_scaling` (with `type` or `rope_type`), newer ones have both
in `rope_parameters`. A scaling that is not supported is an error that names it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.fields import Fields
from sabia.core.spec.rope import Rope, RopeKind, yarn_mscale

_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_length",
}
# rope_type → required fields of the file → our names
_KINDS: dict[RopeKind, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": _LLAMA3,
    "yarn": {"factor": "factor", "original_max_position_embeddings": "original_length"},
}
# Dimensions for the time, height and width of images; the three positions of a text are equal.
_GRIDS = ("mrope_section", "mrope_interleaved")


def _kind(unread: dict[str, Any]) -> RopeKind:
    kinds = {str(unread.pop(key)) for key in ("rope_type", "type") if key in unread} or {"default"}
    matching = [kind for kind in _KINDS if {kind} == kinds]
    if not matching:
        known = ", ".join(_KINDS)
        named = " and ".join(sorted(kinds))
        raise UsageError(f"config.json: rope_type is {named!r} (expected one of {known})")
    return matching[0]


def _number(unread: dict[str, Any], name: str) -> float:
    value = unread.pop(name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UsageError(f"config.json: rope {name} is {value!r} (expected a number above 0)")
    return float(value)


def _yarn(unread: dict[str, Any], factor: float) -> dict[str, Any]:
    """YaRN's optional fields; the amplitude is attention_factor, a ratio of mscales, or default."""

    def optional(name: str, default: float) -> float:
        if not unread.get(name):
            unread.pop(name, None)
            return default
        return _number(unread, name)

    mscale, all_dim = optional("mscale", 0.0), optional("mscale_all_dim", 0.0)
    ratio = yarn_mscale(factor)
    if mscale and all_dim:
        ratio = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    truncate = unread.pop("truncate", True)
    if not isinstance(truncate, bool):
        raise UsageError(f"config.json: rope truncate is {truncate!r} (expected true or false)")
    return {
        "amplitude": optional("attention_factor", ratio),
        "beta_fast": optional("beta_fast", 32.0),
        "beta_slow": optional("beta_slow", 1.0),
        "truncate": truncate,
        "mscale_all_dim": all_dim,
    }


def rope_from(values: Mapping[str, Any], theta: float, head_dim: int) -> Rope:
    """The rotary embedding of the fields `values` for heads of `head_dim`; theta: default base."""
    unread = {key: value for key, value in values.items() if value is not None}
    theta = _number(unread, "rope_theta") if "rope_theta" in unread else theta
    kind = _kind(unread)
    numbers: dict[str, Any] = {ours: _number(unread, name) for name, ours in _KINDS[kind].items()}
    if kind == "yarn":
        numbers |= _yarn(unread, numbers["factor"])
    if unread.get("partial_rotary_factor") == 1:
        del unread["partial_rotary_factor"]
    if unread:
        name, value = next(iter(unread.items()))
        raise UsageError(
            f"config.json: rope {name}={value!r} (expected no such field for {kind!r})"
        )
    return replace(Rope(head_dim, theta, kind), **numbers)


def read_scaling(fields: Fields, kind: str = "") -> dict[str, Any]:
    """Take `rope_parameters` or the older `rope_scaling`; refused if both are given and differ.

    kind: the layers that `rope_scaling` is of, if `rope_parameters` has an entry per kind of layer.
    """
    scaling = fields.take("rope_scaling", dict, {})
    scaling = {kind: scaling} if kind and scaling else scaling
    values = fields.take("rope_parameters", dict, scaling)
    if scaling and values != scaling:
        raise UsageError(
            f"config.json: rope_scaling is {scaling!r} and rope_parameters {values!r} "
            "(expected one of them)"
        )
    return values


def read_rope(
    fields: Fields, head_dim: int, default_theta: float = 10000.0, partial: bool = False
) -> Rope:
    """Take `rope_parameters`, or `rope_theta` and `rope_scaling`.

    partial: the family reads `partial_rotary_factor`, the fraction of a head that is rotated.
    """
    theta = fields.number("rope_theta", default_theta)
    values = dict(read_scaling(fields))
    for name in _GRIDS:
        values.pop(name, None)
    if partial:
        share = fields.take("partial_rotary_factor", float, 1.0)
        share = values.pop("partial_rotary_factor", share)
        if not 0 < share <= 1 or int(head_dim * share) % 2:
            raise UsageError(
                f"config.json: partial_rotary_factor is {share!r} (expected a fraction of head_dim "
                f"{head_dim} that is an even number of dimensions)"
            )
        head_dim = int(head_dim * share)
    return rope_from(values, theta, head_dim)
