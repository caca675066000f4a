"""Quantization of a model, layer by layer: calibrate, round, compute the next layer's inputs.

Layer i is calibrated on the outputs of the quantized layers before it, so that its rounding
compensates their errors. Matrices that are not quantized, vectors and embeddings are rounded to
BF16 first. The result has exactly the values that loading the written directory returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sabia.core import stop
from sabia.core.numerics.floats import round_bfloat16
from sabia.core.ops.product import Multiply, Product, Rule
from sabia.core.parallel.build_ops import build_ops
from sabia.core.progress import progress
from sabia.core.quant.hessians import Batch, CalibrationStage, Hessians, run_block
from sabia.core.quant.recipe import Linear, Recipe, plan
from sabia.core.quant.rounding import Stored, errors_of, store
from sabia.core.spec import ModelSpec


@dataclass(frozen=True)
class QuantizedModel:
    """linears: every matrix with its scheme; stored: the quantized matrices, by key.

    params: all parameters as float32 NumPy arrays with the stored values. rows: the errors of each
    quantized matrix.
    """

    linears: tuple[Linear, ...]
    stored: dict[tuple[str, int | None], Stored]
    params: dict[str, np.ndarray]
    rows: list[dict[str, Any]]


def quantize(
    spec: ModelSpec,
    params: Mapping[str, np.ndarray],
    recipe: Recipe,
    ops: Any,
    calibration: Sequence[Batch] = (),
) -> QuantizedModel:
    """Quantize `params` (by spec name) by a recipe; without calibration all are rounded to nearest.

    Raises UsageError for a recipe that does not fit the model.
    """
    work = _ModelRounding(spec, params, recipe, ops, calibration)
    with torch.inference_mode(), progress(len(spec.layers) + 1, "quantize", "layers") as bar:
        for layer in range(len(spec.layers)):
            stop.check()
            work.quantize_layer(layer)
            bar.advance(layer=layer)
        work.quantize_head()
        bar.advance()
    return QuantizedModel(work.linears, work.stored, work.values, work.rows)


class _ModelRounding:
    """The state of `quantize`: values so far, and the input states of the next layer."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, np.ndarray],
        recipe: Recipe,
        ops: Any,
        calibration: Sequence[Batch],
    ) -> None:
        self.spec, self.recipe, self.ops, self.calibration = spec, recipe, ops, calibration
        self.linears = plan(spec, recipe)
        quantized = {x.tensor.name for x in self.linears if x.scheme.quantizes}
        self.values = {
            name: _float32(array) if name in quantized else round_bfloat16(_float32(array))
            for name, array in params.items()
        }
        self.params = ops.to_device(self.values, "float32")
        # of each batch, the input states [B, T, D] of the next layer; None: the embeddings
        self.states: list[torch.Tensor | None] = [None] * len(calibration)
        self.stored: dict[tuple[str, int | None], Stored] = {}
        self.rows: list[dict[str, Any]] = []

    def quantize_layer(self, layer: int) -> None:
        """Calibrate and round a layer's matrices, then compute the states after the layer."""
        hessians = Hessians()
        for batch, states in zip(self.calibration, self.states, strict=True):
            hessians.begin(batch.mask)
            stage = CalibrationStage(layer, states)
            run_block(
                self.spec, self.params, build_ops("torch", stage=stage, record=hessians), batch
            )
        self._round([x for x in self.linears if x.tensor.layer == layer], hessians)
        # run the layer again, with its rounded weights
        for number, (batch, states) in enumerate(zip(self.calibration, self.states, strict=True)):
            ops = build_ops("torch", stage=CalibrationStage(layer, states))
            self.states[number] = run_block(self.spec, self.params, ops, batch)

    def quantize_head(self) -> None:
        """Round the matrices outside of the layers; their inputs are the final hidden states."""
        outside = [x for x in self.linears if x.tensor.layer is None]
        hessians = Hessians()
        for batch, states in zip(self.calibration, self.states, strict=True) if outside else ():
            ops = build_ops("torch", stage=CalibrationStage(len(self.spec.layers), states))
            hessians.begin(batch.mask)
            hidden = run_block(self.spec, self.params, ops, batch)
            hessians.add(hidden, [self.spec.head_name])
        self._round(outside, hessians)

    def _round(self, linears: Sequence[Linear], hessians: Hessians) -> None:
        for linear in linears:
            if linear.scheme.quantizes:
                stop.check()
                self.rows.append(self._rounded(linear, hessians))
        changed = {x.tensor.name for x in linears if x.scheme.quantizes}
        fresh = self.ops.to_device({name: self.values[name] for name in changed}, "float32")
        self.params.update(fresh)

    def _rounded(self, linear: Linear, hessians: Hessians) -> dict[str, Any]:
        name, index = linear.key
        whole = self.values[name]
        weight = whole if index is None else whole[index]  # [O, I]; whole is [E, O, I] for experts
        # routed experts see a part of the tokens each; their inputs are not recorded
        hessian = hessians.of(name) if index is None else None
        stored = store(weight, linear.scheme, self.recipe, hessian, name)
        errors = errors_of(weight, stored, linear.scheme, self.recipe, hessian)
        self.stored[linear.key] = stored
        if index is None:
            self.values[name] = stored.decoded
        else:
            whole[index] = stored.decoded
        tensor, scheme = linear.tensor, linear.scheme
        return {
            "layer": tensor.layer,
            "component": tensor.component,
            "module": linear.module,
            "scheme": scheme.label(),
            "bits": scheme.bits,
            "method": stored.method,
            "tokens": 0 if hessian is None else hessians.tokens,
            "size_bytes": sum(part.nbytes for part in stored.parts.values()),
        } | errors


