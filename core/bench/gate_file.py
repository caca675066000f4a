"""The file of a gate: which falls of a model, against a baseline, it allows."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sabia.core.bench import statistics
from sabia.core.bench.metrics import METRICS, is_known
from sabia.core.errors import UsageError
from sabia.core.files import read_toml

KINDS = ("capability", "task", "rubric_item")
SHIPPED = Path(__file__).parent / "gates"


@dataclass(frozen=True)
class Rule:
    """The largest fall allowed for what a pattern of `*` and `?` matches; each match is a check.

    kind: one of KINDS. max_drop: in the unit of the metric (the headline metric by default):
    a share, or points of the whole task.
    """

    kind: str
    pattern: str
    max_drop: float
    metric: str = ""


@dataclass(frozen=True)
class Gate:
    """A gate file. repeats: models of other seeds than the baseline's. capabilities: names and
    patterns of tasks, besides what task files say. undecided: "pass" or "fail"."""

    baseline: str
    rules: tuple[Rule, ...]
    confidence: float = statistics.CONFIDENCE
    undecided: str = "pass"
    repeats: tuple[str, ...] = ()
    capabilities: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load_gate(path: str) -> Gate:
    """The gate of a TOML file, or one that comes with sabia, by its name. Raises UsageError."""
    shipped = {one.stem: str(one) for one in SHIPPED.glob("*.toml")}
    if path in shipped and not Path(path).exists():
        path = shipped[path]
    values = dict(read_toml("--gate", path))
    rules = values.pop("rule", None)
    known = {one.name for one in fields(Gate)} - {"rules"}
    _refuse_unknown(path, values, known | {"rule"})
    if not isinstance(rules, list) or not rules:
        raise UsageError(f"{path}: no [[rule]] (expected one or more, each with max_drop)")
    if not isinstance(values.get("baseline"), str):
        raise UsageError(f"{path}: baseline is missing (expected the name of a model)")
    confidence = values.get("confidence", statistics.CONFIDENCE)
    if not statistics.is_number(confidence) or not 0.5 < confidence < 1:
        raise UsageError(f"{path}: confidence = {confidence!r} (expected a number in (0.5, 1))")
    if values.get("undecided", "pass") not in ("pass", "fail"):
        raise UsageError(f'{path}: undecided = {values["undecided"]!r} (expected "pass" or "fail")')
    if not _are_names(values.get("repeats", [])):
        raise UsageError(f"{path}: repeats = {values['repeats']!r} (expected a list of models)")
    named = values.get("capabilities", {})
    if not isinstance(named, dict) or not all(map(_are_names, named.values())):
        raise UsageError(f"{path}: capabilities = {named!r} (expected a list of tasks for each)")
    read = tuple(_rule(f"{path}: rule {number}", rule) for number, rule in enumerate(rules, 1))
    return Gate(**{**values, "repeats": tuple(values.get("repeats", ())), "rules": read})


def _rule(where: str, values: object) -> Rule:
    if not isinstance(values, dict):
        raise UsageError(f"{where}: {values!r} (expected a table)")
    _refuse_unknown(where, values, {*KINDS, "metric", "max_drop"})
    kinds = [name for name in KINDS if name in values]
    if len(kinds) != 1 or not isinstance(values[kinds[0]], str):
        raise UsageError(f"{where}: expected a pattern for one of {', '.join(KINDS)}")
    drop = values.get("max_drop")
    if not statistics.is_number(drop) or not 0 < drop < math.inf:
        raise UsageError(f"{where}: max_drop = {drop!r} (expected a number above 0)")
    metric = values.get("metric", "")
    if metric and (not is_known(metric) or kinds == ["rubric_item"]):
        raise UsageError(f"{where}: metric = {metric!r} (expected one of {', '.join(METRICS)})")
    return Rule(kinds[0], values[kinds[0]], float(drop), metric)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _refuse_unknown(where: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), 1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(sorted(known))}"
            raise UsageError(f"{where}: unknown key {name!r} ({hint})")
