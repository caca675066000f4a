"""Metrics of one answer, and how the values of items are aggregated over a task.

multiple_choice: `acc` is 1 if the right choice has the greatest summed log-likelihood,
`acc_norm` the same after division by the choice's characters (Python's, without the delimiter),
`acc_bytes` by its UTF-8 bytes; the first of equals wins. exact_match: 1 if the extracted,
normalised answer passes the verifier; `f1` compares its words with those of the reference answer,
`f1_macro` is the mean of the F1 of each label, `pearson` the correlation with the reference number.
rubric: `share` of the positive points, or the `points`; `refusal` and `over_refusal` are the share
of a rubric that asks for refusals of harmful and of harmless requests, `win_rate` is that of the
comparisons with other models. `conversation` is 1 if all turns of one are right. perplexity: sums
over documents, so that a task's value is a ratio of sums. The names and definitions of acc,
acc_norm, acc_bytes and the perplexities follow lm-evaluation-harness.
"""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sabia.core.bench.corpus_metrics import CORPUS
from sabia.core.bench.statistics import finite
from sabia.core.bench.task import Task
from sabia.core.errors import BadData
from sabia.core.judge.bounded_regex import PastLimitError, find
from sabia.core.judge.verifiers import explained_all
from sabia.core.sandbox.isolated import Tested

Aggregate = Literal["mean", "sum", "ratio", "corpus"]
LN2 = math.log(2)


@dataclass(frozen=True)
class Metric:
    """How a metric is reported.

    ratio metrics are transform(-Σ loglikelihood_nats / Σ `per`), from the rows of those names;
    corpus metrics are those of `corpus_metrics`, from the rows of `parts`.
    A name may be followed by that of a filter, as in `exact_match,strict`.
    """

    name: str
    unit: str
    aggregate: Aggregate = "mean"
    higher_is_better: bool = True
    per: str = ""
    transform: Callable[[float], float] = float

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the rows that a corpus metric is made of."""
        name, comma, filtered = self.name.partition(",")
        count = CORPUS[name].parts if self.aggregate == "corpus" else 0
        return tuple(f"{name}.{number}{comma}{filtered}" for number in range(count))


METRICS = {
    metric.name: metric
    for metric in (
        *(Metric(name, "share") for name in ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")),
        *(Metric(name, "share") for name in ("exact_match", "f1", "share", "conversation")),
        Metric("refusal", "share"),
        Metric("over_refusal", "share", "mean", False),
        Metric("win_rate", "share"),
        Metric("points", "points", "sum"),
        Metric("bits_per_byte", "bits per byte", "ratio", False, "bytes", lambda nats: nats / LN2),
        Metric("byte_perplexity", "perplexity", "ratio", False, "bytes", math.exp),
        Metric("word_perplexity", "perplexity", "ratio", False, "words", math.exp),
        Metric("token_perplexity", "perplexity", "ratio", False, "tokens", math.exp),
        Metric("perplexity", "perplexity", "ratio", False, "targets", math.exp),
        Metric("brier_score", "score", "mean", False),
        Metric("checks", "share", "corpus"),
        *(Metric(name, "score", "corpus") for name in ("bleu", "chrf", "chrf++")),
        Metric("ter", "score", "corpus", False),
        *(Metric(name, "score", "corpus") for name in ("binary_f1", "mcc", "f1_macro", "pearson")),
    )
}


def is_known(name: str) -> bool:
    """Whether a metric, with or without a filter, is one of METRICS."""
    return name.partition(",")[0] in METRICS


def metric_of(name: str) -> Metric:
    """The metric of score rows of a name; one without a unit if it is not known."""
    return replace(METRICS.get(name.partition(",")[0], Metric("", "")), name=name)


LOGLIKELIHOOD = "loglikelihood_nats"
MAXIMUM = "maximum_points"
# 1 for an item without a verdict, or without an answer: it has no score, and not a score of 0
NO_VERDICT, NO_ANSWER = "no_verdict", "no_answer"


def choice_scores(
    loglikelihoods: Sequence[float], choices: Sequence[str], answer: int
) -> dict[str, float]:
    """acc, acc_norm and acc_bytes of one item from its choices' summed log-likelihoods (nats)."""
    chosen = best_choices(loglikelihoods, choices)
    return {name: float(best == answer) for name, best in chosen.items()}


def best_choices(loglikelihoods: Sequence[float], choices: Sequence[str]) -> dict[str, int]:
    """The choice with the greatest score in acc, acc_norm and acc_bytes."""
    total = np.asarray(loglikelihoods, float)
    characters = np.array([max(len(choice), 1) for choice in choices])
    sizes = np.array([max(len(choice.encode()), 1) for choice in choices])
    measured = {"acc": total, "acc_norm": total / characters, "acc_bytes": total / sizes}
    return {name: int(np.argmax(scores)) for name, scores in measured.items()}


