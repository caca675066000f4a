"""The items of each task with all answers, to be opened one by one, without a script.

Of each item the first sample of each model is shown. The section takes at most CHARACTERS; long
texts are cut in the middle, and how many items are left out is said.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sabia.core import page
from sabia.core.bench.metrics import NO_ANSWER, NO_VERDICT
from sabia.core.bench.score_rows import Score

CHARACTERS = 400_000
TEXT = 700  # characters of a question or an answer
SHOWN = ("response", "chosen", "judgment")
Item = dict[str, tuple[float | None, Mapping[str, Any]]]  # by model: headline value, detail


def items_of(scores: Iterable[Score], headlines: Mapping[str, str]) -> dict[str, dict[str, Item]]:
    """The items of each task by id, with what each model has on them."""
    tasks: dict[str, dict[str, Item]] = {}
    for score in scores:
        if score.sample:
            continue
        item = tasks.setdefault(score.task, {}).setdefault(score.item_id, {})
        value, detail = item.get(score.model, (None, {}))
        if score.metric == headlines.get(score.task):
            value = score.value
        item[score.model] = (value, score.detail or detail)
    return tasks


def section(scores: Iterable[Score], headlines: Mapping[str, str]) -> list[str]:
    """The section, none without details."""
    parts: list[str] = []
    left = CHARACTERS
    for task, items in items_of(scores, headlines).items():
        shown = []
        for name, item in items.items():
            if not any(detail for _, detail in item.values()):
                continue
            text = _item(name, item)
            if len(text) > left:
                break
            left -= len(text)
            shown.append(text)
        if shown:
            more = f", {len(items) - len(shown)} more are not shown" * (len(items) > len(shown))
            title = page.text(f"{task}: {len(shown)} items{more}")
            parts.append(f"<details><summary>{title}</summary>{''.join(shown)}</details>")
    return [page.section("Items", parts)] if parts else []


def _item(name: str, item: Item) -> str:
    values = {model: _value(value, detail) for model, (value, detail) in item.items()}
    details = [detail for _, detail in item.values() if detail]
    question = next((str(d["question"]) for d in details if d.get("question")), "")
    lines = [question] if question else []
    answers = (d["answer"] for d in details if d.get("answer") is not None)
    lines += [f"— right answer: {answer}" for answer in list(answers)[:1]]
    for model, (_, detail) in item.items():
        lines.append(f"— {model} ({values[model]}): {_answer(detail)}")
    title = f"{name}: {', '.join(map(' '.join, values.items()))}"
    text = page.preformatted("\n".join(map(_cut, lines)))
    return f"<details><summary>{page.text(title)}</summary>{text}</details>"


def _value(value: float | None, detail: Mapping[str, Any]) -> str:
    if value is not None:
        return f"{value:.3g}"
    return "no answer" if detail.get(NO_ANSWER) else "no score"


def _answer(detail: Mapping[str, Any]) -> str:
    texts = [str(detail[name]).strip() for name in SHOWN if detail.get(name)]
    texts += [
        f"call {made.get('tool')}: {made.get('arguments')} → {made.get('result')}"
        for made in detail.get("calls", ())
    ]
    return "\n".join(texts) or str(detail.get(NO_ANSWER) or detail.get(NO_VERDICT) or "")


def _cut(text: str) -> str:
    if len(text) <= TEXT:
        return text
    return f"{text[: TEXT // 2]} … {text[-TEXT // 2 :]}"
