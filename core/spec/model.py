"""ModelSpec: a model as frozen data, and its ordered table of tensors.

Two specs are equal when they compute the same function of equally named tensors; the original
`config` rides along for export and takes no part in comparison, so a spec can be a dictionary
key or a static argument of a compiled function.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.heads import Classifier, Transform
from sabia.core.spec.layers import Layer, NormKind
from sabia.core.spec.rope import Rope
from sabia.core.spec.tensors import FileName, InitKind, Part, Row, TensorSpec, place


@dataclass(frozen=True)
class ModelSpec:
    """A decoder or an encoder: embedding, layers, final norm, head.

    embed_scale: factor of the embeddings as they enter the stream (Gemma: sqrt(hidden_size)).
    logit_softcap: cap·tanh(logits/cap). norm_offset: added to the final norm's weights.
    causal: tokens see only what is before them. norm_kind: of the norms of the stream; embed_norm:
    the embeddings are normed. transform: in front of the head. head_bias: of the vocabulary's.
    classifier: the head, in place of the vocabulary's.
    names: layer or model tensor name → file name, `{layer}` and `{expert}` standing for indices;
    or a Part with such a file name. other_names: another layout that files may have instead.
    ignored: regular expressions of file names that carry nothing (old rotary buffers).
    kept: of file names that take no part in the maths and are handed on unchanged (MTP layers).
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
    names: Mapping[str, str | Part] = field(compare=False, repr=False)
    other_names: Mapping[str, str | Part] = field(default_factory=dict, compare=False, repr=False)
    ignored: tuple[str, ...] = field(default=(), compare=False, repr=False)
    kept: tuple[str, ...] = field(default=(), compare=False, repr=False)
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    norm_offset: float = 0.0
    causal: bool = True
    norm_kind: NormKind = "rms"
    embed_norm: bool = False
    transform: Transform | None = None
    head_bias: bool = False
    classifier: Classifier | None = None

    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors: embedding, layers in order, final norm, head unless tied."""
        return self._table

    def outer_rows(self) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """What is in front of the layers, and what is behind them."""
        width, matrix = self.hidden_size, ((self.vocab_size, self.hidden_size), ("vocab", "embed"))
        init: InitKind = "zeros" if self.norm_offset else "ones"
        norm = Row("embed_norm", (width,), ("embed",), "norm", init)
        first = (Row("embed", *matrix, "embedding"), *[norm] * self.embed_norm)
        last = [replace(norm, name="final_norm")]
        last += self.transform.rows(width) if self.transform else ()
        if self.classifier is not None:
            return first, (*last, *self.classifier.rows(width))
        last += [] if self.tied else [Row("head", *matrix, "head")]
        last += [Row("head_bias", (self.vocab_size,), ("vocab",), "head", "zeros")] * self.head_bias
        return first, tuple(last)

    def layer_names(self) -> tuple[Mapping[str, str], ...]:
        """For each layer, its tensors' short names → their full names."""
        return self._short_names

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotations of the layers."""
        found = (getattr(layer.mixer, "rope", None) for layer in self.layers)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers with softmax attention (None: sees everything)."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(dict.fromkeys(mixer.window for mixer in mixers if hasattr(mixer, "window")))

    @cached_property
    def _table(self) -> tuple[TensorSpec, ...]:
        def outer(rows: tuple[Row, ...]) -> list[TensorSpec]:
            return [place(row, "", str(self.names[row.name]), self.init_std, None) for row in rows]

        begin, last = self.outer_rows()
        table = outer(begin)
        for index, layer in enumerate(self.layers):
            table += [_place_in_layer(self, row, index) for row in layer.rows(self.hidden_size)]
        return (*table, *outer(last))

    @cached_property
    def _short_names(self) -> tuple[Mapping[str, str], ...]:
        names: list[dict[str, str]] = [{} for _ in self.layers]
        for tensor in self.tensors():
            if tensor.layer is not None:
                short = tensor.name.removeprefix(f"layers.{tensor.layer}.")
                names[tensor.layer][short] = tensor.name
        return tuple(MappingProxyType(row) for row in names)

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
        raise UsageError(f"model: {spec.family} is an encoder (expected a model that writes text)")


def _place_in_layer(spec: ModelSpec, row: Row, index: int) -> TensorSpec:
    # A sum of 2L branch outputs keeps unit growth when each is scaled by 1/sqrt(2L) (GPT-2).
    scale = 1 / math.sqrt(2 * len(spec.layers)) if row.residual_output else 1.0
    hf = _file_name(spec.names[row.name], row, index)
    return place(row, f"layers.{index}.", hf, spec.init_std * scale, index)


def _file_name(template: str | Part, row: Row, layer: int) -> FileName:
    if isinstance(template, Part):
        return replace(template, file=template.file.format(layer=layer))
    if "{expert}" in template:
        return tuple(template.format(layer=layer, expert=n) for n in range(row.shape[0]))
    return template.format(layer=layer)
