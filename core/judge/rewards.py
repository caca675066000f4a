"""Rewards of samples: verifiers against the record's answer, rubrics, or a weighted sum of them.

A reward is written `exact`, `number`, `regex`, `rubric`, or several with weights: `number=0.8,
regex=0.2`. Each part gives a score in [0, 1]; if a part has no score (the judge failed), the
sample has no reward. `NullGuard` stops a run whose judge fails too often.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.judge.llm import Judge, Question
from sabia.core.judge.rubric import Rubric, parse_rubric
from sabia.core.judge.verdict import Grade, Verdict
from sabia.core.judge.verifiers import VERIFIERS, verify

RUBRIC = "rubric"
GUARD_WINDOW = 200  # samples over which the share without a reward is computed


@dataclass(frozen=True)
class Case:
    """A sampled `text` that answers `messages`, and the reference that it is graded by."""

    messages: Sequence[Mapping[str, Any]]
    text: str
    answer: str | None = None
    rubric: Rubric | None = None


def parse_reward(text: str) -> dict[str, float]:
    """'number=0.8,regex=0.2' → weights by kind; raises UsageError for an invalid specification."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        kind, _, weight = (piece.strip() for piece in part.partition("="))
        if kind not in (*VERIFIERS, RUBRIC) or kind in weights:
            known = ", ".join((*VERIFIERS, RUBRIC))
            raise UsageError(f"--reward: {part.strip()!r} (expected each once of {known})")
        try:
            weights[kind] = float(weight or 1.0)
        except ValueError:
            raise UsageError(f"--reward: weight {weight!r} of {kind} is not a number") from None
        if not weights[kind] > 0:
            raise UsageError(f"--reward: weight {weight} of {kind} (expected above 0)")
    return weights


class Grader:
    """Computes rewards by weighted kinds; `judge` is required for rubrics with llm items."""

    def __init__(
        self, weights: Mapping[str, float], judge: Judge | None = None, max_unknown: float = 0.0
    ) -> None:
        self.weights, self.judge, self.max_unknown = dict(weights), judge, max_unknown

    def check(self, answer: str | None, rubric: str | None) -> Rubric | None:
        """The record's rubric, parsed; raises BadData if the reward needs a missing column."""
        if any(kind != RUBRIC for kind in self.weights) and answer is None:
            raise BadData(f"no answer (reward {', '.join(self.weights)} needs one)")
        for kind in self.weights:
            if kind != RUBRIC:
                verify(kind, "", str(answer))  # an unreadable reference fails here
        if RUBRIC not in self.weights:
            return None
        if not rubric:
            raise BadData("no rubric (reward rubric needs one)")
        parsed = parse_rubric(rubric)
        if parsed.needs_judge and self.judge is None:
            raise UsageError(
                f"rubric {parsed.id} has items for a judge (expected --judge-url, --judge-model)"
            )
        return parsed

    def grade(self, cases: Sequence[Case]) -> list[Grade]:
        """The reward of each case with its verdicts."""
        rubrics = self._rubric_grades(cases) if RUBRIC in self.weights else [None] * len(cases)
        return [self._mix(case, rubric) for case, rubric in zip(cases, rubrics, strict=True)]

    def _mix(self, case: Case, rubric: Grade | None) -> Grade:
        total, score = sum(self.weights.values()), 0.0
        verdicts: list[tuple[str, Verdict, float]] = []
        for kind, weight in self.weights.items():
            if kind != RUBRIC:
                met = verify(kind, case.text, str(case.answer))
                verdicts.append((kind, Verdict.of(met), weight))
                score += weight * met
        if rubric is not None:
            verdicts += rubric.verdicts
            if rubric.score is None:
                return Grade(None, tuple(verdicts))
            score += self.weights[RUBRIC] * rubric.score
        return Grade(score / total, tuple(verdicts))

    def _rubric_grades(self, cases: Sequence[Case]) -> list[Grade]:
        verdicts: list[dict[str, Verdict]] = [{} for _ in cases]
        asked, questions = list[int](), list[Question]()
        for number, case in enumerate(cases):
            items = case.rubric.items if case.rubric else ()
            for item in items:
                if item.kind != "llm":
                    met = verify(item.kind, case.text, item.reference)
                    verdicts[number][item.id] = Verdict.of(met)
            if for_judge := tuple(item for item in items if item.kind == "llm"):
                asked.append(number)
                questions.append(Question(case.messages, case.text, for_judge))
        if asked:
            if self.judge is None:
                raise UsageError("reward: the rubric needs a judge; name one with --judge-url")
            answers = self.judge.verdicts(questions)
            for number, item_verdicts in zip(asked, answers, strict=True):
                verdicts[number] |= item_verdicts
        return [
            case.rubric.grade(item_verdicts, self.max_unknown)  # type: ignore[union-attr]  # all have one
            for case, item_verdicts in zip(cases, verdicts, strict=True)
        ]


class NullGuard:
    """Raises Failed when, over the last GUARD_WINDOW samples, too many have no reward."""

    def __init__(self, max_share: float) -> None:
        self.max_share, self.recent = max_share, list[bool]()
        self.seen = self.missing = 0

    def add(self, grades: Sequence[Grade]) -> None:
        """Count the grades; raises Failed if the share is exceeded."""
        missing = [grade.score is None for grade in grades]
        self.seen, self.missing = self.seen + len(missing), self.missing + sum(missing)
        self.recent = (self.recent + missing)[-max(GUARD_WINDOW, len(missing)) :]
        share = sum(self.recent) / max(len(self.recent), 1)
        if share > self.max_share:
            raise Failed(
                f"the judge gave no verdict on {share:.0%} of the last {len(self.recent)} samples "
                f"(expected at most {self.max_share:.0%}); finished samples and verdicts are kept: "
                "fix the judge and run again, or raise --max-null"
            )
