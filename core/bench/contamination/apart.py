"""Scores of the items that were found in a corpus, apart from those of the others, and the figures
that tell whether a model has read the items of a task.

A corpus is searched by `sabia dedup --decontaminate`; its column `contamination` names the items.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sabia.core import page
from sabia.core.bench.contamination.figures import auc
from sabia.core.bench.result_summary import Summary, Table, summarise
from sabia.core.bench.score_rows import Score
from sabia.core.bench.statistics import Interval, finite, interval_text, mean_interval
from sabia.core.errors import BadData
from sabia.core.shards.inputs import from_path
from sabia.core.text.contamination.matching import ITEM

COLUMN = "contamination"
MIN_K, MIN_K_PLUS, GAP, CANARY = "min_k_nats", "min_k_plus_sd", "paraphrase_gap_bits", "canary_bits"
FIGURES = {MIN_K: "Min-K% (nats)", MIN_K_PLUS: "Min-K%++ (sd)",
           GAP: "paraphrase gap (bits a byte)", CANARY: "canary exposure (bits)"}  # fmt: skip
COLUMNS = ["task", "model", "metric", "in the corpus", "value [95 %]", "others", "value [95 %]",
           "all"]  # fmt: skip
FIGURE_COLUMNS = ["task", "model", "figure", "items", "mean [95 %]", "AUC"]
Marked = Mapping[str, frozenset[str]]  # task → ids of items in the corpus


def marked_items(paths: Sequence[str]) -> Marked:
    """The items that the documents of some files hold. BadData."""
    marked: dict[str, set[str]] = {}
    for path in paths:
        for source in from_path(path, "document", "--contaminated"):
            for batch in source.batches():
                if COLUMN not in batch.schema.names:
                    raise BadData(
                        f"{source.name}: no column {COLUMN} (expected documents of sabia dedup "
                        "--decontaminate, or those that it removed)"
                    )
                for text in batch.column(COLUMN).to_pylist():
                    for one in json.loads(text) if text else ():
                        if one["level"] == ITEM:
                            marked.setdefault(one["task"], set()).add(one["item"])
    return {task: frozenset(items) for task, items in marked.items()}


@dataclass(frozen=True)
class Apart:
    """A headline metric of one model on the items of a task in the corpus, on the others, and on
    all."""

    task: str
    model: str
    metric: str
    inside: tuple[int, Interval]
    outside: tuple[int, Interval]
    whole: Interval


@dataclass(frozen=True)
class Figure:
    """A figure of a model over the items of a task. auc: between items in the corpus and the
    others, None without one of these."""

    task: str
    model: str
    name: str
    items: int
    mean: Interval
    auc: float | None = None


def apart(scores: Iterable[Score], summary: Summary, marked: Marked) -> list[Apart]:
    """The scores of the tasks that have items in the corpus."""
    parts: dict[bool, list[Score]] = {True: [], False: []}
    for score in scores:
        if score.task in marked:
            parts[score.item_id in marked[score.task]].append(score)
    inside, outside = (summarise(parts[kind], summary.headlines) for kind in (True, False))
    made = []
    for task in summary.tasks:
        for model in summary.models if task in marked else ():
            name = summary.headlines[task]
            cells = [part.result(model, task, name) for part in (inside, outside, summary)]
            if all(cells):
                a, b, whole = (cell for cell in cells if cell)
                counts = (a.items, a.interval), (b.items, b.interval)
                made.append(Apart(task, model, name, *counts, whole.interval))
    return made


def figures(table: Table, marked: Marked) -> list[Figure]:
    """The means of the figures that the rows have."""
    made = []
    for task, by_model in table.items():
        of_task = marked.get(task, frozenset())
        for model, metrics in by_model.items():
            for name in (name for name in FIGURES if name in metrics):
                by_item = {item: value for (item, _), value in metrics[name].items()}
                inside = [value for item, value in by_item.items() if item in of_task]
                outside = [value for item, value in by_item.items() if item not in of_task]
                apart = auc(inside, outside) if inside and outside else None
                every = np.array(list(by_item.values()))
                made.append(Figure(task, model, name, len(every), mean_interval(every), apart))
    return made


def rows(made: Sequence[Apart]) -> list[list[str]]:
    """A row for each."""
    return [
        [one.task, one.model, one.metric, str(one.inside[0]), _text(one.inside[1]),
         str(one.outside[0]), _text(one.outside[1]), f"{one.whole.value:.4g}"]
        for one in made
    ]  # fmt: skip


def figure_rows(made: Sequence[Figure]) -> list[list[str]]:
    """A row for each."""
    return [
        [one.task, one.model, FIGURES[one.name], str(one.items), _text(one.mean),
         "" if one.auc is None else f"{one.auc:.3f}"]
        for one in made
    ]  # fmt: skip


def _text(i: Interval) -> str:
    known = math.isfinite(i.half_width)
    return interval_text(i, ".4g") if known else f"{i.value:.4g}"


def section(made: Sequence[Apart], of_items: Sequence[Figure]) -> str:
    """The section of the report."""
    parts = []
    if made:
        note = "In the corpus are the items that `sabia dedup --decontaminate` found in it."
        parts.append(page.table(COLUMNS, rows(made), note))
    if of_items:
        note = (
            "Min-K%, Min-K%++ and the gap (bits a byte of an item's paraphrases less those of the "
            "item) are higher for texts that a model has read; AUC is the share of pairs of an "
            "item in the corpus and another one in which the former has the higher figure. Compare "
            "with a model that has not read them. A canary that was read has many bits of "
            "exposure, another one on average 1.4."
        )
        parts.append(page.table(FIGURE_COLUMNS, figure_rows(of_items), note))
    return page.section("Contamination", parts)


def to_json(made: Sequence[Apart], of_items: Sequence[Figure]) -> dict[str, object]:
    """Both tables as plain data."""
    return {
        "apart": [
            {"task": one.task, "model": one.model, "metric": one.metric}
            | {f"{where}_{key}": value
               for where, (items, i) in (("corpus", one.inside), ("others", one.outside))
               for key, value in ({"items": items} | _ends(i)).items()}
            for one in made
        ],
        "figures": [
            {"task": one.task, "model": one.model, "figure": one.name, "items": one.items,
             **_ends(one.mean), "auc": one.auc}
            for one in of_items
        ],
    }  # fmt: skip


def _ends(i: Interval) -> dict[str, float | None]:
    return {name: value if name == "value" else finite(value) for name, value in i.ends.items()}
