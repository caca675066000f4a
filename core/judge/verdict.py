"""The verdict on one rubric item: met, unmet or unknown.

`UNKNOWN` means that there is no verdict: the judge timed out, its reply was unreadable or left the
item out. It never counts as unmet; a sample with too many unknown items has no reward and is
excluded from its group, so that training does not learn from outages of the judge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The verdict on one item; its value is stored in the `items` column of a sample."""

    MET = "met"
    UNMET = "unmet"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, met: bool | None) -> "Verdict":
        """True, False or None as a verdict."""
        return cls.UNKNOWN if met is None else cls.MET if met else cls.UNMET

    @property
    def number(self) -> float | None:
        """1 for met, 0 for unmet, None for unknown."""
        return None if self is Verdict.UNKNOWN else float(self is Verdict.MET)


@dataclass(frozen=True)
class Opinion:
    """What one judge says of a sample: verdicts by id of the items that it was asked about.

    audit: of the auditor, which does not decide. lookups: those that its model made.
    """

    judge: str
    weight: float
    verdicts: Mapping[str, Verdict]
    audit: bool = False
    lookups: Sequence[Mapping[str, Any]] = ()

    @property
    def numbers(self) -> dict[str, float | None]:
        """The verdicts as numbers."""
        return {item: verdict.number for item, verdict in self.verdicts.items()}


@dataclass(frozen=True)
class Grade:
    """The reward of one sample: `score` in [0, 1] (of a reward model any number), or None if the
    judge failed.

    `verdicts` are (item id, verdict, weight) in the rubric's order; `opinions` those of each judge
    where there are several, an auditor was asked, or a judge made lookups; `steps` those that the
    sample consists of, where they are graded: the number of their last token, and their reward.
    """

    score: float | None
    verdicts: tuple[tuple[str, Verdict, float], ...] = ()
    opinions: Sequence[Opinion] = field(default=())
    steps: Sequence[tuple[int, float]] = field(default=())

    @property
    def numbers(self) -> dict[str, float | None]:
        """The verdicts as numbers."""
        return {item: verdict.number for item, verdict, _ in self.verdicts}

    def items(self) -> list[dict[str, str | float]]:
        """The `items` column of a sample record: points are the weight where met, else 0."""
        return [
            {"id": item, "verdict": str(verdict), "points": weight * (verdict is Verdict.MET)}
            for item, verdict, weight in self.verdicts
        ]
