"""Inputs of the matrices of a quantized model, rounded as servers round them.

`quantization_config` (compressed-tensors) names a format of inputs for groups of modules. The
formats that servers compute per token while they run are supported: codes of max|x| / 127.5 from
-128 to 127 (INT8), and E4M3 codes of max|x| / 448 (FP8), as compressed-tensors 0.19 defines them
(`calculate_qparams`) and transformers computes them. A token's largest element lies between two
INT8 codes, so a division that is not exact (XLA on CPU) chooses the other one at times.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from sabia.core import notes
from sabia.core.ops.product import Array, Multiply, Product, Rule
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec

InputFormat = Literal["int8", "fp8"]
LEAST = 1e-30  # of max|x|, so that an input of zeros has a scale


class RoundedInputs(Rule):
    """Rounds the inputs of matrices by parameter name, in torch."""

    def __init__(self, formats: Mapping[str, InputFormat]) -> None:
        self.formats = formats

    def apply(self, product: Product, proceed: Multiply) -> list[Array]:
        """See Rule.apply; matrices with one format have one product."""
        formats = [self.formats.get(matrix.name) for matrix in product.matrices]
        results: dict[int, Array] = {}
        for one in dict.fromkeys(formats):
            x = product.x if one is None else rounded(product.x, one)
            numbers = [n for n, each in enumerate(formats) if each == one]
            matrices = tuple(product.matrices[n] for n in numbers)
            part = proceed(product._replace(x=x, matrices=matrices))
            results |= zip(numbers, part, strict=True)
        return [results[n] for n in range(len(formats))]


def rounded(x: Any, form: InputFormat) -> Any:
    """x[..., I] in the values of its format, by token."""
    import torch

    largest = x.abs().amax(-1, keepdim=True).clamp_min(LEAST)  # [..., 1]
    if form == "fp8":
        scale = largest / 448  # the largest E4M3 value
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    scale = largest / 127.5  # half of the range from -128 to 127
    return torch.round(x / scale).clamp(-128, 127) * scale


def input_formats(spec: ModelSpec) -> dict[str, InputFormat]:
    """The format of the inputs of each matrix by parameter name, from the model's config.json.

    Warns of formats that are not computed here: static scales, groups, other numbers of bits.
    """
    config = spec.config.get("quantization_config") or {}
    groups = config.get("config_groups") or {}
    formats: dict[str, InputFormat] = {}
    unknown: set[str] = set()
    for group in groups.values():
        arguments = group.get("input_activations")
        if arguments is None:
            continue
        form = _format(arguments)
        if form is None:
            unknown.add(_described(arguments))
            continue
        targets, ignored = group.get("targets", ()), config.get("ignore", ())
        formats |= {
            tensor.name: form
            for tensor in spec.tensors()
            if _matches(tensor, targets) and not _matches(tensor, ignored)
        }
    if unknown:
        notes.warn(
            f"the model's activations are not rounded here to {', '.join(sorted(unknown))}, as a "
            "server does (formats computed here: int8 and E4M3, dynamic, by token)"
        )
    return formats


def _format(arguments: Mapping[str, Any]) -> InputFormat | None:
    """The format of `input_activations`; None for one that is not computed here."""
    names: tuple[str, ...] = ("num_bits", "strategy", "dynamic", "symmetric")
    if [arguments.get(name) for name in names] != [8, "token", True, True]:
        return None
    return "fp8" if arguments.get("type") == "float" else "int8"


def _described(arguments: Mapping[str, Any]) -> str:
    how = "dynamic" if arguments.get("dynamic") else "static"
    return (
        f"{arguments.get('type')}{arguments.get('num_bits')} ({how}, {arguments.get('strategy')})"
    )


def _matches(tensor: TensorSpec, targets: Any) -> bool:
    """Whether a matrix is among the modules that `targets` name: a name, `re:PATTERN`, `Linear`."""
    if not tensor.linear:
        return False
    module = tensor.files[0].removesuffix(".weight")
    return any(
        re.match(target[3:], module) if target.startswith("re:") else target in (module, "Linear")
        for target in targets
    )
