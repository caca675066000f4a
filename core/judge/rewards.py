"""Rewards of samples: verifiers against the record's answer, rubrics, or a weighted sum of them.

A reward is written `exact`, `number`, `regex`, `rubric`, or several with weights: `number=0.8,
regex=0.2`. Each part gives a score in [0, 1], except `model`, the score of a reward model, which is
any number; if a part has no score (the judge failed, or a
verifier passed its time limit), the sample has no reward. `NullGuard` stops a run where too many
have none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.generate.client import ClientStats
from sabia.core.judge.llm import Question
from sabia.core.judge.panel import AskedPanel, Panel, weighted_majority, weighted_mean
from sabia.core.judge.rubric import Rubric, parse_rubric
from sabia.core.judge.verdict import Grade, Opinion, Verdict
from sabia.core.judge.verifiers import VERIFIERS, check_reference, explained_all, verify
from sabia.core.sandbox.isolated import boxes

RUBRIC = "rubric"
MODEL = "model"
GUARD_WINDOW = 200  # samples over which the share without a reward is computed


@dataclass(frozen=True)
class Case:
    """A sampled `text` that answers `messages`, and the reference that it is graded by."""

    messages: Sequence[Mapping[str, Any]]
    text: str
    answer: str | None = None
    rubric: Rubric | None = None


@dataclass(frozen=True)
class AskedCase:
    """A case whose judge's calls have been started."""

    case: Case
    asked: AskedPanel | None  # None without an item for a judge
    verified: Mapping[str, Verdict]  # the verdicts of verifiers on items of the rubric


Scores = Callable[[Sequence[Case]], Sequence[float | None]]


def parse_reward(text: str, more: Sequence[str] = ()) -> dict[str, float]:
    """'number=0.8,regex=0.2' → weights by kind; raises UsageError for an invalid specification.

    more: kinds that the command has besides verifiers and rubrics.
    """
    weights: dict[str, float] = {}
    kinds = (*VERIFIERS, RUBRIC, *more)
    for part in text.split(","):
        kind, _, weight = (piece.strip() for piece in part.partition("="))
        if kind not in kinds or kind in weights:
            known = ", ".join(kinds)
            raise UsageError(f"--reward: {part.strip()!r} (expected each once of {known})")
        try:
            weights[kind] = float(weight or 1.0)
        except ValueError:
            raise UsageError(f"--reward: weight {weight!r} of {kind} is not a number") from None
        if not weights[kind] > 0:
            raise UsageError(f"--reward: weight {weight} of {kind} (expected above 0)")
    return weights


