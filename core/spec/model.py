"""ModelSpec: a model as frozen data, and its ordered table of tensors.

Two specs are equal when they compute the same function of equally named tensors; the original
`config` is kept for export and is not compared, so a spec can be a dictionary key or a static
argument of a compiled function.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.experts import Experts
from sabia.core.spec.heads import ClassifierHead, Transform
from sabia.core.spec.layers import Layer, NormKind
from sabia.core.spec.rope import Rope
from sabia.core.spec.tensors import (
    FileName,
    FileTemplate,
    FusedPart,
    InitKind,
    TableRow,
    TensorSpec,
)


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
