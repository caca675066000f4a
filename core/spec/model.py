"""ModelSpec: a model as frozen data, and its ordered table of tensors.

Two specs are equal when they compute the same function of equally named tensors; the original
`config` is kept for export and is not compared, so a spec can be a dictionary key or a static
argument of a compiled function.

Heads after the final norm: that of a language model is a matrix over the vocabulary. An encoder has
a transform before it (BERT, arXiv 1810.04805); a classifier has a matrix over its labels instead
and reads one vector of each document: that of the first token, of the last token, or the mean.

Counts are of parameters, active parameters, and training FLOPs per token.
training_flops_per_token = 6·N_mm + c·12·Σ_layers min(s, window)·(score width)/2 with N_mm the
active matrix elements without the input lookup and c by convention: `6nd` 0, `palm` 1 (PaLM,
arXiv 2204.02311 appendix B), `causal` ½ (half of the score matrix is masked; an encoder has no
mask, and its windows extend to both sides). A gated delta net adds 6·3·(state elements) per token
under both of these, for any length. A tied embedding counts once as a parameter and once as the
head's matrix.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from sabia.core.errors import UsageError
from sabia.core.spec.layers import Activation, Experts, GatedDeltaNet, Layer, Mixer, NormKind
from sabia.core.spec.rope import Rope
from sabia.core.spec.tensors import (
    FileName,
    FileTemplate,
    FusedPart,
    InitKind,
    TableRow,
    TensorSpec,
)

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


@dataclass(frozen=True)
class ModelSpec:
    """A decoder or an encoder: embedding, layers, final norm, head.

    embed_scale: factor of the embeddings (Gemma: sqrt(hidden_size)). logit_scale: of the states
    that the language-model head reads (MiniCPM).
    logit_softcap: cap·tanh(logits/cap). norm_offset: added to the final norm's weights.
    causal: a token attends to itself and earlier tokens only. norm_kind: of the norms of the
    residual stream; embed_norm: the embeddings are normalized. transform: before the head.
    head_bias: whether the language-model head has a bias. classifier: the head, if it is not that
    of a language model.
    names: layer or model tensor name → file name, with indices as `{layer}` and
    `{expert}`; or a FusedPart with such a file name. other_names: another layout of the files.
    ignored: regular expressions of names in the files that are not read (old rotary buffers).
    kept: of names in the files that are not computed with and are copied unchanged (MTP layers).
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    tied: bool
    init_std: float
    max_positions: int
    config: Mapping[str, Any] = field(compare=False, repr=False)
    names: Mapping[str, FileTemplate] = field(compare=False, repr=False)
    other_names: Mapping[str, FileTemplate] = field(default_factory=dict, compare=False, repr=False)
    ignored: tuple[str, ...] = field(default=(), compare=False, repr=False)
    kept: tuple[str, ...] = field(default=(), compare=False, repr=False)
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    norm_offset: float = 0.0
    causal: bool = True
    norm_kind: NormKind = "rms"
    embed_norm: bool = False
    transform: Transform | None = None
    head_bias: bool = False
    classifier: ClassifierHead | None = None

    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors: embedding, layers in order, final norm, head unless tied."""
        return self._table

    def outer_rows(self) -> tuple[tuple[TableRow, ...], tuple[TableRow, ...]]:
        """Tensors before the layers, and tensors after them."""
        width, matrix = self.hidden_size, ((self.vocab_size, self.hidden_size), ("vocab", "embed"))
        init: InitKind = "zeros" if self.norm_offset else "ones"
        norm = TableRow("embed_norm", (width,), ("embed",), "norm", init)
        first = (TableRow("embed", *matrix, "embedding"), *[norm] * self.embed_norm)
        last = [replace(norm, name="final_norm")]
        last += self.transform.rows(width) if self.transform else ()
        if self.classifier is not None:
            return first, (*last, *self.classifier.rows(width))
        last += [] if self.tied else [TableRow("head", *matrix, "head")]
        bias = TableRow("head_bias", (self.vocab_size,), ("vocab",), "head", "zeros")
        return first, (*last, *[bias] * self.head_bias)

    def layer_names(self) -> tuple[Mapping[str, str], ...]:
        """For each layer, its tensors' short names → their full names."""
        return self._short_names

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings of the layers."""
        ropes = (getattr(layer.mixer, "rope", None) for layer in self.layers)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers with softmax attention (None: no window)."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(dict.fromkeys(mixer.window for mixer in mixers if hasattr(mixer, "window")))

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, Experts))

    @cached_property
    def _table(self) -> tuple[TensorSpec, ...]:
        def outer(rows: tuple[TableRow, ...]) -> list[TensorSpec]:
            return [row.tensor("", str(self.names[row.name]), self.init_std, None) for row in rows]

        first, last = self.outer_rows()
        # a sum of 2L branch outputs keeps its variance if each is scaled by 1/sqrt(2L) (GPT-2)
        scale = 1 / math.sqrt(2 * max(1, len(self.layers)))
        table = outer(first)
        for index, layer in enumerate(self.layers):
            for row in layer.rows(self.hidden_size):
                hf = _file_name(self.names[row.name], row, index)
                std = self.init_std * (scale if row.residual_output else 1.0)
                table.append(row.tensor(f"layers.{index}.", hf, std, index))
        return (*table, *outer(last))

    @cached_property
    def _short_names(self) -> tuple[Mapping[str, str], ...]:
        names: list[dict[str, str]] = [{} for _ in self.layers]
        for tensor in self.tensors():
            if tensor.layer is not None:
                short = tensor.name.removeprefix(f"layers.{tensor.layer}.")
                names[tensor.layer][short] = tensor.name
        return tuple(names)  # plain dictionaries: torch.compile cannot trace read-only views

    @property
    def head_name(self) -> str:
        """Name of the tensor that projects to the vocabulary; UsageError where there is none."""
        if self.classifier is not None:
            labels = self.classifier.labels
            raise UsageError(f"model: a classifier of {labels} labels (expected a language model)")
        return "embed" if self.tied else "head"


def check_predicts(spec: ModelSpec) -> None:
    """Raise UsageError unless the model predicts each token from those before it."""
    _ = spec.head_name
    if not spec.causal:
        raise UsageError(f"model: {spec.family} is an encoder (expected a decoder)")


def _file_name(template: FileTemplate, row: TableRow, layer: int) -> FileName:
    if isinstance(template, FusedPart):
        return replace(template, file=template.file.format(layer=layer))
    if "{expert}" in template:
        return tuple(template.format(layer=layer, expert=n) for n in range(row.shape[0]))
    return template.format(layer=layer)


Convention = Literal["6nd", "palm", "causal"]
_SHARE = {"6nd": 0.0, "palm": 1.0, "causal": 0.5}


def _active(tensor: TensorSpec) -> int:
    used, of = tensor.active_share
    return tensor.size * used // of


def parameter_count(spec: ModelSpec) -> int:
    """All parameters; tied ones once."""
    return sum(tensor.size for tensor in spec.tensors())


def active_parameter_count(spec: ModelSpec) -> int:
    """Parameters that one token uses (all of them in a dense model)."""
    return sum(_active(tensor) for tensor in spec.tensors())


def matmul_parameter_count(spec: ModelSpec) -> int:
    """Active matrix elements without the input embedding's lookup; the head always counts."""
    inner = (t for t in spec.tensors() if len(t.shape) > 1)
    inner_count = sum(_active(t) for t in inner if t.component not in ("embedding", "head"))
    return inner_count + (0 if spec.classifier else spec.vocab_size * spec.hidden_size)


def training_flops_per_token(spec: ModelSpec, seq: int, convention: Convention = "6nd") -> float:
    """FLOPs per token, forward and backward, at sequence length `seq`."""
    share, sides = attention_share(convention, spec.causal)
    mixing = sum(_mixing(layer.mixer, seq, share, sides) for layer in spec.layers) if share else 0.0
    return 6.0 * matmul_parameter_count(spec) + 6.0 * mixing


def attention_share(convention: str, causal: bool) -> tuple[float, int]:
    """(fraction of a layer's scores that count, sides of a token with scores). UsageError."""
    if convention not in _SHARE:
        known = ", ".join(get_args(Convention))
        raise UsageError(f"--convention: {convention!r} (expected one of {known})")
    share = _SHARE[convention]
    return (share, 1) if causal else (1.0 if share else 0.0, 2)


def _mixing(mixer: Mixer, seq: int, share: float, sides: int) -> float:
    """Multiply-adds per token between activations; a recurrent state has no mask."""
    if isinstance(mixer, GatedDeltaNet):
        return mixer.state_products()
    return share * min(seq, sides * (mixer.window or seq)) * mixer.score_width()