def document_sums(text: str, loglikelihood: float, tokens: int) -> dict[str, float]:
    """The sums of a document from which perplexities are computed; words split at white space."""
    return {
        LOGLIKELIHOOD: loglikelihood,
        "bytes": float(len(text.encode())),
        "words": float(len(re.split(r"\s+", text))),
        "tokens": float(tokens),
    }


def extracted(task: Task, text: str) -> str | None:
    """The answer by the task's pattern (its group 1, if it has one); None without a match."""
    if not task.extract:
        return text.strip()
    match = find(task.extract, text, task.extract_pick)
    if match is None:
        return None
    whole, group = match
    return (whole if group is None else group).strip()


def normalised(task: Task, text: str) -> str:
    """NFC and single spaces, then the normalizations of the task, in their order."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    for name in task.normalize:
        text = _NORMALIZERS[name](text)
    return text


def _without_accents(text: str) -> str:
    apart = unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", "".join(c for c in apart if not unicodedata.combining(c)))


def _without_punctuation(text: str) -> str:
    marks = set(string.punctuation)
    kept = "".join(c for c in text if c not in marks and unicodedata.category(c)[0] != "P")
    return " ".join(kept.split())


def _without_articles(text: str) -> str:
    """Without the articles of Portuguese, as PoETa and MKQA compare answers."""
    return " ".join(re.sub(r"\b(?:o|a|os|as|um|uma|uns|umas)\b", " ", text).split())


_NORMALIZERS: dict[str, Callable[[str], str]] = {
    "case": str.casefold,
    "punctuation": _without_punctuation,
    "accents": _without_accents,
    "articles": _without_articles,
    "digit_groups": lambda text: re.sub(r"(?<=\d)[,\u00a0\u202f](?=\d{3}(?!\d))", "", text),
}


@dataclass(frozen=True)
class Match:
    """The score of an answer, None without a verdict, and why it is below 1, where that is known.

    extracted: the part of the text that was compared, None without a match of the pattern.
    """

    score: float | None
    extracted: str | None
    reason: str = ""

    def graded(self, tested: Tested) -> "Match":
        """With what the verifier says."""
        score = None if tested.passed is None else float(tested.passed)
        return Match(score, self.extracted, tested.detail)


def exact_matches(task: Task, pairs: Sequence[tuple[str, str]]) -> list[Match]:
    """The scores 1 or 0 of (generated text, reference answer) pairs, in their order.

    There is no score if a regular expression passes its time limit or a program cannot be tested.
    Programs are compared as they are: white space counts.
    """
    matches: list[Match] = []
    compared: list[tuple[str, str]] = []
    for text, answer in pairs:
        try:
            part = text if task.verifier == "code" and not task.extract else extracted(task, text)
            matches.append(Match(None if part is not None else 0.0, part))
        except PastLimitError:
            matches.append(Match(None, None, "extract: past the limit of time"))
        if (part := matches[-1].extracted) is not None:
            compared.append((_compared(task, part), _compared(task, answer)))
    graded = iter(explained_all(task.verifier, compared))
    return [match if match.extracted is None else match.graded(next(graded)) for match in matches]


def _compared(task: Task, text: str) -> str:
    return text if task.verifier == "code" else normalised(task, text)


def word_f1(task: Task, extracted_text: str | None, answer: str) -> float:
    """Harmonic mean of precision and recall of the words, with repeats, of an extracted answer."""
    given, wanted = (normalised(task, text).split() for text in (extracted_text or "", answer))
    if not given or not wanted:
        return float(given == wanted and extracted_text is not None)
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted))


def label_statistics(task: Task, extracted_text: str | None, answer: str) -> dict[str, float]:
    """What an answer contributes: to f1_macro the indices of the right and of the given answer
    among the labels, after the last for another; to pearson the two numbers, or the ends of the
    scale, the highest and the lowest, where none is given. BadData for a reference of neither."""
    given = extracted_text or ""
    if task.metric == "pearson":
        right, number = finite(answer), finite(given)
        if right is None:
            raise BadData(f"{task.name}: answer {answer!r:.40} (expected a number for pearson)")
        ends = [float(label) for label in task.labels]
        pair = (right, number) if number is not None else (max(ends), min(ends))
    else:
        indices = {normalised(task, label): index for index, label in enumerate(task.labels)}
        if (index := indices.get(normalised(task, answer))) is None:
            raise BadData(f"{task.name}: answer {answer!r:.40} is none of the labels")
        pair = (index, indices.get(normalised(task, given), len(indices)))
    return {f"{task.metric}.{number}": float(part) for number, part in enumerate(pair)}
