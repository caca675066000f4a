"""Heads behind the last norm, as data: what encoders do before they score, and classifiers.

A language model's own head is a matrix over the vocabulary (core.spec.model). An encoder puts a
transform in front of it (BERT, arXiv 1810.04805); a classifier has a matrix over its labels in its
place and reads one vector of each document: the first token's, the last one's, or the mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sabia.core.errors import UsageError
from sabia.core.spec.layers import Activation
from sabia.core.spec.tensors import Row

Pooling = Literal["cls", "mean", "last"]
Problem = Literal["regression", "single_label_classification", "multi_label_classification"]
SUFFIX = "ForSequenceClassification"
_MADE_OF = ("ForCausalLM", "ForMaskedLM", SUFFIX)


@dataclass(frozen=True)
class Transform:
    """norm(activation(dense(x))) of the residual stream's width."""

    activation: Activation
    bias: bool = False

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`."""
        bias = Row("transform_bias", (width,), ("transform",), "head", "zeros")
        return (
            Row("transform", (width, width), ("transform", "embed"), "head"),
            *(bias,) * self.bias,
            Row("transform_norm", (width,), ("embed",), "norm", "ones"),
        )


@dataclass(frozen=True)
class Classifier:
    """Scores of `labels` labels from one vector a document, pooled from its tokens."""

    labels: int
    pooling: Pooling
    bias: bool = False

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`."""
        bias = Row("classifier_bias", (self.labels,), ("label",), "head", "zeros")
        weight = Row("classifier", (self.labels, width), ("label", "embed"), "head")
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
    """What a classifier was trained for; by the number of labels where the file does not say."""
    said = config.get("problem_type")
    if said is None:
        return "regression" if len(label_names(config)) == 1 else "single_label_classification"
    if said not in get_args(Problem):
        known = ", ".join(get_args(Problem))
        raise UsageError(f"config.json: problem_type is {said!r} (expected one of {known})")
    return said


def classifier_config(
    config: Mapping[str, Any], labels: tuple[str, ...], problem: Problem, pad_id: int | None
) -> dict[str, Any]:
    """The configuration of a classifier made of a model's; pad_id: where the model names none."""
    architecture = str((config.get("architectures") or [""])[0])
    ending = next((end for end in _MADE_OF if architecture.endswith(end)), None)
    if ending is None or "text_config" in config:
        raise UsageError(
            f"config.json: architectures is {architecture!r} (expected {', '.join(_MADE_OF)} of "
            "texts alone, of which a classifier can be made)"
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
