"""A verdict on one rubric item, and why there are three of them.

`UNKNOWN` means that nobody could say: the judge timed out, answered with something unreadable or
left the item out. It is never a bad grade; a sample with too many unknown items has no reward at
all and leaves its group (post-training practice turns outages into zeros, and learns from them).
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What is known of one item; the value is what the `items` column of a sample holds."""

    MET = "met"
    UNMET = "unmet"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, met: bool | None) -> "Verdict":
        """True, False or None as a verdict."""
        return cls.UNKNOWN if met is None else cls.MET if met else cls.UNMET


@dataclass(frozen=True)
class Grade:
    """The reward of one sample: `score` in [0, 1], or None where the judge failed.

    `verdicts` are (item id, verdict, weight) in the rubric's order.
    """

    score: float | None
    verdicts: tuple[tuple[str, Verdict, float], ...] = ()

    def items(self) -> list[dict[str, str | float]]:
        """The `items` column of a sample record: points are the weight where met, else 0."""
        return [
            {"id": item, "verdict": str(verdict), "points": weight * (verdict is Verdict.MET)}
            for item, verdict, weight in self.verdicts
        ]
