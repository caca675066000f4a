"""Scores of YAML tasks: what lm-evaluation-harness computes of log-likelihoods and answers.

A row is named after its metric, and after the filter too unless that is the one called `none`.
"""

import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from sabia.core.bench.answers import QUESTION_CHARACTERS, Answer, detail_of
from sabia.core.bench.corpus_metrics import TRANSLATION, translation_statistics
from sabia.core.bench.harness.filters import pipelines
from sabia.core.bench.harness.yaml_file import DEFAULT_METRICS, YamlTask
from sabia.core.bench.items import Item
from sabia.core.bench.metrics import LOGLIKELIHOOD, best_choices
from sabia.core.bench.score_rows import Score, scores_of
from sabia.core.bench.task import Task
from sabia.core.errors import BadData, UsageError

OF_CHOICES = ("acc_bytes", "acc_mutual_info", "exact_match", "brier_score", "f1", "mcc")
METRICS_OF_OUTPUT = DEFAULT_METRICS | {
    "multiple_choice": (*DEFAULT_METRICS["multiple_choice"], *OF_CHOICES),
    "generate_until": (*DEFAULT_METRICS["generate_until"], *TRANSLATION),
}
AGGREGATIONS = {
    "perplexity": "perplexity",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
    "brier_score": "brier_score",
    "f1": "f1",
    "mcc": "matthews_corrcoef",
    **{name: name for name in TRANSLATION},
}
LOWER_IS_BETTER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte",
                   "brier_score", "ter")  # fmt: skip
OF_ENTRIES = ("aggregation", "higher_is_better")  # settings of metric_list that any metric has
IGNORED = ("regexes_to_ignore", "ignore_case", "ignore_punctuation", "ignore_numbers")
Pair = tuple[float, bool]  # log-likelihood (nats), whether greedy decoding gives the text


def check_metrics(task: YamlTask) -> None:
    """Refuse metrics, settings and filters that cannot be honoured. UsageError."""
    known = METRICS_OF_OUTPUT[task.output_type]
    for metric in task.metric_list:
        where = f"{task.path}: metric {metric.name}"
        if metric.name not in known or metric.function:
            what = f"is not one of output_type {task.output_type} ({', '.join(known)})"
            raise UsageError(f"{where} {what}")
        wanted = AGGREGATIONS.get(metric.name, "mean")
        if metric.settings.get("aggregation", wanted) != wanted:
            given = metric.settings["aggregation"]
            raise UsageError(f"{where}: aggregation {given} is not supported (expected {wanted})")
        higher = metric.name not in LOWER_IS_BETTER
        if metric.settings.get("higher_is_better", higher) is not higher:
            raise UsageError(f"{where}: higher_is_better is {str(higher).lower()}")
        generated = task.output_type == "generate_until"
        for key in metric.settings:
            of_metric = IGNORED if metric.name == "exact_match" and generated else ()
            if key not in (*OF_ENTRIES, *of_metric):
                raise UsageError(f"{where}: {key} is not supported")
    filters = pipelines(task)
    if task.output_type != "generate_until" and len(filters) * len(task.filter_list[0].steps) > 1:
        raise UsageError(f"{task.path}: filter_list: several filters of log-likelihoods")
    if task.output_type != "generate_until" and task.filter_list[0].steps[0][0] != "take_first":
        raise UsageError(f"{task.path}: filter_list: log-likelihoods can only be taken first")


def needs_greedy(task: YamlTask) -> bool:
    """Whether a metric asks if greedy decoding gives a continuation."""
    wanted = {"loglikelihood": "acc", "multiple_choice": "exact_match"}.get(task.output_type)
    return wanted in task.metrics


def named(metric: str, filter_name: str) -> str:
    """The name of score rows. The harness' f1 is that of the choice 1 of two."""
    metric = "binary_f1" if metric == "f1" else metric
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def score_pairs(task: Task, model: str, item: Item, scored: Sequence[Pair]) -> list[Score]:
    """Rows of an item from the log-likelihoods of its pairs."""
    settings = _settings(task)
    nats, greedy = [pair[0] for pair in scored], [pair[1] for pair in scored]
    detail: dict[str, Any] = {"loglikelihoods": nats, "answer": item.gold}
    if needs_greedy(settings):
        detail["greedy"] = greedy
    detail["question"] = item.question[-QUESTION_CHARACTERS:]
    if settings.output_type == "loglikelihood":
        values = {"acc": float(greedy[0])} if "acc" in settings.metrics else {}
        if "perplexity" in settings.metrics:
            values |= {LOGLIKELIHOOD: nats[0], "targets": 1.0}
    else:
        values = _of_choices(settings, item, nats, greedy)
    shown = {
        name if name in (LOGLIKELIHOOD, "targets") else named(name, settings.filter_list[0].name): v
        for name, v in values.items()
    }
    return scores_of(model, task.name, item.id, 0, shown, detail)


