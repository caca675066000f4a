"""How far a quantized model is from the original, on tokens that its rounding has not seen.

The inputs of products are rounded where the format of the weights says so (`ops.served_inputs`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sabia.core import stop
from sabia.core.model import forward
from sabia.core.ops.base import Ops
from sabia.core.ops.served_inputs import InputFormat, RoundedInputs
from sabia.core.parallel.build_ops import build_ops
from sabia.core.quant.hessians import Batch, CalibrationStage, run_block
from sabia.core.quant.recipe import Linear
from sabia.core.spec import ModelSpec

_LOGIT_BYTES = 256 << 20


@dataclass(frozen=True)
class Group:
    """A part of the tokens: KL(original ‖ quantized), and the perplexity of both models."""

    tokens: int
    kl_nats: float
    perplexity_before: float
    perplexity_after: float


@dataclass(frozen=True)
class Divergence:
    """Original and quantized model on the same tokens, over their next-token distributions.

    KL(original ‖ quantized) in nats: mean, 99th percentile, maximum; the share of tokens whose most
    probable next token is the same; mean losses of the next token. by_source, by_length: the same
    for the records of one source, and of one range of lengths in tokens.
    """

    tokens: int
    kl_nats: float
    kl_99_nats: float
    kl_max_nats: float
    same_top_share: float
    loss_before_nats: float
    loss_after_nats: float
    by_source: dict[str, Group]
    by_length: dict[str, Group]


class Comparison:
    """Two models on the same tokens, layer by layer, with activations rounded where `linears`
    require it.

    sources: of each row of the batches, in the order of `hessians.batches`. input_scales: static
    scales of inputs by parameter.
    """

    def __init__(
        self,
        spec: ModelSpec,
        linears: Sequence[Linear],
        batches: Sequence[Batch],
        sources: Sequence[str] = (),
    ) -> None:
        self.spec, self.batches, self.sources = spec, batches, sources
        # static scales of inputs are set when a part of the model is compared
        self.formats: dict[str, InputFormat] = {
            tensor.name: InputFormat(x.scheme.inputs)
            for x in linears
            if x.scheme.inputs is not None
            for tensor in x.tensors
        }
        self.rules = None, RoundedInputs(self.formats)
        self.ops = [build_ops("torch", record=rule) for rule in self.rules]
        # of both models and each batch, the input states [B, T, D] of the next layer
        self.states: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self.result: Divergence | None = None

    def set_input_scales(self, scales: Mapping[str, float]) -> None:
        """Set the static scales of the inputs of parameters."""
        for name, scale in scales.items():
            self.formats[name] = replace(self.formats[name], scale=scale)

    def begin(self, original: Mapping[str, Any], quantized: Mapping[str, Any]) -> None:
        """Compute the embeddings; original, quantized: backend arrays in float32."""
        for states, weights in zip(self.states, (original, quantized), strict=True):
            states[:] = embeddings(self.spec, weights, self.batches, self.ops[0])

    def advance(
        self, layer: int | None, original: Mapping[str, Any], quantized: Mapping[str, Any]
    ) -> None:
        """Compute a layer of both models; None: what follows the last layer, and the result."""
        pair, index = (original, quantized), len(self.spec.layers) if layer is None else layer
        compared: list[np.ndarray] = []  # [tokens, 6], see _compare
        for number, batch in enumerate(self.batches):
            stop.check()
            stages = (CalibrationStage(index, states[number]) for states in self.states)
            hidden = [
                run_block(self.spec, weights, build_ops("torch", stage=stage, record=rule), batch)
                for weights, stage, rule in zip(pair, stages, self.rules, strict=True)
            ]
            if layer is None:
                compared += self._compared(pair, hidden, batch)
                continue
            for states, one in zip(self.states, hidden, strict=True):
                states[number] = one
        if layer is None:
            self.result = _summary(np.concatenate(compared), self.sources)

    def _compared(
        self,
        pair: tuple[Mapping[str, Any], Mapping[str, Any]],
        hidden: Sequence[torch.Tensor],
        batch: Batch,
    ) -> list[np.ndarray]:
        """In slices of rows whose logits need at most _LOGIT_BYTES."""
        rows = max(1, _LOGIT_BYTES // (4 * self.spec.vocab_size * batch.ids.shape[1]))
        parts = (slice(start, start + rows) for start in range(0, len(batch.ids), rows))
        return [_compare(self.spec, pair, hidden, part, batch, self.ops) for part in parts]


def embeddings(
    spec: ModelSpec, params: Mapping[str, Any], batches: Sequence[Batch], ops: Ops
) -> list[torch.Tensor]:
    """The input states [B, T, D] of the first layer, of each batch."""
    return [forward.embedded(spec, params, batch.ids, ops) for batch in batches]


def divergence(
    spec: ModelSpec,
    original: Mapping[str, Any],
    quantized: Mapping[str, Any],
    linears: Sequence[Linear],
    batches: Sequence[Batch],
    sources: Sequence[str] = (),
    input_scales: Mapping[str, float] | None = None,
) -> Divergence:
    """Compare whole models, see Comparison."""
    comparison = Comparison(spec, linears, batches, sources)
    comparison.set_input_scales(input_scales or {})
    with torch.inference_mode():
        comparison.begin(original, quantized)
        for layer in (*range(len(spec.layers)), None):
            comparison.advance(layer, original, quantized)
    assert comparison.result is not None
    return comparison.result


def _summary(values: np.ndarray, sources: Sequence[str]) -> Divergence:
    """values[tokens, 6]: see _compare."""
    row, kl, same, before, after, predicted = values.T
    total = max(1.0, predicted.sum())
    lengths = np.bincount(row.astype(np.int64))
    return Divergence(
        len(values), float(kl.mean()), float(np.quantile(kl, 0.99)), float(kl.max()),
        float(same.mean()), before.sum() / total, after.sum() / total,
        _by(values, sources), _by(values, [_bucket(length) for length in lengths]),
    )  # fmt: skip


def _bucket(length: int) -> str:
    """The range of lengths, between powers of two, of a record."""
    end = 64
    while end < length:
        end *= 2
    return f"{end // 2 + 1 if end > 64 else 1}-{end}"


def _by(values: np.ndarray, label_of_row: Sequence[str]) -> dict[str, Group]:
    """The tokens in groups by the label of their row, in the order of the first number in it."""
    groups: dict[str, Group] = {}
    rows = values[:, 0].astype(np.int64)
    labels = np.array(label_of_row, object)
    for label in sorted({*labels} - {""}, key=lambda name: (_first_number(name), name)):
        _, kl, _, before, after, predicted = values[labels[rows] == label].T
        if not len(kl):
            continue
        total = max(1.0, predicted.sum())
        perplexities = (float(np.exp(loss.sum() / total)) for loss in (before, after))
        groups[label] = Group(len(kl), float(kl.mean()), *perplexities)
    return groups


def _first_number(label: str) -> int:
    digits = label.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _compare(
    spec: ModelSpec,
    params: tuple[Mapping[str, Any], Mapping[str, Any]],
    hidden: Sequence[torch.Tensor],
    part: slice,
    batch: Batch,
    pair_of_ops: Sequence[Ops],
) -> np.ndarray:
    """[tokens, 6]: number of the row, KL, whether the top tokens are equal, both losses of the next
    token, and whether the row has one."""
    logs = []  # log-probabilities [B, T, V] of both models
    for weights, states, ops in zip(params, hidden, pair_of_ops, strict=True):
        logs.append(forward.logits(spec, weights, states[part], ops).log_softmax(-1))
    p, q = logs
    mask = batch.mask[part].to(p.device)
    kl = (p.exp() * (p - q)).sum(-1)  # Σ P (log P - log Q)
    same = p.argmax(-1) == q.argmax(-1)
    ids = torch.from_numpy(batch.ids[part]).to(p.device)
    targets = ids.roll(-1, 1)[..., None]
    predicted = mask & mask.roll(-1, 1)
    predicted[:, -1] = False
    losses = [-x.gather(2, targets)[..., 0] * predicted for x in logs]
    rows = torch.from_numpy(batch.rows[part]).to(p.device)[:, None].expand_as(mask)
    columns = (rows, kl, same, *losses, predicted)
    return torch.stack([column[mask].double() for column in columns], 1).cpu().numpy()
