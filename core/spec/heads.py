"""Heads after the final norm, as data: the transform of encoders, and the head of classifiers.

The head of a language model is a matrix over the vocabulary (core.spec.model). An encoder has a
transform before it (BERT, arXiv 1810.04805); a classifier has a matrix over its labels instead and
reads one vector of each document: that of the first token, of the last token, or the mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sabia.core.errors import UsageError
from sabia.core.spec.layers import Activation
from sabia.core.spec.tensors import TableRow

Pooling = Literal["cls", "mean", "last"]
Problem = Literal["regression", "single_label_classification", "multi_label_classification"]
SUFFIX = "ForSequenceClassification"
_ENDINGS = ("ForCausalLM", "ForMaskedLM", SUFFIX)


@dataclass(frozen=True)
class Transform:
    """norm(activation(dense(x))) of the residual stream's width."""

    activation: Activation
    bias: bool = False

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""
        bias = TableRow("transform_bias", (width,), ("transform",), "head", "zeros")
        return (
            TableRow("transform", (width, width), ("transform", "embed"), "head"),
            *(bias,) * self.bias,
            TableRow("transform_norm", (width,), ("embed",), "norm", "ones"),
        )


@dataclass(frozen=True)
class ClassifierHead:
    """Scores of `labels` labels from one vector per document, pooled from its tokens."""

    labels: int
    pooling: Pooling
    bias: bool = False

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""
        bias = TableRow("classifier_bias", (self.labels,), ("label",), "head", "zeros")
        weight = TableRow("classifier", (self.labels, width), ("label", "embed"), "head")
        return (weight, *(bias,) * self.bias)


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is of a sequence classifier."""
    return str((config.get("architectures") or [""])[0]).endswith(SUFFIX)


def label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a classifier's labels in the order of its scores."""
    named = config.get("id2label")
    if not named:
        return tuple(f"LABEL_{n}" for n in range(int(config.get("num_labels") or 2)))
    by_number = {int(number): str(name) for number, name in named.items()}
    if sorted(by_number) != list(range(len(by_number))):
        raise UsageError(f"config.json: id2label names {sorted(by_number)} (expected 0, 1, …)")
    return tuple(by_number[n] for n in range(len(by_number)))


def problem_of(config: Mapping[str, Any]) -> Problem:
    """The loss that a classifier was trained with; without the field, by the number of labels."""
    problem = config.get("problem_type")
    if problem is None:
        return "regression" if len(label_names(config)) == 1 else "single_label_classification"
    if problem not in get_args(Problem):
        known = ", ".join(get_args(Problem))
        raise UsageError(f"config.json: problem_type is {problem!r} (expected one of {known})")
    return problem


def classifier_config(
    config: Mapping[str, Any], labels: tuple[str, ...], problem: Problem, pad_id: int | None
) -> dict[str, object]:
    """The configuration of a classifier with the body of a model; pad_id: used if it has none."""
    architecture = str((config.get("architectures") or [""])[0])
    ending = next((end for end in _ENDINGS if architecture.endswith(end)), None)
    if ending is None or "text_config" in config:
        raise UsageError(
            f"config.json: architectures is {architecture!r} (expected {', '.join(_ENDINGS)} of "
            "a text-only model)"
        )
    pad = config.get("pad_token_id")
    return {
        **{key: value for key, value in config.items() if key != "num_labels"},
        "architectures": [architecture.removesuffix(ending) + SUFFIX],
        "id2label": {str(number): name for number, name in enumerate(labels)},
        "label2id": {name: number for number, name in enumerate(labels)},
        "problem_type": problem,
        "pad_token_id": pad_id if pad is None else pad,
    }
