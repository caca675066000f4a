"""Quantization of a model, layer by layer: calibrate, round, compute the next layer's inputs.

Layer i is calibrated on the outputs of the quantized layers before it, so that its rounding
compensates their errors. Matrices that are not quantized, vectors and embeddings are rounded to
BF16 first. The result has exactly the values that loading the written directory returns.

An expert of an MoE layer is calibrated on the tokens that the router sends to it. The Hessians of
HESSIAN_BYTES of experts are held at a time; the layer is computed again for the next ones. An
expert that sees fewer than LEAST_TOKENS tokens is rounded to nearest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sabia.core import stop
from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage.fused_tensors import read_part
from sabia.core.numerics.floats import round_bfloat16
from sabia.core.parallel.build_ops import build_ops
from sabia.core.progress import progress
from sabia.core.quant.hessians import Batch, CalibrationStage, Hessians, run_block
from sabia.core.quant.recipe import Linear, Recipe, component_of, plan, stored_form
from sabia.core.quant.rounding import Stored, errors_of, store
from sabia.core.spec import ModelSpec
from sabia.core.spec.tensors import FusedPart

HESSIAN_BYTES = 2 << 30
LEAST_TOKENS = 32


@dataclass(frozen=True)
class QuantizedModel:
    """A model with the values that loading its written directory returns.

    spec: with the names of the quantized files. linears: every matrix with its scheme. stored: the
    quantized matrices, by key. params: all parameters as float32 NumPy arrays. rows: the errors of
    each quantized matrix.
    """

    spec: ModelSpec
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

    Raises UsageError for a recipe that does not fit the model, BadData for a parameter with NaN or
    infinite values.
    """
    work = _ModelRounding(spec, params, recipe, ops, calibration)
    with torch.inference_mode(), progress(len(spec.layers) + 1, "quantize", "layers") as bar:
        for layer in range(len(spec.layers)):
            stop.check()
            work.quantize_layer(layer)
            bar.advance(layer=layer)
        work.quantize_head()
        bar.advance()
    return QuantizedModel(work.form, work.linears, work.stored, work.values, work.rows)


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
        self.form = stored_form(spec, recipe)
        self.linears = plan(self.form, recipe)
        if recipe.rounding == "gptq" and not calibration:
            raise UsageError(
                "--rounding: gptq needs calibration inputs (expected calibration records as INPUT, "
                "or --rounding auto)"
            )
        quantized = {t.name for x in self.linears if x.scheme.quantizes for t in x.tensors}
        self.values = {
            name: array if name in quantized else round_bfloat16(array)
            for name, array in ((name, _finite(name, array)) for name, array in params.items())
        }
        self.params = ops.to_device(self.values, "float32")
        # of each batch, the input states [B, T, D] of the next layer; None: the embeddings
        self.states: list[torch.Tensor | None] = [None] * len(calibration)
        self.stored: dict[tuple[str, int | None], Stored] = {}
        self.stacks: dict[str, np.ndarray] = {}  # rounded experts [E, O, I] of the layer
        self.rows: list[dict[str, Any]] = []

    def quantize_layer(self, layer: int) -> None:
        """Calibrate and round a layer's matrices, then compute the states after the layer."""
        linears = [x for x in self.linears if x.tensor.layer == layer]
        for experts in _windows(linears):
            dense = experts.start == 0
            hessians = Hessians(experts, dense)
            for batch, states in zip(self.calibration, self.states, strict=True):
                stop.check()
                hessians.begin(batch.mask)
                stage = CalibrationStage(layer, states)
                ops = build_ops("torch", stage=stage, record=hessians)
                run_block(self.spec, self.params, ops, batch)
            self._round(
                [x for x in linears if (dense if x.index is None else x.index in experts)], hessians
            )
        self._use_rounded(linears)
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
        self._use_rounded(outside)

    def _round(self, linears: Sequence[Linear], hessians: Hessians) -> None:
        for linear in linears:
            if linear.scheme.quantizes:
                stop.check()
                self.rows.append(self._rounded(linear, hessians))

    def _use_rounded(self, linears: Sequence[Linear]) -> None:
        """Compute with the rounded values from now on."""
        changed = {t.name for x in linears if x.scheme.quantizes for t in x.tensors}
        for name in changed & self.stacks.keys():
            self.values[name] = self.stacks.pop(name)
        fresh = self.ops.to_device({name: self.values[name] for name in changed}, "float32")
        self.params.update(fresh)

    def _rounded(self, linear: Linear, hessians: Hessians) -> dict[str, Any]:
        name, index = linear.key
        weight = linear.weight(self.values)  # [O, I]
        tokens = hessians.tokens(name, index)
        hessian = None if index is not None and tokens < LEAST_TOKENS else hessians.of(name, index)
        stored = store(weight, linear.scheme, self.recipe, hessian, name)
        errors = errors_of(weight, stored, linear.scheme, self.recipe, hessian)
        self.stored[linear.key] = stored
        if index is not None:
            empty = np.empty_like(self.values[name])
            self.stacks.setdefault(name, empty)[index] = stored.decoded
        for part in linear.fused:
            if isinstance(part.hf, FusedPart):
                values = read_part(part.hf, stored.decoded, part.shape)
                self.values[part.name] = np.ascontiguousarray(values)
        if index is None and not linear.fused:
            self.values[name] = stored.decoded
        tensor, scheme = linear.tensor, linear.scheme
        return {
            "layer": tensor.layer,
            "component": component_of(tensor),
            "module": linear.module,
            "scheme": scheme.label(),
            "bits": scheme.bits,
            "method": stored.method,
            "tokens": tokens,
            "size_bytes": sum(part.nbytes for part in stored.parts.values()),
        } | errors


def _windows(linears: Sequence[Linear]) -> list[range]:
    """The experts of a layer in ranges whose Hessians take HESSIAN_BYTES; one empty range where
    there are none."""
    experts = max((x.index + 1 for x in linears if x.index is not None), default=0)
    widths = {x.tensor.shape[-1] for x in linears if x.index is not None}  # inputs and inner width
    size = max(1, HESSIAN_BYTES // max(1, 8 * sum(width**2 for width in widths)))
    return [range(i, min(i + size, experts)) for i in range(0, max(experts, 1), size)]


def _finite(name: str, array: np.ndarray) -> np.ndarray:
    """A writable float32 copy; raises BadData for NaN and infinite values."""
    copy = np.array(array, np.float32)
    if not np.isfinite(copy).all():
        wrong = int((~np.isfinite(copy)).sum())
        raise BadData(f"quantize: {name} has {wrong:,} NaN or infinite values of {copy.size:,}")
    return copy
