"""Rotary position embeddings as data: the inverse frequency of each rotated pair.

`default`: theta^(-2i/N) (Su et al. 2021, arXiv 2104.09864). `linear`: all frequencies divided by
a factor (position interpolation, arXiv 2306.15595). `llama3`: wavelengths beyond the original
context are divided by the factor, short ones kept, with a linear blend between (Llama 3, arXiv
2407.21783). `yarn`: pairs with more than beta_fast rotations in the original context are kept,
those with less than beta_slow divided by the factor, with a linear blend between, and cos and sin
multiplied by `amplitude` (arXiv 2309.00071). `dynamic` (NTK-aware scaling): in documents of L
tokens beyond the original context the base is theta·(factor·L/original - factor + 1)^(N/(N-2)).
`longrope`: each frequency is divided by a number of its own, of `long_factor` in documents longer
than the original context and of `short_factor` in others (arXiv 2402.13753).
Computed in double precision; pairs are (i, i + N/2), the layout of the files on the hub.

They are read from a config.json in the old and the new form: older files have `rope_theta` and
`rope_scaling` (with `type` or `rope_type`), newer ones have both in `rope_parameters`. A scaling
that is not supported is an error that names it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from sabia.core.errors import UsageError
from sabia.core.spec.fields import Fields

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]


@dataclass(frozen=True)
class Rope:
    """Rotation of a head's `dim` leading dimensions; fields not used by `kind` keep their value.

    truncate: the blend begins and ends at whole pairs. mscale_all_dim: in DeepSeek's families it
    scales the attention scores (`score_factor`), not the rotation. short_factor, long_factor: one
    number for each pair.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_length: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    amplitude: float = 1.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether the angles of a document depend on its length."""
        return self.kind == "dynamic" or self.short_factor != self.long_factor


def _llama3(frequency: float, rope: Rope) -> float:
    rotations = rope.original_length * frequency / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    if span == 0:
        return frequency if rotations > rope.low_freq_factor else frequency / rope.factor
    kept = min(1.0, max(0.0, (rotations - rope.low_freq_factor) / span))
    return kept * frequency + (1 - kept) * frequency / rope.factor


def _yarn(plain: tuple[float, ...], rope: Rope) -> tuple[float, ...]:
    def pair_with(rotations: float) -> float:
        rotations_of_first = rope.original_length / (2 * math.pi)
        return rope.dim * math.log(rotations_of_first / rotations) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low or 0.001
    stretched = [min(1.0, max(0.0, (pair - low) / span)) for pair in range(len(plain))]
    return tuple(
        frequency * (1 - share + share / rope.factor)
        for frequency, share in zip(plain, stretched, strict=True)
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1·mscale·ln(factor) + 1, the growth of the scores that YaRN compensates."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def score_factor(rope: Rope) -> float:
    """The factor of the attention scores in DeepSeek's families."""
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2 if rope.mscale_all_dim else 1.0


