"""Filters of YAML tasks: functions that turn the answers to an item into what is scored.

Each takes the answers to one item (a list, one for each repeat) and gives a list or one value, as
in lm-evaluation-harness 0.4.13.
"""

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sabia.core.bench.harness.yaml_file import FilterSettings, YamlTask
from sabia.core.errors import BadData, UsageError

NUMBER = r"#### (\-?[0-9\.\,]+)"
INVALID = "[invalid]"
Filter = Callable[[Any, Mapping[str, Any]], Any]  # (answers, row) → answers, or one value


def regex(regex_pattern: str = NUMBER, group_select: int = 0, fallback: str = INVALID) -> Filter:
    """The match of that number, of several groups the first that is not empty."""
    pattern = re.compile(regex_pattern)

    def extract(text: object) -> str:
        matches = pattern.findall(text if isinstance(text, str) else "")
        match = _text(matches[group_select]) if matches else None
        return fallback if match is None else match.strip()

    return lambda answers, _: [extract(text) for text in answers]


def _text(match: str | tuple[str, ...]) -> str | None:
    """A match's text, its first group that is not empty, or None if all are."""
    if isinstance(match, tuple):
        return next(filter(None, match), None)
    return match


def multi_choice_regex(
    regex_pattern: str = NUMBER,
    group_select: int = 0,
    fallback: str = INVALID,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    regexes_to_ignore: Sequence[str] | None = None,
) -> Filter:
    """The letter of a choice: by the pattern, else by the choice's text, else by `: A`."""
    pattern = re.compile(regex_pattern)

    def plain(text: str) -> str:
        for ignored in regexes_to_ignore or ():
            text = re.sub(ignored, "", text)
        text = text.lower() if ignore_case else text
        return text.translate(_punctuation()) if ignore_punctuation else text

    def extract(by: re.Pattern[str], text: str, letters: Mapping[str, str]) -> str:
        matches = by.findall(text)
        match = (_text(matches[group_select]) or "").strip() if matches else ""
        return letters.get(match, match)

    def apply(answers: Sequence[object], row: Mapping[str, Any]) -> list[str]:
        choices = [plain(choice.strip()) for choice in row["choices"]]
        letters = [chr(ord("A") + number) for number in range(len(choices))]
        # the longest first: a choice may begin with another one
        either = "|".join(sorted(map(re.escape, choices), key=len, reverse=True))
        texts, labels = re.compile(either), re.compile(rf":[\s]*({'|'.join(letters)})")
        of_text = {text: f"({a})" for text, a in zip(choices, letters, strict=True)}
        of_label = {a: f"({a})" for a in letters}
        strings = [text if isinstance(text, str) else "" for text in answers]
        return [
            extract(pattern, text, {})
            or extract(texts, plain(text), of_text)
            or extract(labels, text, of_label)
            or fallback
            for text in strings
        ]

    return apply


@lru_cache(maxsize=1)
def _punctuation() -> dict[int, None]:
    every = range(sys.maxunicode)
    return dict.fromkeys(i for i in every if unicodedata.category(chr(i)).startswith("P"))


def take_first_k(k: int) -> Filter:
    """The first k answers."""

    def apply(answers: Sequence[object], _: Mapping[str, Any]) -> Any:
        if len(answers) < k:
            raise BadData(f"filter take_first_k: {len(answers)} answers for k = {k} (see repeats)")
        return answers[:k]

    return apply


def mapped(mapping_dict: Mapping[Any, Any] | None = None, default_value: object = None) -> Filter:
    """The value of each answer in a table."""
    table = mapping_dict or {}
    return lambda answers, _: [table.get(text, default_value) for text in answers]


def each(change: Callable[[str], str]) -> Callable[[], Filter]:
    """A filter that changes each answer."""
    return lambda: lambda answers, _: [change(text) for text in answers]


FILTERS: dict[str, Callable[..., Filter]] = {
    "regex": regex,
    "multi_choice_regex": multi_choice_regex,
    "take_first": lambda: lambda answers, _: answers[0],
    "take_first_k": take_first_k,
    "majority_vote": lambda: lambda answers, _: [Counter(answers).most_common(1)[0][0]],
    "map": mapped,
    "remove_whitespace": each(str.strip),
    "lowercase": each(str.lower),
    "uppercase": each(str.upper),
}


def pipelines(task: YamlTask) -> dict[str, Filter]:
    """The filters of a task by name. UsageError for one that is not known."""
    return {settings.name: _pipeline(settings, task.path) for settings in task.filter_list}


def _pipeline(settings: FilterSettings, path: str) -> Filter:
    steps = []
    for name, given in settings.steps:
        where = f"{path}: filter {settings.name}"
        if name not in FILTERS:
            raise UsageError(f"{where}: function {name!r} (expected {', '.join(FILTERS)})")
        try:
            steps.append(FILTERS[name](**given))
        except (TypeError, re.error) as error:
            raise UsageError(f"{where}: {name}: {error}") from error

    def apply(answers: object, row: Mapping[str, Any]) -> Any:
        try:
            for step in steps:
                answers = step(answers, row)
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise BadData(f"{path}: filter {settings.name}: {error!r}") from error
        return answers

    return apply