def _of_choices(
    task: YamlTask, item: Item, nats: Sequence[float], greedy: Sequence[bool]
) -> dict[str, float]:
    count = len(item.choices)
    right = right_choices(item)
    best = best_choices(nats[:count], item.choices)
    if len(nats) == 2 * count:
        gains = np.array(nats[:count]) - np.array(nats[count:])
        best["acc_mutual_info"] = int(np.argmax(gains))
    values = {name: float(best[name] in right) for name in task.metrics if name in best}
    if "exact_match" in task.metrics:
        values["exact_match"] = float(any(greedy[index] for index in right))
    if "brier_score" in task.metrics:
        if len(right) != 1:
            raise BadData(f"{task.task}, item {item.id}: brier_score needs one right choice")
        probabilities = np.exp(np.array(nats[:count]) - max(nats[:count]))
        off = probabilities / probabilities.sum() - np.eye(count)[right[0]]
        values["brier_score"] = float(off @ off)
    for name in (name for name in ("f1", "mcc") if name in task.metrics):
        if len(right) != 1 or (name == "f1" and count != 2):
            least = "one right choice of two" if name == "f1" else "one right choice"
            raise BadData(f"{task.task}, item {item.id}: {name} needs {least}")
        row = named(name, "none")
        values |= {f"{row}.0": float(right[0]), f"{row}.1": float(np.argmax(nats[:count]))}
    return values


def right_choices(item: Item) -> list[int]:
    """Indices of the right choices; none where the answer is not one of them."""
    golds = item.gold if isinstance(item.gold, list) else [item.gold]
    choices = list(item.choices)
    indices = [choices.index(g) if isinstance(g, str) and g in choices else g for g in golds]
    return [int(g) for g in indices if isinstance(g, int) and 0 <= g < len(choices)]


def score_answers(task: Task, model: str, pairs: Sequence[tuple[Item, Answer]]) -> list[Score]:
    """Rows of items from their answers, through each filter of the task."""
    settings = _settings(task)
    filters = pipelines(settings)
    of_item: dict[str, list[tuple[Item, Answer]]] = {}
    for item, answer in pairs:
        of_item.setdefault(item.id, []).append((item, answer))
    rows: list[Score] = []
    for given in of_item.values():
        item, first = given[0]
        texts = [answer.text for _, answer in given]
        # greedy answers are all the same, and are generated once
        answers = texts * settings.repeats if len(texts) == 1 else texts
        values, results = dict[str, float](), dict[str, Any]()
        for name, apply in filters.items():
            results[name] = apply(answers, item.fields)
            for metric, value in _of_answer(settings, item, results[name]).items():
                values[named(metric, name)] = value
        detail = detail_of(item, first, {"answer": item.gold, "filtered": results})
        if len(texts) > 1:
            detail["responses"] = texts
        rows += scores_of(model, task.name, item.id, 0, values, detail)
    return rows


def _of_answer(task: YamlTask, item: Item, result: object) -> dict[str, float]:
    gold = item.gold
    if item.choices:
        gold = item.choices[int(gold)]
    several = isinstance(gold, list)
    golds = gold if several else [gold]
    answers = result if isinstance(result, list) else [result]
    values: dict[str, float] = {}
    for metric in task.metric_list:
        if metric.name in TRANSLATION:
            if len(answers) != 1:
                raise BadData(f"{task.task}: {metric.name} of {len(answers)} answers to an item")
            parts = translation_statistics(metric.name, str(answers[0]), [str(g) for g in golds])
            values |= {f"{metric.name}.{number}": part for number, part in enumerate(parts)}
            continue
        ignored = {key: value for key, value in metric.settings.items() if key in IGNORED}
        given, wanted = ([_compared(one, **ignored) for one in texts] for texts in (answers, golds))
        equal = [one == other for one in given for other in wanted]
        values[metric.name] = float(any(equal)) if several else sum(equal) / len(equal)
    return values


def _compared(
    value: object, regexes_to_ignore: Sequence[str] | None = None, ignore_case: bool = False,
    ignore_punctuation: bool = False, ignore_numbers: bool = False,
) -> str:  # fmt: skip
    """An answer or a reference without what exact_match ignores."""
    text = str(value)
    for pattern in regexes_to_ignore or ():
        text = re.sub(pattern, "", text)
    text = text.lower() if ignore_case else text
    marks = string.punctuation * ignore_punctuation + string.digits * ignore_numbers
    return text.translate(str.maketrans("", "", marks))


def _settings(task: Task) -> YamlTask:
    assert task.yaml is not None, "only called for YAML tasks"
    return task.yaml