def inverse_frequencies(rope: Rope, long: bool = False) -> tuple[float, ...]:
    """Radians per position of each of the dim/2 pairs; long: longrope's of long documents.

    Those of `dynamic` are of documents within the original context.
    """
    plain = tuple(rope.theta ** (-2 * pair / rope.dim) for pair in range(rope.dim // 2))
    if rope.kind == "llama3":
        return tuple(_llama3(frequency, rope) for frequency in plain)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    if rope.kind == "dynamic":
        return plain
    if rope.kind == "longrope":
        factors = rope.long_factor if long else rope.short_factor
        return tuple(f / factor for f, factor in zip(plain, factors, strict=True))
    return tuple(frequency / rope.factor for frequency in plain)


_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    _ORIGINAL: "original_length",
}
# rope_type → required fields of the file → our names
_KINDS: dict[RopeKind, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": _LLAMA3,
    "yarn": {"factor": "factor", _ORIGINAL: "original_length"},
    "dynamic": {"factor": "factor"},
    "longrope": {_ORIGINAL: "original_length"},
}
# Dimensions for the time, height and width of images; the three positions of a text are equal.
_GRIDS = ("mrope_section", "mrope_interleaved")


def _kind(unread: dict[str, Any]) -> RopeKind:
    kinds = {str(unread.pop(key)) for key in ("rope_type", "type") if key in unread} or {"default"}
    kinds = {"longrope" if kind == "su" else kind for kind in kinds}  # its name in older files
    matching = [kind for kind in _KINDS if {kind} == kinds]
    if not matching:
        known = ", ".join(_KINDS)
        named = " and ".join(sorted(kinds))
        raise UsageError(f"config.json: rope_type is {named!r} (expected one of {known})")
    return matching[0]


def _number(unread: dict[str, Any], name: str) -> float:
    value = unread.pop(name, None)
    if not _is_positive(value):
        raise UsageError(f"config.json: rope {name} is {value!r} (expected a number above 0)")
    return float(value)


def _optional(unread: dict[str, Any], name: str, default: float) -> float:
    return _number(unread, name) if name in unread else default


def _longrope(
    unread: dict[str, Any], head_dim: int, original: float, positions: int
) -> dict[str, object]:
    """LongRoPE's factors of each pair, and its amplitude: attention_factor, or by the stretch."""
    factors: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        values = unread.pop(name, None)
        numbers = values if isinstance(values, list) else []
        if len(numbers) != head_dim // 2 or not all(_is_positive(number) for number in numbers):
            raise UsageError(
                f"config.json: rope {name} is {values!r} (expected {head_dim // 2} numbers above 0)"
            )
        factors[name] = tuple(float(number) for number in numbers)
    factor = _optional(unread, "factor", positions / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return factors | {"amplitude": _optional(unread, "attention_factor", usual)}


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _yarn_numbers(unread: dict[str, Any], factor: float) -> dict[str, object]:
    """YaRN's optional fields; the amplitude is attention_factor, a ratio of mscales, or default."""
    for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        if unread.get(name) == 0:
            del unread[name]  # 0 is the default, as in transformers
    mscale, all_dim = (_optional(unread, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    ratio = yarn_mscale(factor)
    if mscale and all_dim:
        ratio = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    truncate = unread.pop("truncate", True)
    if not isinstance(truncate, bool):
        raise UsageError(f"config.json: rope truncate is {truncate!r} (expected true or false)")
    return {
        "amplitude": _optional(unread, "attention_factor", ratio),
        "beta_fast": _optional(unread, "beta_fast", 32.0),
        "beta_slow": _optional(unread, "beta_slow", 1.0),
        "truncate": truncate,
        "mscale_all_dim": all_dim,
    }


def rope_from(values: Mapping[str, Any], theta: float, head_dim: int, fields: Fields) -> Rope:
    """The rotary embedding of the scaling `values` for heads of `head_dim`; theta: default base.

    fields: of the whole configuration, of which some kinds need the number of positions.
    """
    unread = {key: value for key, value in values.items() if value is not None}
    theta = _number(unread, "rope_theta") if "rope_theta" in unread else theta
    kind = _kind(unread)
    numbers: dict[str, Any] = {ours: _number(unread, name) for name, ours in _KINDS[kind].items()}
    if kind == "yarn":
        numbers |= _yarn_numbers(unread, numbers["factor"])
    if kind == "dynamic":
        numbers["original_length"] = float(fields.stated_positions())
        unread.pop(_ORIGINAL, None)  # not used, as in transformers
        if head_dim <= 2:
            raise UsageError(f"config.json: {head_dim} rotated dimensions (expected 4 or more)")
    if kind == "longrope":
        original = numbers["original_length"]
        numbers |= _longrope(unread, head_dim, original, fields.stated_positions())
    if unread.get("partial_rotary_factor") == 1:
        del unread["partial_rotary_factor"]
    if unread:
        name, value = next(iter(unread.items()))
        raise UsageError(
            f"config.json: rope {name}={value!r} (expected no such field for {kind!r})"
        )
    return replace(Rope(head_dim, theta, kind), **numbers)


def read_scaling(
    fields: Fields, kinds: tuple[str, ...] = (), usual: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Take `rope_parameters` or the older `rope_scaling`; refused if both are given and differ.

    kinds: of the layers that `rope_scaling` is of, if `rope_parameters` has an entry for each kind.
    usual: the family's scaling, of files in which both are absent or null.
    """
    scaling = fields.take("rope_scaling", dict, {})
    if kinds and "type" in scaling and "rope_type" not in scaling:
        raise UsageError(
            f"config.json: rope_scaling type is {scaling['type']!r} (expected the name rope_type: "
            "transformers ignores type if kinds of layers have rotations of their own)"
        )
    scaling = dict.fromkeys(kinds, scaling) if kinds and scaling else scaling
    values = fields.take("rope_parameters", dict, scaling or dict(usual))
    if scaling and values != scaling:
        raise UsageError(
            f"config.json: rope_scaling is {scaling!r} and rope_parameters {values!r} "
            "(expected one of them)"
        )
    return values


def read_rope(
    fields: Fields,
    head_dim: int,
    default_theta: float = 10000.0,
    partial: bool = False,
    usual: Mapping[str, Any] = MappingProxyType({}),
) -> Rope:
    """Take `rope_parameters`, or `rope_theta` and `rope_scaling`; usual: the family's scaling.

    partial: the family reads `partial_rotary_factor`, the fraction of a head that is rotated.
    """
    theta = fields.number("rope_theta", default_theta)
    values = dict(read_scaling(fields, usual=usual))
    original = fields.take(_ORIGINAL, int, None)
    if original is not None and _ORIGINAL in _KINDS[_kind(dict(values))]:
        values[_ORIGINAL] = original  # it has priority, as in transformers
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
    return rope_from(values, theta, head_dim, fields)
