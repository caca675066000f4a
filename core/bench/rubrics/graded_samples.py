"""Samples graded by a judge that does not know the right answer, to choose the best of them.

The judge gives each sample 0 to 10 points, without the reference answer; several judges are joined
as in rubric tasks. The task then scores the sample that was chosen, so that its score says what the
judge's choice is worth (best-of-N, as in Cobbe et al. 2021, arXiv 2110.14168, section 4).
"""

from collections.abc import Sequence
from dataclasses import replace

from sabia.core.bench.answers import Answer
from sabia.core.bench.items import Item
from sabia.core.bench.judging import PointsQuestion, judge_points
from sabia.core.bench.score_rows import Score
from sabia.core.judge.panel import Panel

GRADE = "grade"  # in the details of a sample: between 0 and 1, None without a verdict
MOST = 10.0
KEY = (
    "There is no official key. Work out for yourself what the right answer is. 10 points: the "
    "answer is surely right and complete; 5 points: as likely right as wrong; 0 points: surely "
    "wrong, or no answer to the question."
)


def question_about(item: Item, answer: Answer) -> PointsQuestion:
    """What the judge is asked about a sample."""
    return PointsQuestion(list(answer.messages) or item.as_messages, answer.text, KEY, MOST)


def with_grades(
    scores: Sequence[Score], pairs: Sequence[tuple[Item, Answer]], panel: Panel, max_tokens: int
) -> list[Score]:
    """The rows, whose details get the judge's grade of their sample and what it said."""
    judged = judge_points([question_about(*pair) for pair in pairs], panel, max_tokens)
    details = {
        (answer.item_id, answer.sample): {
            GRADE: one.values.get("share"), "grade_judgment": one.detail["judgment"]
        }
        for (_, answer), one in zip(pairs, judged, strict=True)
    }  # fmt: skip
    return [
        row
        if row.detail is None
        else replace(row, detail={**row.detail, **details[row.item_id, row.sample]})
        for row in scores
    ]
