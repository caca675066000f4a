"""What is shown of a gate's checks: lines, a section of the page, records."""

from collections.abc import Sequence
from typing import Any

from sabia.core import page
from sabia.core.bench.gate import GREEN, RED, Check
from sabia.core.bench.gate_file import Gate
from sabia.core.bench.statistics import finite

COLUMNS = ("verdict", "candidate", "check", "metric", "difference [bounds]", "allowed", "noise",
           "worse", "better", "items")  # fmt: skip
IDS = 50


def _verdict(check: Check) -> str:
    text, missing = check.verdict, check.difference.missing
    if check.verdict not in (RED, GREEN):
        text += f", needs {check.needed:,} items" if check.needed else ", needs more clusters"
    return text + (f" ({missing} without an answer count as wrong)" if missing else "")


def rows(checks: Sequence[Check]) -> list[list[str]]:
    """One row a check, the red ones first."""
    order = {RED: 0, GREEN: 2}
    return [
        [
            _verdict(c), c.candidate, f"{c.kind.replace('_', ' ')} {c.name}",
            c.metric or "headline",
            f"{c.difference.value:+.3g} [{c.low:+.3g}, {c.high:+.3g}]", f"{-c.max_drop:g}",
            "" if c.noise is None else f"{c.noise:.3g}",
            str(len(c.difference.worse) or ""), str(len(c.difference.better) or ""),
            str(c.difference.items),
        ]
        for c in sorted(checks, key=lambda check: order.get(check.verdict, 1))
    ]  # fmt: skip


def section(gate: Gate, checks: Sequence[Check]) -> str:
    """The section of the report."""
    note = (
        f"Difference to {gate.baseline}, positive if better. Each bound holds at a confidence of "
        f"{gate.confidence:.4g}; red: a fall of more than what is allowed is shown (tests "
        "Holm-adjusted over the checks of a model), green: it is excluded. The number of items "
        "needed is that with which such a test tells in 80 % of the cases. Noise is the largest "
        "difference between the baseline and its repeats."
    )
    return page.section("Gate", [page.table(COLUMNS, rows(checks)), page.paragraph(note, True)])


def to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Records of the checks, with at most 50 ids of changed items each."""
    return [
        {
            "candidate": c.candidate, "kind": c.kind, "name": c.name, "metric": c.metric,
            "unit": c.unit, "verdict": c.verdict, "max_drop": c.max_drop,
            "difference": c.difference.value, "low": finite(c.low), "high": finite(c.high),
            "p_value_holm": c.p_value, "items": c.difference.items,
            "items_needed": c.needed or None, "missing_as_wrong": c.difference.missing,
            "noise": c.noise, "regressed_items": list(c.difference.worse[:IDS]),
            "fixed_items": list(c.difference.better[:IDS]),
        }
        for c in checks
    ]  # fmt: skip
