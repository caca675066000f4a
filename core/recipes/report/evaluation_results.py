"""The results of evaluations for a model card: scores with intervals, and signs of contamination.

They are read from score rows of `sabia eval`. Items that the documents of the training hold, as
`sabia dedup --decontaminate` marked them, are shown apart from the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sabia.core.bench.contamination import apart
from sabia.core.bench.result_summary import Result, Summary, summarise, tabulate
from sabia.core.bench.score_rows import Score, from_batch
from sabia.core.bench.statistics import Interval
from sabia.core.errors import BadData
from sabia.core.recipes.report.card_text import FILL_IN, UNKNOWN, table
from sabia.core.shards.inputs import from_path

COLUMNS = ["task", "metric", "value [95 %]", "items", "without answer or verdict", "model"]
APART = ["task", "metric", "items in the documents", "value [95 %]", "others", "value [95 %]",
         "model"]  # fmt: skip
FIGURES = ["task", "figure", "items", "mean [95 %]", "AUC, items in the documents", "model"]


@dataclass(frozen=True)
class Results:
    """Results of tasks, the same on items in the documents of the training and on the others, and
    figures that tell whether the model has read the items. searched: whether items were searched
    for in these documents."""

    summary: Summary
    parts: Sequence[apart.Apart]
    figures: Sequence[apart.Figure]
    searched: bool

    def json(self) -> dict[str, object]:
        """All figures as plain data."""
        return {
            "results": [asdict(one) for one in self.summary.results],
            "contamination": apart.to_json(self.parts, self.figures),
        }


def read_results(paths: Sequence[str], documents: Sequence[str]) -> Results:
    """The results in score rows; documents: files of the training. UsageError, BadData."""
    scores = [
        row
        for path in paths
        for source in from_path(path, "score", "--scores")
        for batch in source.batches()
        for row in from_batch(batch, Path(source.name).stem)
        if isinstance(row, Score)
    ]
    if not scores:
        raise BadData(f"--scores: no scores in {', '.join(paths)}")
    marked: dict[str, frozenset[str]] = {}
    searched = 0
    for path in documents:
        try:
            of_path = apart.marked_items([path])
        except BadData:  # documents that dedup --decontaminate has not seen
            continue
        searched += 1
        for task, items in of_path.items():
            marked[task] = marked.get(task, frozenset()) | items
    summary = summarise(scores)
    return Results(
        summary,
        apart.apart(scores, summary, marked) if marked else [],
        apart.figures(tabulate(scores)[0], marked),
        bool(searched),
    )


def section(results: Results | None) -> Iterator[str]:
    """The lines of the section."""
    yield from ("## Evaluation", "")
    if results is None:
        yield from (FILL_IN, "")
        return
    yield from (*table(COLUMNS, [_row(one) for one in results.summary.results]), "")
    yield from ("### Contamination of the evaluation", "")
    if results.parts:
        rows = [
            (one.task, one.metric, one.inside[0], _ends(one.inside[1]), one.outside[0],
             _ends(one.outside[1]), one.model)
            for one in results.parts
        ]  # fmt: skip
        yield from (*table(APART, rows), "")
    elif results.searched:
        yield from ("No item of these tasks was found in the documents of the training.", "")
    else:
        yield from (f"Items of these tasks in the documents of the training: {UNKNOWN}.", "")
    if results.figures:
        lines = [
            (one.task, apart.FIGURES.get(one.name, one.name), one.items, _ends(one.mean),
             "" if one.auc is None else f"{one.auc:.3f}", one.model)
            for one in results.figures
        ]  # fmt: skip
        yield from (*table(FIGURES, lines), "")


def _row(one: Result) -> tuple[object, ...]:
    return (one.task, one.metric, _ends(one.interval), one.items, one.missing,
            one.model)  # fmt: skip


def _ends(i: Interval | None) -> str:
    return "" if i is None else f"{i.value:.4g} [{i.low:.4g}, {i.high:.4g}]"
