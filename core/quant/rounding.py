"""Rounding of one matrix: its stored form and its errors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sabia.core.numerics import floats, integers
from sabia.core.numerics.compressed import encode_weight
from sabia.core.numerics.schemes import Scheme
from sabia.core.quant.gptq import GptqConfig, gptq, relative_output_error
from sabia.core.quant.recipe import Recipe


@dataclass(frozen=True)
class Stored:
    """A quantized matrix: file tensors by suffix, decoded values[O, I], rounding method."""

    parts: dict[str, np.ndarray]
    decoded: np.ndarray
    method: str


def store(
    weight: np.ndarray,
    scheme: Scheme,
    recipe: Recipe,
    hessian: torch.Tensor | None = None,
    name: str = "",
) -> Stored:
    """weight[O, I] (float32) in a scheme that quantizes; `name` is for messages."""
    method = "rtn"
    if scheme.type == "float":
        largest = np.abs(weight).max(1, keepdims=True)  # [O, 1]
        scale = floats.round_bfloat16(largest / floats.E4M3.max)
        scale = np.where(scale > 0, scale, np.float32(1))
        codes = floats.E4M3.encode(weight / scale)  # [O, I], uint8
        decoded = floats.E4M3.decode(codes) * scale
    else:
        if hessian is not None and (
            recipe.rounding == "gptq" or (recipe.rounding == "auto" and scheme.bits <= 4)
        ):
            method = "gptq"
            config = GptqConfig(
                scheme.bits, scheme.group, recipe.scale, recipe.order, recipe.damping
            )
            codes, scale = gptq(weight, hessian, config, name)
        else:
            scale = integers.choose_scales(weight, scheme.bits, scheme.group, recipe.scale)
            codes = integers.encode(weight, scale, scheme.bits)  # [O, I], int8
        decoded = integers.decode(codes, scale)
    return Stored(encode_weight(codes, scale, scheme), decoded, method)


def errors_of(
    weight: np.ndarray, stored: Stored, scheme: Scheme, recipe: Recipe, hessian: Any
) -> dict[str, float | None]:
    """mse, relative_error |W'-W|/|W|, and with calibration output_error |X(W'-W)ᵀ|/|XWᵀ|.

    output_error_rtn is the output_error of rounding to nearest, for comparison with GPTQ.
    """
    off = stored.decoded.astype(np.float64) - weight  # W' - W, [O, I]
    size = float(np.square(weight, dtype=np.float64).sum())  # |W|²
    errors: dict[str, float | None] = {
        "mse": float(np.square(off).mean()),
        "relative_error": (float(np.square(off).sum()) / size) ** 0.5 if size else 0.0,
        "output_error": None,
        "output_error_rtn": None,
    }
    if hessian is None:
        return errors
    errors["output_error"] = relative_output_error(weight, stored.decoded, hessian)
    errors["output_error_rtn"] = errors["output_error"]
    if stored.method == "gptq":
        scale = integers.choose_scales(weight, scheme.bits, scheme.group, recipe.scale)
        nearest = integers.decode(integers.encode(weight, scale, scheme.bits), scale)
        errors["output_error_rtn"] = relative_output_error(weight, nearest, hessian)
    return errors
