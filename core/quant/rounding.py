"""Rounding of one matrix: its stored form and its errors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sabia.core.numerics import llmcompressor, nf4
from sabia.core.numerics.compressed import encode_weight
from sabia.core.numerics.ggml_blocks import PART, encode_blocks
from sabia.core.numerics.scales import Scales, choose_scales, decode, encode
from sabia.core.numerics.schemes import Scheme
from sabia.core.ops.product import Array
from sabia.core.quant.clipping import clipped
from sabia.core.quant.gptq import GptqConfig, gptq, output_norm
from sabia.core.quant.learned import learned
from sabia.core.quant.recipe import Recipe


@dataclass(frozen=True)
class Stored:
    """A quantized matrix: file tensors by suffix, decoded values[O, I], rounding method, scales."""

    parts: dict[str, np.ndarray]
    decoded: np.ndarray
    method: str
    scales: Scales


def method_of(scheme: Scheme, recipe: Recipe, calibrated: bool) -> str:
    """How a matrix in a scheme is rounded by a recipe: gptq, learned or rtn (to nearest)."""
    if recipe.match != "none" or scheme.bitsandbytes or not calibrated:
        return "rtn"
    narrow = scheme.bits <= 4
    if recipe.rounding == "gptq" or (recipe.rounding == "auto" and narrow):
        return "gptq"
    return "learned" if recipe.rounding == "learned" and narrow else "rtn"


def store(
    weights: Sequence[np.ndarray],
    scheme: Scheme,
    recipe: Recipe,
    hessian: torch.Tensor | None = None,
    name: str = "",
    whole: np.float32 | None = None,
) -> list[Stored]:
    """Matrices weights[i][O_i, I] (float32) in a scheme that quantizes; `name` is for messages.

    whole: the scale of a matrix (core.numerics.scales), by default its own. hessian: of the inputs,
    which they share; more than one matrix only for GPTQ, whose work on H is done once.
    """
    weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
    if scheme.bitsandbytes:
        return [_nf4(weight, scheme)]
    method = method_of(scheme, recipe, hessian is not None)
    if recipe.match != "none":
        if whole is None and scheme.scale == "e4m3":
            whole = llmcompressor.whole_scale(float(np.abs(weight).max(initial=0)))
        codes, scales = llmcompressor.rounded(
            weight, scheme, np.float32(1 if whole is None else whole)
        )
    elif hessian is not None and method == "gptq":
        config = GptqConfig(scheme, recipe.scale, recipe.order, recipe.damping, whole)
        codes, scales = gptq(weight, hessian, config, name)
    else:
        # AWQ's scales, in 4 bits: of 8 their search has nothing to win
        awq = (recipe.smooth, recipe.scale) == ("awq", "mse") and scheme.searches
        if hessian is not None and method == "rtn" and awq and scheme.bits <= 4:
            scales = clipped(weight, hessian, scheme, whole)
        else:
            scales = choose_scales(weight, scheme, recipe.scale, whole)
        if hessian is not None and method == "learned":
            codes = learned(weight, hessian, scheme, scales)
        else:
            codes = encode(weight, scales, scheme)
    if len(weights) == 1:
        return [_stored(codes, scales, scheme, method)]
    ends = np.cumsum([len(one) for one in weights])
    rows = [slice(end - len(one), end) for end, one in zip(ends, weights, strict=True)]
    return [_stored(codes[part], scales.rows(part), scheme, method) for part in rows]


def _nf4(weight: np.ndarray, scheme: Scheme) -> Stored:
    coded = nf4.encode(weight, double=scheme.scale == "u8")
    parts = {f"weight{suffix}": array for suffix, array in nf4.file_tensors(coded).items()}
    return Stored(parts, coded.decoded(), "rtn", Scales(coded.by_block()[:, None]))


def _stored(codes: np.ndarray, scales: Scales, scheme: Scheme, method: str) -> Stored:
    if scheme.format == "gguf":
        parts = {PART: encode_blocks(codes, scales, scheme)}
    else:
        parts = encode_weight(codes, scales, scheme)
    return Stored(parts, decode(codes, scales, scheme), method, scales)


def weight_errors(weight: np.ndarray, decoded: np.ndarray) -> dict[str, float]:
    """mse, and relative_error |W'-W|/|W|, of decoded values W'[O, I] of W."""
    off = decoded.astype(np.float64) - weight
    size = float(np.square(weight, dtype=np.float64).sum())  # |W|²
    return {
        "mse": float(np.square(off).mean()),
        "relative_error": (float(np.square(off).sum()) / size) ** 0.5 if size else 0.0,
    }


def errors_of(
    weight: np.ndarray, stored: Stored, scheme: Scheme, hessian: Array
) -> dict[str, float | None]:
    """mse, relative_error |W'-W|/|W|, and with calibration output_error |X(W'-W)ᵀ|/|XWᵀ|.

    output_error_rtn is the output_error of rounding to nearest with the same scales, for comparison
    with the others.
    """
    errors: dict[str, float | None] = {**weight_errors(weight, stored.decoded)}
    errors |= {"output_error": None, "output_error_rtn": None}
    if hessian is None:
        return errors
    size = output_norm(weight, hessian) or 1.0
    errors["output_error"] = output_norm(stored.decoded - weight, hessian) / size
    errors["output_error_rtn"] = errors["output_error"]
    if stored.method != "rtn":
        nearest = decode(encode(weight, stored.scales, scheme), stored.scales, scheme)
        errors["output_error_rtn"] = output_norm(nearest - weight, hessian) / size
    return errors