class Grader:
    """Computes rewards by weighted kinds; `judge` is required for rubrics with llm items, `scores`,
    of a reward model, for the kind MODEL.

    Raises MissingBackend for the kind `code` where programs cannot be isolated.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        judge: Panel | None = None,
        max_unknown: float = 0.0,
        scores: Scores | None = None,
    ) -> None:
        self.weights, self.max_unknown, self.scores = dict(weights), max_unknown, scores
        self.verifiers = [kind for kind in self.weights if kind not in (RUBRIC, MODEL)]
        self.judge = judge
        if "code" in self.weights:
            with boxes.one() as box:
                box.check()

    def check(self, answer: str | None, rubric: str | None) -> Rubric | None:
        """The record's rubric, parsed; raises BadData if the reward needs a missing column."""
        if self.verifiers and answer is None:
            raise BadData(f"no answer (reward {', '.join(self.weights)} needs one)")
        for kind in self.verifiers:
            check_reference(kind, str(answer))
        if RUBRIC not in self.weights:
            return None
        if not rubric:
            raise BadData("no rubric (reward rubric needs one)")
        parsed = parse_rubric(rubric)
        if parsed.needs_judge and self.judge is None:
            raise UsageError(
                f"rubric {parsed.id} has items for a judge (expected --judge-url, --judge-model)"
            )
        for item in parsed.items:
            if item.kind == "code":
                check_reference(item.kind, item.reference)
        return parsed

    @property
    def stats(self) -> ClientStats:
        """Counts of the judge's calls so far; zeros without a judge."""
        return self.judge.stats if self.judge else ClientStats()

    def grade(self, cases: Sequence[Case]) -> list[Grade]:
        """The reward of each case with its verdicts."""
        return self.collect([self.submit(case) for case in cases])

    def submit(self, case: Case) -> AskedCase:
        """Start the judge's calls about a case. Raises UsageError without a judge for them."""
        if RUBRIC not in self.weights or case.rubric is None:
            return AskedCase(case, None, {})
        verified = {
            item.id: Verdict.of(verify(item.kind, case.text, item.reference))
            for item in case.rubric.items
            if item.kind != "llm"
        }
        if not case.rubric.needs_judge:
            return AskedCase(case, None, verified)
        if self.judge is None:
            raise UsageError("reward: the rubric needs a judge; name one with --judge-url")
        question = Question(case.messages, case.text, case.rubric, verified)
        return AskedCase(case, self.judge.submit(question), verified)

    def collect(self, asked: Sequence[AskedCase]) -> list[Grade]:
        """Wait for the calls of `submit`; the reward of each case with its verdicts."""
        opinions: list[list[Opinion]] = [[] for _ in asked]
        if self.judge is not None:
            opinions = self.judge.collect([one.asked for one in asked])
        pairs = [(one.case.text, str(one.case.answer)) for one in asked]
        by_kind: dict[str, Sequence[float | None]] = {
            kind: [tested.passed for tested in explained_all(kind, pairs)]
            for kind in self.verifiers
        }
        if MODEL in self.weights:
            assert self.scores is not None, "the kind has a reward model"
            by_kind[MODEL] = self.scores([one.case for one in asked])
        return [
            self._grade(*pair, {kind: met[index] for kind, met in by_kind.items()})
            for index, pair in enumerate(zip(asked, opinions, strict=True))
        ]

    def _grade(
        self, asked: AskedCase, opinions: Sequence[Opinion], by_kind: Mapping[str, float | None]
    ) -> Grade:
        case, verified = asked.case, asked.verified
        if RUBRIC not in self.weights:
            return self._mix(by_kind, None)
        assert case.rubric is not None, "every case has one"
        judges = [one for one in opinions if not one.audit]
        joint = weighted_majority(judges)
        grade = case.rubric.grade({**joint, **verified}, self.max_unknown)
        if joint and self.judge is not None and self.judge.mean:
            scores = [
                case.rubric.score({**one.verdicts, **verified}, self.max_unknown) for one in judges
            ]
            score = weighted_mean(scores, [one.weight for one in judges])
            grade = replace(grade, score=score)
        if len(opinions) > 1 or any(one.lookups for one in opinions):
            grade = replace(grade, opinions=tuple(opinions))
        if self.judge is not None:
            named = [(one.judge, one.audit, one.numbers) for one in opinions]
            self.judge.agreement.add(grade.numbers, named)
        return self._mix(by_kind, grade)

    def _mix(self, by_kind: Mapping[str, float | None], rubric: Grade | None) -> Grade:
        total, score, known = sum(self.weights.values()), 0.0, True
        verdicts: list[tuple[str, Verdict, float]] = []
        for kind, weight in self.weights.items():
            if kind != RUBRIC:
                met = by_kind[kind]
                if kind != MODEL:
                    verdicts.append((kind, Verdict.of(None if met is None else bool(met)), weight))
                score, known = score + weight * (met or 0.0), known and met is not None
        if rubric is not None:
            verdicts += rubric.verdicts
            known = known and rubric.score is not None
            score += self.weights[RUBRIC] * (rubric.score or 0.0)
        opinions = rubric.opinions if rubric is not None else ()
        if not total:  # nothing is graded
            return Grade(0.0)
        return Grade(score / total if known else None, tuple(verdicts), opinions)


class NullGuard:
    """Raises Failed when, over the last GUARD_WINDOW samples, too many have no reward."""

    def __init__(self, max_share: float) -> None:
        self.max_share, self.recent = max_share, list[bool]()

    def add(self, grades: Sequence[Grade]) -> None:
        """Count the grades; raises Failed if the share is exceeded."""
        missing = [grade.score is None for grade in grades]
        self.recent = (self.recent + missing)[-max(GUARD_WINDOW, len(missing)) :]
        share = sum(self.recent) / max(len(self.recent), 1)
        if share > self.max_share:
            raise Failed(
                f"the judge gave no verdict on {share:.0%} of the last {len(self.recent)} samples "
                f"(expected at most {self.max_share:.0%}); finished samples and verdicts are kept: "
                "fix the judge and run again, or raise --max-null"
            )
