"""Scores of answers: metrics of the texts, the judge of rubrics, and rows of missing answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from sabia.core.bench.answers import Answer, detail_of, score_exact
from sabia.core.bench.harness.scores import score_answers
from sabia.core.bench.items import Item, listed, value
from sabia.core.bench.judging import (
    JudgedAnswer,
    PointsQuestion,
    items_grader,
    judge_items,
    judge_points,
    key_text,
    rubric_of,
)
from sabia.core.bench.metrics import MAXIMUM, NO_ANSWER, NO_VERDICT
from sabia.core.bench.rubrics.graded_samples import with_grades
from sabia.core.bench.rubrics.judge_costs import criteria_of
from sabia.core.bench.rubrics.pairwise import comparisons, judge_pairs, rows_of
from sabia.core.bench.score_rows import Score, ScoreRow, scores_of
from sabia.core.bench.task import METRICS_OF_REFUSALS, Task
from sabia.core.bench.verdict_rows import VerdictRow
from sabia.core.errors import BadData, UsageError
from sabia.core.generate.budget import Budget
from sabia.core.judge.opened_judges import judge_servers, open_panel
from sabia.core.judge.panel import Panel
from sabia.core.judge.rewards import Case
from sabia.core.options.eval import EvalOptions


def check_grading(task: Task, items: Sequence[Item]) -> None:
    """See that every item has what its answers are graded by, before a model answers. BadData."""
    for item in items:
        try:
            if task.references:
                listed(task.references, item.fields)
            elif task.kind == "rubric" and task.scoring == "items":
                rubric_of(value(task.rubric, item.fields))
            elif task.kind == "rubric" and task.scoring == "points":
                key_text(value(task.rubric, item.fields))
                float(value(task.maximum, item.fields))
        except (BadData, TypeError, ValueError) as error:
            raise BadData(f"{task.name}, item {item.id}: {error}") from error


class Judging(ExitStack):
    """Scores answers; opens the judge's client when the first rubric task needs it."""

    def __init__(self, options: EvalOptions, budget: Budget) -> None:
        super().__init__()
        self.options, self.budget = options, budget
        self._panel: Panel | None = None
        self._answers: dict[str, tuple[Task, dict[str, Sequence[tuple[Item, Answer]]]]] = {}

    @staticmethod
    def calls(task: Task, items: Sequence[Item], options: EvalOptions) -> int:
        """Judge calls for one answer to every item, at most (without lookups)."""
        each = len(items)
        if task.scoring == "items":
            rubrics = (rubric_of(value(task.rubric, item.fields)) for item in items)
            counts = (sum(i.kind == "llm" for i in rubric.items) for rubric in rubrics)
            each = sum(-(-n // options.judge_items_per_call) * options.judge_votes for n in counts)
        servers = judge_servers(options)
        share = sum(options.audit_judge if server.audit else 1.0 for server in servers)
        return math.ceil(each * max(1.0, share))

    def score(
        self, task: Task, model: str, pairs: Sequence[tuple[Item, Answer]]
    ) -> Sequence[ScoreRow]:
        """Score rows of answers to an exact_match or rubric task."""
        given = [pair for pair in pairs if not pair[1].missing]
        if task.yaml is not None:
            return [*score_answers(task, model, given), *score_missing(task, model, pairs)]
        if task.kind == "exact_match":
            scores = score_exact(task, model, given)
            if self.options.best_of and given:
                scores = with_grades(scores, given, self._open(task), self.options.judge_tokens)
            scores += score_missing(task, model, pairs)
            return scores + score_conversations(task, model, pairs, scores)
        if task.scoring == "pairs":
            self._answers.setdefault(task.name, (task, {}))[1][model] = given
            return score_missing(task, model, pairs)
        judge = self._points if task.scoring == "points" else self._items
        rows: list[ScoreRow] = []
        for (item, answer), judged in zip(given, judge(task, given) if given else (), strict=True):
            detail, values = detail_of(item, answer, judged.detail), judged.values
            if NO_VERDICT in values:
                values = values | {MAXIMUM: maximum_points(task, item)}
            elif task.metric in METRICS_OF_REFUSALS:
                values = values | {task.metric: values["share"]}
            rows += scores_of(model, task.name, item.id, answer.sample, values, detail)
            rows += [
                VerdictRow(model, task.name, item.id, answer.sample, entry)
                for entry in judged.entries
            ]
        return [*rows, *score_missing(task, model, pairs)]

    def compared(self) -> Iterator[Score]:
        """Score rows of tasks whose answers are compared in pairs, of all models scored so far."""
        for task, answers in self._answers.values():
            if len(answers) < 2:
                raise UsageError(f"{task.name}: pairs of answers need two models or more")
            items = [item for item, _ in next(iter(answers.values()))]
            made = comparisons(answers, criteria_of(task, items))
            judge_pairs(made, self._open(task), self.options.judge_tokens)
            yield from rows_of(task, made, self._open(task))

    def _items(self, task: Task, pairs: Sequence[tuple[Item, Answer]]) -> list[JudgedAnswer]:
        rubrics = [rubric_of(value(task.rubric, item.fields)) for item, _ in pairs]
        cases = [
            Case(list(answer.messages) or item.as_messages, answer.text, rubric=rubric)
            for (item, answer), rubric in zip(pairs, rubrics, strict=True)
        ]
        judge = self._open(task) if any(rubric.needs_judge for rubric in rubrics) else None
        return judge_items(cases, items_grader(judge, self.options.max_unknown))

    def _points(self, task: Task, pairs: Sequence[tuple[Item, Answer]]) -> list[JudgedAnswer]:
        exams = [
            PointsQuestion(
                list(answer.messages) or item.as_messages,
                answer.text,
                key_text(value(task.rubric, item.fields)),
                float(value(task.maximum, item.fields)),
            )
            for item, answer in pairs
        ]
        return judge_points(exams, self._open(task), self.options.judge_tokens)

    def _open(self, task: Task) -> Panel:
        if self._panel is None:
            self._panel = self.enter_context(open_panel(self.options, self.budget))
        if self._panel is None:
            raise UsageError(f"--judge-url: is missing (task {task.name} has answers to judge)")
        return self._panel


def score_conversations(
    task: Task, model: str, pairs: Sequence[tuple[Item, Answer]], scores: Sequence[Score]
) -> list[Score]:
    """A row for each conversation whose turns are all scored: 1 if all are right. They have the
    item of the last turn."""
    right = {(row.item_id, row.sample): row.value for row in scores if row.metric == "exact_match"}
    turns: dict[tuple[str, int], list[str]] = {}
    for item, answer in pairs:
        if item.conversation:
            turns.setdefault((item.conversation, answer.sample), []).append(item.id)
    rows: list[Score] = []
    for (_, sample), ids in turns.items():
        values = [right.get((item, sample)) for item in ids]
        if None not in values:
            whole = {"conversation": float(all(values))}
            rows += scores_of(model, task.name, ids[-1], sample, whole)
    return rows


def score_missing(task: Task, model: str, pairs: Sequence[tuple[Item, Answer]]) -> list[Score]:
    """Rows of the samples that have no answer."""
    rows: list[Score] = []
    for item, answer in pairs:
        if answer.missing:
            values = {NO_ANSWER: 1.0}
            if task.kind == "rubric":
                values[MAXIMUM] = maximum_points(task, item)
            detail = detail_of(item, answer, {})
            rows += scores_of(model, task.name, item.id, answer.sample, values, detail)
    return rows


def maximum_points(task: Task, item: Item) -> float:
    """The most points of an item of a rubric task."""
    if task.scoring == "pairs":
        return 1.0
    if task.scoring == "points":
        return float(value(task.maximum, item.fields))
    rubric = rubric_of(value(task.rubric, item.fields))
    return sum(max(criterion.weight, 0.0) for criterion in rubric.items)
