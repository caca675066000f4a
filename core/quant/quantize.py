"""Quantization of a model, layer by layer: calibrate, round, compute the next layer's inputs.

Layer i is calibrated on the outputs of the quantized layers before it, so that its rounding
compensates their errors. Matrices that are not quantized, vectors and embeddings are rounded to
BF16 first. The result has exactly the values that loading the written directory returns.

An expert of an MoE layer is calibrated on the tokens that the router sends to it, or on all. The
Hessians of HESSIAN_BYTES of experts are held at a time, and of as many as the router chooses where
they see all tokens, so that these take no more memory than the routed ones; the layer is computed
again for the next ones. An expert that sees fewer than LEAST_TOKENS tokens is rounded to nearest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sabia.core import stop
from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage.hub import read_part
from sabia.core.numerics import llmcompressor
from sabia.core.numerics.compressed import input_dtype
from sabia.core.numerics.floats import E4M3, numpy_dtype, round_bfloat16
from sabia.core.numerics.scales import whole_scale
from sabia.core.numerics.schemes import ELEMENTS, served_together
from sabia.core.ops.base import Ops
from sabia.core.parallel.build_ops import build_ops
from sabia.core.quant.divergence import Comparison, embeddings
from sabia.core.quant.hessians import Batch, CalibrationStage, Hessians, Key, add_inputs, run_block
from sabia.core.quant.memory_bounds import HESSIAN_BYTES
from sabia.core.quant.recipe import Linear, Recipe, component_of, plan, stored_form
from sabia.core.quant.rounding import Stored, errors_of, method_of, store
from sabia.core.quant.smoothing import smooth
from sabia.core.spec import ModelSpec
from sabia.core.spec.layers import Experts
from sabia.core.spec.tensors import FusedPart

LEAST_TOKENS = 32


@dataclass(frozen=True)
class QuantizedModel:
    """A model with the values that loading its written directory returns.

    spec: with the names of the quantized files. linears: every matrix with its scheme. stored: the
    quantized matrices, by key. params: all parameters as float32 NumPy arrays. rows: the errors of
    each quantized matrix. input_scales: static scales of the inputs, by parameter.
    """

    spec: ModelSpec
    linears: tuple[Linear, ...]
    stored: dict[Key, Stored]
    params: dict[str, np.ndarray]
    rows: list[dict[str, Any]]
    input_scales: dict[str, float]


@dataclass(frozen=True)
class Part:
    """A layer, or what is outside of the layers, quantized.

    stored: the quantized matrices, by key. values: all its parameters as float32 NumPy arrays with
    the stored values. rows: the errors of each quantized matrix. input_scales: static scales of
    the inputs, by parameter; the experts of a layer have one.
    """

    layer: int | None
    stored: dict[Key, Stored]
    values: dict[str, np.ndarray]
    rows: list[dict[str, Any]]
    input_scales: dict[str, float]


def quantize(
    spec: ModelSpec,
    params: Mapping[str, np.ndarray],
    recipe: Recipe,
    ops: Ops,
    calibration: Sequence[Batch] = (),
) -> QuantizedModel:
    """Quantize `params` (by spec name) by a recipe; without calibration all are rounded to nearest.

    Raises UsageError for a recipe that does not fit the model, BadData for a parameter with NaN or
    infinite values.
    """

    def read(layer: int | None) -> dict[str, np.ndarray]:
        return {t.name: params[t.name] for t in spec.tensors() if t.layer == layer}

    work = Rounding(spec, read, recipe, ops, calibration)
    made = QuantizedModel(work.form, work.linears, {}, {}, [], {})
    work.begin()
    for layer in (*range(len(spec.layers)), None):
        part = work.part(layer)
        made.stored.update(part.stored)
        made.params.update(part.values)
        made.rows.extend(part.rows)
        made.input_scales.update(part.input_scales)
    return made


class Rounding:
    """Rounds a model part by part; between two parts it holds only the states of the tokens.

    read: the parameters of a layer, or with None those outside of the layers. comparison: of both
    models on other tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        read: Callable[[int | None], Mapping[str, np.ndarray]],
        recipe: Recipe,
        ops: Ops,
        calibration: Sequence[Batch] = (),
        comparison: Comparison | None = None,
    ) -> None:
        self.spec, self.read, self.recipe, self.ops = spec, read, recipe, ops
        self.calibration, self.comparison = calibration, comparison
        self.form = stored_form(spec, recipe)
        self.table = {t.name: t for t in self.form.tensors()}
        self.linears = plan(self.form, recipe)
        if recipe.rounding in ("gptq", "learned") and not calibration:
            raise UsageError(
                f"--rounding: {recipe.rounding} needs calibration inputs (expected calibration "
                "records as INPUT, or --rounding auto)"
            )
        static = {x.scheme.name for x in self.linears if x.scheme.inputs and x.scheme.inputs.part}
        self.static = bool(static)
        if static and not calibration:
            raise UsageError(
                f"recipe {recipe.name}: format {min(static)} stores scales of inputs, which are "
                "measured on calibration inputs (expected calibration records as INPUT)"
            )
        if recipe.smooth != "none" and not calibration:
            raise UsageError(
                f"--smooth: {recipe.smooth} needs calibration inputs (expected calibration records "
                "as INPUT)"
            )
        self.quantized = {t.name for x in self.linears if x.scheme.quantizes for t in x.tensors}
        # of each batch, the input states [B, T, D] of the next layer
        self.states: list[torch.Tensor] = []

    def begin(self) -> None:
        """Compute the embeddings."""
        if not self.calibration:
            return
        with torch.inference_mode():
            original, values = self._values(None)
            before, after = (self.ops.to_device(x, "float32") for x in (original, values))
            self.states = embeddings(self.spec, after, self.calibration, self.ops)
            if self.comparison is not None:
                self.comparison.begin(before, after)

    def part(self, layer: int | None) -> Part:
        """Calibrate and round a part's matrices; then compute the states after the layer."""
        with torch.inference_mode():
            original, values = self._values(layer)
            params = self.ops.to_device(values, "float32")
            own = [x for x in self.linears if x.tensor.layer == layer and x.scheme.quantizes]
            if self.recipe.smooth != "none" and layer is not None:
                hessians = self._hessians(params, layer, range(0), True)
                smooth(self.form, layer, values, own, self.recipe, hessians)
                params = self.ops.to_device(values, "float32")
            part = Part(layer, {}, values, [], {})
            wholes, largest = _whole_scales(own, values, self.recipe), dict[str, float]()
            for experts in expert_windows(self.spec, self.recipe, own):
                hessians = self._hessians(params, layer, experts, experts.start == 0)
                within = [linear for linear in own if in_window(linear, experts)]
                rows = dict[Key, dict[str, Any]]()
                for together in self._with_equal_inputs(within, hessians, wholes):
                    stop.check()
                    rows |= self._rounded(together, part, hessians, wholes)
                for linear in within:
                    name, index = linear.key
                    part.rows.append(rows[linear.key])
                    largest[name] = max(largest.get(name, 0), hessians.largest(name, index))
            _set_input_scales(own, part, largest)
            fresh = _decoded(own, part)
            values.update(fresh)
            params |= self.ops.to_device(fresh, "float32")
            # run the layer again, with its rounded weights
            if layer is not None and self._reads_states_of(layer):
                self.states = [
                    run_block(
                        self.spec, params,
                        build_ops("torch", stage=CalibrationStage(layer, states)), batch,
                    )
                    for batch, states in zip(self.calibration, self.states, strict=True)
                ]  # fmt: skip
            if self.comparison is not None:
                self.comparison.set_input_scales(part.input_scales)
                before = self.ops.to_device(original, "float32")
                self.comparison.advance(layer, before, params)
            return part

    def _reads_states_of(self, layer: int) -> bool:
        """Whether a later part is calibrated on the states after a layer."""
        others = (x.tensor.layer for x in self.linears if x.scheme.quantizes)
        return any(other is None or other > layer for other in others)

    def _hessians(
        self, params: Mapping[str, Any], layer: int | None, experts: range, dense: bool
    ) -> Hessians:
        """Those of a layer's matrices, or of the head; its inputs are the final hidden states."""
        moved = self.recipe.smooth != "none"  # what reads a norm may be known by another matrix
        wanted = {t.name for t in self.spec.tensors() if t.layer == layer} & self.quantized
        every = self.recipe.experts == "all"
        sizes = moved or self.static
        hessians = Hessians(experts, dense, None if moved else wanted, sizes, every)
        index = len(self.spec.layers) if layer is None else layer
        for batch, states in zip(self.calibration, self.states, strict=True):
            stop.check()
            add_inputs(self.spec, params, index, states, batch, hessians)
        return hessians

    def _values(self, layer: int | None) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """A part's parameters in float32, and with those that are not quantized in BF16 values, as
        training has all of them."""
        original = finite(self.read(layer))
        narrow = self.recipe.rounding == "trained" or self.recipe.match != "none"
        wide = frozenset() if narrow else self.quantized
        return original, {
            name: array if name in wide else self._plain(name, array)
            for name, array in original.items()
        }

    def _plain(self, name: str, array: np.ndarray) -> np.ndarray:
        """A parameter that is not quantized, with the values of its stored form."""
        if self.recipe.container != "gguf":
            return round_bfloat16(array)
        from sabia.core.quant.gguf_file import plain_values

        with np.errstate(over="ignore"):
            stored = plain_values(self.spec, self.table[name], array)
        if not np.isfinite(stored).all():
            largest = float(np.abs(array).max())
            raise BadData(f"quantize: {name} has values up to {largest:g}, more than F16 holds")
        return stored

    def _with_equal_inputs(
        self, linears: Sequence[Linear], hessians: Hessians, wholes: Mapping[Key, np.float32]
    ) -> list[list[Linear]]:
        """Matrices that GPTQ rounds together, as H and the form of their scales are the same."""
        groups = dict[Any, list[Linear]]()
        for linear in linears:
            scheme = linear.scheme
            method = method_of(scheme, self.recipe, is_calibrated(linear, hessians))
            joined = method == "gptq" and scheme.tile[0] == 1
            inputs = hessians.inputs(*linear.key) if joined else linear.key
            groups.setdefault((inputs, scheme, wholes.get(linear.key)), []).append(linear)
        return [*groups.values()]

    def _rounded(
        self,
        linears: Sequence[Linear],
        part: Part,
        hessians: Hessians,
        wholes: Mapping[Key, np.float32],
    ) -> dict[Key, dict[str, Any]]:
        """Round matrices with the same inputs; their rows, by key."""
        first, rows = linears[0], dict[Key, dict[str, Any]]()
        weights = [linear.weight(part.values) for linear in linears]  # [O, I]
        hessian, whole = hessian_of(first, hessians), wholes.get(first.key)
        name = ", ".join(linear.tensor.name for linear in linears)
        made = store(weights, first.scheme, self.recipe, hessian, name, whole)
        for linear, weight, stored in zip(linears, weights, made, strict=True):
            tensor, scheme = linear.tensor, linear.scheme
            part.stored[linear.key] = stored
            rows[linear.key] = {
                "layer": tensor.layer,
                "component": component_of(tensor),
                "module": linear.module,
                "scheme": scheme.label(),
                "bits": scheme.bits,
                "method": stored.method,
                "tokens": hessians.tokens(*linear.key),
                "size_bytes": linear.stored_bytes,
            } | errors_of(weight, stored, scheme, hessian)
        return rows


