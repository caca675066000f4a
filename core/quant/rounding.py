"""One matrix in, its stored form and its errors out: the step that every recipe repeats."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sabia.core.errors import UsageError
from sabia.core.numerics import floats, integers
from sabia.core.numerics.compressed import encode_weight
from sabia.core.numerics.schemes import Scheme
from sabia.core.quant.gptq import GptqConfig, gptq, relative_output_error
from sabia.core.quant.recipe import Recipe


@dataclass(frozen=True)
class Stored:
    """A quantized matrix: file parts by suffix, decoded values[O, I], how it was rounded."""

    parts: dict[str, np.ndarray]
    decoded: np.ndarray
    method: str


def method_of(recipe: Recipe, scheme: Scheme, hessian: torch.Tensor | None) -> str:
    """gptq or rtn; UsageError where the recipe demands GPTQ of what cannot have it."""
    if recipe.rounding == "rtn" or scheme.type == "float":
        return "rtn"
    if recipe.rounding == "gptq":
        if hessian is None:
            raise UsageError("rounding gptq needs calibration records (INPUT)")
        return "gptq"
    return "gptq" if scheme.bits <= 4 and hessian is not None else "rtn"


def store(
    weight: np.ndarray,
    scheme: Scheme,
    recipe: Recipe,
    hessian: torch.Tensor | None = None,
    name: str = "",
) -> Stored:
    """weight[O, I] (float32) in a scheme that quantizes."""
    method = method_of(recipe, scheme, hessian)
    if scheme.type == "float":
        largest = np.abs(weight).max(1, keepdims=True)
        scale = floats.round_bfloat16(largest / floats.E4M3.max)
        scale = np.where(scale > 0, scale, np.float32(1))
        codes = floats.E4M3.encode(weight / scale)
        decoded = floats.E4M3.decode(codes) * scale
    else:
        if method == "gptq" and hessian is not None:
            config = GptqConfig(
                scheme.bits, scheme.group, recipe.scale, recipe.order, recipe.damping
            )
            codes, scale = gptq(weight, hessian, config, name)
        else:
            scale = integers.choose_scales(weight, scheme.bits, scheme.group, recipe.scale)
            codes = integers.encode(weight, scale, scheme.bits)
        decoded = integers.decode(codes, scale)
    return Stored(encode_weight(codes, scale, scheme), decoded, method)


def errors_of(
    weight: np.ndarray, stored: Stored, scheme: Scheme, recipe: Recipe, hessian: Any
) -> dict[str, float | None]:
    """mse, relative_error |W'-W|/|W|, and with calibration output_error |X(W'-W)ᵀ|/|XWᵀ|.

    output_error_rtn is what rounding to nearest would have given, for comparison with GPTQ.
    """
    off = stored.decoded.astype(np.float64) - weight
    size = float(np.square(weight, dtype=np.float64).sum())
    found: dict[str, float | None] = {
        "mse": float(np.square(off).mean()),
        "relative_error": (float(np.square(off).sum()) / size) ** 0.5 if size else 0.0,
        "output_error": None,
        "output_error_rtn": None,
    }
    if hessian is None:
        return found
    found["output_error"] = relative_output_error(weight, stored.decoded, hessian)
    found["output_error_rtn"] = found["output_error"]
    if stored.method == "gptq":
        scale = integers.choose_scales(weight, scheme.bits, scheme.group, recipe.scale)
        nearest = integers.decode(integers.encode(weight, scale, scheme.bits), scale)
        found["output_error_rtn"] = relative_output_error(weight, nearest, hessian)
    return found
