"""How much of a model's quality another one keeps, by task and capability, the worst first.

A share is the mean of the made model by that of the original (for metrics where less is better, the
other way round). Next to it is the noise: how far the original itself is from its mean with other
seeds. A capability is the mean of the headline shares of its tasks.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sabia.core import page
from sabia.core.bench.gate import Scores
from sabia.core.bench.metrics import metric_of
from sabia.core.bench.result_summary import Summary

COLUMNS = ("what", "metric", "original", "made", "kept", "noise of the original", "items")


@dataclass(frozen=True)
class Recovery:
    """A task, or a capability, of two models.

    kind: "task", "capability", or "mean of" all tasks. before, after: means of the original and of
    the made model. kept: the share of the original's quality, NaN where the original has none.
    noise: the difference of the original to itself with other seeds, as a share of its mean; NaN
    where it is not known.
    """

    kind: str
    name: str
    metric: str
    before: float
    after: float
    kept: float
    noise: float
    items: int


def recoveries(
    summary: Summary, scores: Scores, original: str, again: str, made: str
) -> list[Recovery]:
    """Of all tasks and capabilities, the worst first. again: the original with other seeds."""
    shares: list[Recovery] = []
    for task, name in summary.headlines.items():
        before, after = (summary.result(model, task) for model in (original, made))
        if before is None or after is None:
            continue
        gap = scores.of_task(task, name, original, again)
        values = before.interval.value, after.interval.value
        less = not metric_of(name).higher_is_better
        noise = gap.value if gap else None
        shares.append(_recovery("task", task, name, values, noise, after.items, less))
    tasks = {one.name: one for one in shares}
    means = [
        ("capability", name, by_model, [t for t, of in scores.capabilities.items() if of == name])
        for name, by_model in summary.capabilities.items()
    ]
    if summary.overall and len(tasks) > 1:
        means.append(("mean of", "all tasks", summary.overall, [*tasks]))
    for kind, name, by_model, named in means:
        if original not in by_model or made not in by_model:
            continue
        own = [tasks[task] for task in named]
        gaps = [scores.of_task(one.name, one.metric, original, again) for one in own]
        known = [gap.value for gap in gaps if gap]
        values = by_model[original].value, by_model[made].value
        noise = sum(known) / len(own) if known else None
        items = sum(one.items for one in own)
        shares.append(_recovery(kind, name, "", values, noise, items))
    return sorted(shares, key=lambda one: math.inf if math.isnan(one.kept) else one.kept)


def _recovery(
    kind: str, name: str, metric: str, values: tuple[float, float], noise: float | None,
    items: int, less: bool = False,
) -> Recovery:  # fmt: skip
    before, after = values
    top, bottom = (before, after) if less else (after, before)
    kept = top / bottom if bottom > 0 else math.nan
    share = abs(noise) / before if noise is not None and before > 0 else math.nan
    return Recovery(kind, name, metric, before, after, kept, share, items)


def rows(shares: Sequence[Recovery]) -> list[list[str]]:
    """A row for each, the worst first."""
    return [
        [
            f"{one.kind} {one.name}", one.metric, f"{one.before:.4g}", f"{one.after:.4g}",
            "" if math.isnan(one.kept) else f"{one.kept:.1%}",
            "" if math.isnan(one.noise) else f"{one.noise:.1%}", str(one.items),
        ]
        for one in shares
    ]  # fmt: skip


def section(shares: Sequence[Recovery], seeds: int) -> str:
    """The section of a page."""
    note = (
        f"Sampled answers are scored with {seeds} seeds, the same for both models; noise is the "
        "difference of the original to itself with as many other seeds, empty where seeds change "
        "nothing."
    )
    parts = [page.table(COLUMNS, rows(shares)), page.paragraph(note, True)]
    return page.section("Recovery, worst first", parts)


def to_json(shares: Sequence[Recovery]) -> list[dict[str, Any]]:
    """Records; what is not known is None."""
    return [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(one).items()
        }
        for one in shares
    ]