def _whole_scales(
    linears: Sequence[Linear], values: Mapping[str, np.ndarray], recipe: Recipe
) -> dict[Key, np.float32]:
    """Scales of matrices as wholes, where formats have them; one for those that servers join."""
    matched, trained = recipe.match != "none", recipe.rounding == "trained"
    together: dict[tuple[str, frozenset[str], int | None], list[Linear]] = {}
    for linear in linears:
        if linear.scheme.scale == "e4m3":
            part, names = served_together(linear.tensor.name)
            if trained and "q_down" in names:  # training multiplies by one after the other
                names = frozenset({linear.tensor.name})
            together.setdefault((part, names, linear.index), []).append(linear)
    wholes = dict[Key, np.float32]()
    for members in together.values():
        largest = max(float(np.abs(x.weight(values)).max()) for x in members)
        for one in members:
            whole = whole_scale(largest, one.scheme)
            wholes[one.key] = llmcompressor.whole_scale(largest) if matched else whole
    return wholes


def _set_input_scales(linears: Sequence[Linear], part: Part, largest: Mapping[str, float]) -> None:
    """Store the static scales of inputs, by the largest of each parameter's."""
    for linear in linears:
        rule = linear.scheme.inputs
        if rule is None or rule.part is None:
            continue
        size, top = np.float32(largest[linear.tensor.name] or 1), ELEMENTS[rule.element].max
        scale = size / np.float32(top)
        if rule.dynamic == "local":  # the largest group gets the largest E4M3 scale
            scale = np.float32(E4M3.max * top) / size
        array = np.array([scale]).astype(numpy_dtype(input_dtype(rule.part)))
        part.stored[linear.key].parts[rule.part] = array
        part.input_scales.update({tensor.name: float(array[0]) for tensor in linear.tensors})


