"""The verdict on one rubric item: met, unmet or unknown.

`UNKNOWN` means that there is no verdict: the judge timed out, its reply was unreadable or left the
item out. It never counts as unmet; a sample with too many unknown items has no reward and is
excluded from its group, so that training does not learn from outages of the judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """The verdict on one item; its value is stored in the `items` column of a sample."""

    MET = "met"
    UNMET = "unmet"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, met: bool | None) -> "Verdict":
        """True, False or None as a verdict."""
        return cls.UNKNOWN if met is None else cls.MET if met else cls.UNMET


@dataclass(frozen=True)
class Grade:
    """The reward of one sample: `score` in [0, 1], or None if the judge failed.

    `verdicts` are (item id, verdict, weight) in the rubric's order; `by_judge` those of each of
    several judges by item id.
    """

    score: float | None
    verdicts: tuple[tuple[str, Verdict, float], ...] = ()
    by_judge: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)

    def items(self) -> list[dict[str, str | float]]:
        """The `items` column of a sample record: points are the weight where met, else 0."""
        return [
            {"id": item, "verdict": str(verdict), "points": weight * (verdict is Verdict.MET)}
            for item, verdict, weight in self.verdicts
        ]