def _float32(array: np.ndarray) -> np.ndarray:
    """A writable float32 copy."""
    return np.array(array, np.float32)


class SimulatedInputs(Rule):
    """Rounds the inputs of each token as the schemes of the matrices require."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.schemes = {x.tensor.name: x.scheme for x in linears if x.scheme.dynamic_activations}

    def apply(self, product: Product, proceed: Multiply) -> list[torch.Tensor]:
        """See Rule.apply."""
        if product.plan is not None:
            return proceed(product)
        parts = (product._replace(matrices=(matrix,)) for matrix in product.matrices)
        return [proceed(p._replace(x=self.rounded(p.x, p.matrices[0].name)))[0] for p in parts]

    def rounded(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The inputs x of a product with the parameter `name`, in the values of its scheme."""
        scheme = self.schemes.get(name)
        if scheme is None:
            return x
        largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)  # [..., 1], by token
        if scheme.type == "float":
            scale = largest / 448  # the largest E4M3 value
            return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
        scale = largest / 127  # int8, symmetric
        return torch.round(x / scale) * scale


@dataclass(frozen=True)
class Divergence:
    """Original and quantized model on the same tokens: means over next-token distributions."""

    tokens: int
    kl_nats: float
    same_top_share: float
    loss_before_nats: float
    loss_after_nats: float


def divergence(
    spec: ModelSpec,
    original: Mapping[str, Any],
    quantized: Mapping[str, Any],
    linears: Sequence[Linear],
    ops: Any,
    batches: Sequence[Batch],
) -> Divergence:
    """KL(original ‖ quantized) in nats, share of equal top tokens, losses; activations simulated.

    original, quantized: backend arrays in float32.
    """
    pair_of_ops = ops, build_ops("torch", record=SimulatedInputs(linears))
    sums, tokens, targets = torch.zeros(4, dtype=torch.float64), 0, 0
    with torch.inference_mode():
        for batch in batches:
            stop.check()
            weights = (original, quantized)
            pair = [run_block(spec, w, o, batch) for w, o in zip(weights, pair_of_ops, strict=True)]
            # slices of rows whose logits need at most _LOGIT_BYTES
            rows = max(1, _LOGIT_BYTES // (4 * spec.vocab_size * batch.ids.shape[1]))
            for start in range(0, len(batch.ids), rows):
                part = slice(start, start + rows)
                sums += _compare(spec, weights, pair, part, batch, pair_of_ops)
            tokens += int(batch.mask.sum())
            targets += int(batch.mask[:, 1:].sum())
    kl, same, before, after = sums.tolist()
    return Divergence(tokens, kl / tokens, same / tokens, before / targets, after / targets)


_LOGIT_BYTES = 256 << 20


def _compare(
    spec: ModelSpec,
    params: tuple[Mapping[str, Any], Mapping[str, Any]],
    hidden: Sequence[torch.Tensor],
    part: slice,
    batch: Batch,
    pair_of_ops: tuple[Any, Any],
) -> torch.Tensor:
    """Sums over tokens: KL, equal top tokens, and both losses of the next token."""
    from sabia.core.model import forward

    logs = []  # log-probabilities [B, T, V] of both models
    for weights, states, ops in zip(params, hidden, pair_of_ops, strict=True):
        logs.append(forward.logits(spec, weights, states[part], ops).log_softmax(-1))
    p, q = logs
    mask = batch.mask[part].to(p.device)
    kl = (p.exp() * (p - q)).sum(-1)[mask].sum()  # Σ P (log P - log Q)
    same = (p.argmax(-1) == q.argmax(-1))[mask].sum()
    ids = torch.from_numpy(batch.ids[part]).to(p.device)[:, 1:, None]
    following = mask[:, 1:]  # the targets that are tokens
    losses = [-x[:, :-1].gather(2, ids)[:, :, 0][following].sum() for x in logs]
    return torch.stack([kl.double(), same.double(), *(x.double() for x in losses)]).cpu()