def _decoded(linears: Sequence[Linear], part: Part) -> dict[str, np.ndarray]:
    """The decoded values of the parameters whose matrices are quantized."""
    values: dict[str, np.ndarray] = {}
    for linear in linears:
        name, decoded = linear.tensor.name, part.stored[linear.key].decoded
        if linear.index is not None:
            empty = np.empty_like(part.values[name])
            values.setdefault(name, empty)[linear.index] = decoded
        for tensor in linear.fused:
            if isinstance(tensor.hf, FusedPart):
                rows = read_part(tensor.hf, decoded, tensor.shape)
                values[tensor.name] = np.ascontiguousarray(rows)
        if linear.index is None and not linear.fused:
            values[name] = decoded
    return values


def expert_windows(spec: ModelSpec, recipe: Recipe, linears: Sequence[Linear]) -> list[range]:
    """The experts of the matrices of a layer in ranges whose Hessians take HESSIAN_BYTES, and where
    all tokens are sent to all of no more than a token has; one empty range where there are none."""
    own = [x for x in linears if x.index is not None]
    experts = max((x.index + 1 for x in own if x.index is not None), default=0)
    widths = {x.tensor.shape[-1] for x in own}  # inputs and inner width
    size = max(1, HESSIAN_BYTES // max(1, 4 * sum(width**2 for width in widths)))
    if own and recipe.experts == "all":
        part = spec.layers[own[0].tensor.layer or 0].mlp
        assert isinstance(part, Experts)
        size = min(size, part.router.top_k)
    return [range(i, min(i + size, experts)) for i in range(0, max(experts, 1), size)]


def in_window(linear: Linear, experts: range) -> bool:
    """Whether a matrix is calibrated with these experts; those of no expert are with the first."""
    return experts.start == 0 if linear.index is None else linear.index in experts


def is_calibrated(linear: Linear, hessians: Hessians) -> bool:
    """Whether a matrix had inputs, and one of an expert at least LEAST_TOKENS of them."""
    return hessians.tokens(*linear.key) >= (1 if linear.index is None else LEAST_TOKENS)


def hessian_of(linear: Linear, hessians: Hessians) -> torch.Tensor | None:
    """H of a matrix; None for one that is not calibrated."""
    return hessians.of(*linear.key) if is_calibrated(linear, hessians) else None


def check_finite(name: str, array: np.ndarray) -> None:
    """Raise BadData for NaN and infinite values."""
    if not np.isfinite(array).all():
        wrong = int((~np.isfinite(array)).sum())
        raise BadData(f"quantize: {name} has {wrong:,} NaN or infinite values of {array.size:,}")


def finite(arrays: Mapping[str, np.ndarray], of: str = "") -> dict[str, np.ndarray]:
    """Writable float32 copies; raises BadData for NaN and infinite values. of: what messages say
    behind a name."""
    copies: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        copies[name] = np.array(array, np.float32)
        check_finite(name + of, copies[name])
    return copies
