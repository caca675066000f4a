"""Inputs of the matrices of a quantized model, rounded as servers round them.

`quantization_config` (compressed-tensors) names a format of inputs for groups of modules. Scales
are computed from max|x| of each token or group of its columns while the server runs, or stored. The
arithmetic is that of compressed-tensors 0.19 (`calculate_qparams`), which transformers computes:
codes of max|x| / 127.5 from -128 to 127 (INT8), of max|x| / 448 (E4M3), powers of two whose codes
may be clipped (MXFP4, MXFP8), E4M3 scales of groups next to a stored one (NVFP4). A token's largest
element lies between two INT8 codes, so a division that is not exact (XLA on CPU) chooses the other
one at times.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.numerics.compressed import STATIC_SCALES
from sabia.core.numerics.floats import E4M3
from sabia.core.numerics.integers import group_width
from sabia.core.numerics.schemes import ELEMENTS, Inputs, group_of, read_inputs
from sabia.core.ops.product import Array, Multiply, Product, Rule
from sabia.core.spec.model import ModelSpec

LEAST = 1e-30  # of max|x|, so that an input of zeros has a scale


@dataclass(frozen=True)
class InputFormat:
    """A rule, and its static scale (None where there is none)."""

    rule: Inputs
    scale: float | None = None


class RoundedInputs(Rule):
    """Rounds the inputs of matrices by parameter name, in torch. largest: `Ops.largest_input`."""

    def __init__(
        self, formats: Mapping[str, InputFormat],
        largest: Callable[[str, Array], Array] = lambda _, own: own,
    ) -> None:  # fmt: skip
        self.formats, self.largest = formats, largest

    def apply(self, product: Product, proceed: Multiply) -> list[Array]:
        """See Rule.apply; matrices with one format have one product."""
        formats = [self.formats.get(matrix.name) for matrix in product.matrices]
        results: dict[int, Array] = {}
        for one in dict.fromkeys(formats):
            numbers = [n for n, each in enumerate(formats) if each == one]
            matrices = tuple(product.matrices[n] for n in numbers)
            x = product.x
            if one is not None:
                x = rounded(x, one, partial(self.largest, matrices[0].name))
            part = proceed(product._replace(x=x, matrices=matrices))
            results |= zip(numbers, part, strict=True)
        return [results[n] for n in range(len(formats))]


def rounded(x: Array, form: InputFormat, whole: Callable[[Array], Array] = lambda own: own) -> Any:
    """x[..., I] in the values of its format; UsageError if its groups do not divide I. whole: gives
    max|x| of the whole inputs, from those of the part x."""
    from sabia.core.numerics.nearest_torch import nearest

    rule, columns = form.rule, x.shape[-1]
    parts = x if rule.group is None else x.unflatten(-1, (-1, group_width(columns, rule.group)))
    step = _step(parts, form, whole)
    return (nearest(ELEMENTS[rule.element], parts / step) * step).reshape(x.shape)


def _step(parts: Array, form: InputFormat, whole: Callable[[Array], Array]) -> Any:
    """What a code of one is worth, for parts[..., columns that share it]."""
    import torch

    rule, top = form.rule, float(ELEMENTS[form.rule.element].max)
    if rule.part and form.scale is None:
        raise UsageError(f"the scale of inputs of {rule.label()} is missing (expected in a file)")
    stored = torch.tensor(form.scale or 0, device=parts.device)
    if rule.dynamic is False:
        return stored
    axes = None if rule.strategy == "tensor" else -1
    largest = parts.abs().amax(axes, keepdim=True).clamp_min(LEAST)
    if rule.group is None:  # a group is in one part
        largest = whole(largest)
    if rule.dynamic == "local":
        scale = (stored * (largest / top)).clamp(max=E4M3.max).to(torch.float8_e4m3fn)
        scale = scale.to(parts.dtype)
        return torch.where(scale > 0, scale, 0.125) / stored
    if rule.scale == "e8m0":
        fraction, power = torch.frexp(largest)  # largest = fraction · 2^power, fraction ≥ 1/2
        power = power - 1 + (fraction >= 0.875).int() - math.floor(math.log2(top))
        return torch.ldexp(torch.ones_like(largest), power)
    # half of the range from -128 to 127, or the largest value
    return largest / (127.5 if rule.element == "int8" else top)


def input_formats(spec: ModelSpec) -> dict[str, InputFormat]:
    """The format of the inputs of each matrix by parameter name, from the model's config.json.

    Warns of formats that are not computed here: asymmetric ones, other numbers of bits. The experts
    of a layer have the largest of their static scales.
    """
    config = spec.config.get("quantization_config") or {}
    static = config.get(STATIC_SCALES, {})
    formats: dict[str, InputFormat] = {}
    unknown: set[str] = set()
    for tensor in spec.tensors() if config.get("config_groups") else ():
        if not tensor.linear:
            continue
        modules = [name.removesuffix(".weight") for name in tensor.files]
        arguments = (group_of(config, modules[0]) or {}).get("input_activations")
        if arguments is None:
            continue
        rule = read_inputs(arguments)
        if rule is None:
            unknown.add(_described(arguments))
            continue
        scales = [static[module] for module in modules if module in static]
        choose = min if rule.dynamic == "local" else max
        formats[tensor.name] = InputFormat(rule, choose(scales, default=None))
    if unknown:
        notes.warn(
            f"the model's activations are not rounded here to {', '.join(sorted(unknown))}, as a "
            "server does (formats computed here: symmetric int8, E4M3 and E2M1)"
        )
    return formats


def _described(arguments: Mapping[str, Any]) -> str:
    how = "dynamic" if arguments.get("dynamic") else "static"
    return (
        f"{arguments.get('type')}{arguments.get('num_bits')} ({how}, {arguments.get('strategy')})"
    )
