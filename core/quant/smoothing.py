"""Scales of channels that are moved from the inputs of matrices into the matrices, before rounding.

A layer computes the same with a norm's weights divided by s and the columns of the matrices that
read it multiplied by s. The factors s[I] are chosen so that rounding costs less:
  awq          AWQ (Lin et al. 2023, arXiv 2306.00978): s = mean|x|^r, or this over mean|w|^(1-r),
               normalized by the root of its largest and smallest, with the r of GRID that has the
               least squared error of ROWS of the outputs, scales as by `absmax`. Where, with
               scales as they are stored, it is not below WORTH of that without factors, none are
               moved: smaller differences of this error have no effect on held-out text, or a bad
               one. AWQ's second part is in `clipping`.
  smoothquant  SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): s = max|x|^α / max|w|^(1-α)
The factors that are used are those of the norm after its rounding to BF16: nothing is lost by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sabia.core.numerics.floats import round_bfloat16
from sabia.core.numerics.scales import Method, choose_scales, decode, encode
from sabia.core.numerics.schemes import Scheme
from sabia.core.quant.hessians import Hessians
from sabia.core.quant.recipe import Linear, Recipe, name_in_layer
from sabia.core.spec import ModelSpec, TensorSpec

GRID = np.arange(20) / 20  # exponents of AWQ; 0 moves nothing
ROWS = 128  # of each matrix, evenly spaced
LEAST = 1e-4
WORTH = 0.95  # of the error without factors
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Move:
    """norm: whose weights are divided; readers: the matrices that read it; offset: added to the
    stored weights of the norm."""

    norm: str
    readers: tuple[TensorSpec, ...]
    offset: float


def moves(spec: ModelSpec, layer: int) -> list[Move]:
    """Where factors can be moved in a layer."""
    table = {name_in_layer(t): t for t in spec.tensors() if t.layer == layer}
    norms, made = spec.layers[layer].norms, list[Move]()
    for part in ("attn", "mlp"):
        readers = tuple(
            t
            for name, t in table.items()
            if name.startswith("mlp.") == (part == "mlp")
            and len(t.shape) - t.stacked > 1
            and t.axes[-1] == "embed"
        )
        if spec.norm_kind == "rms" and norms.before(part) and readers:
            made.append(Move(table[f"{part}.norm"].name, readers, norms.offset))
    return made


def smooth(
    spec: ModelSpec,
    layer: int,
    values: Arrays,
    linears: Sequence[Linear],
    recipe: Recipe,
    hessians: Hessians,
) -> None:
    """Move factors between the `values` of a layer, where a matrix that reads them is rounded.

    linears: those of the layer that are rounded. hessians: of their inputs; for experts those of
    another matrix with the same inputs (a router) are taken.
    """
    for move in moves(spec, layer):
        names = {t.name for t in move.readers}
        own = [x for x in linears if names & {t.name for t in x.tensors}]
        known = next((t.name for t in move.readers if hessians.tokens(t.name)), None)
        if not own or known is None:
            continue
        if recipe.smooth == "awq":
            factors = _awq(own, values, hessians, known, recipe.scale)
        else:
            factors = _smoothquant(move, values, hessians.peaks(known), recipe.alpha)
        _apply(move, values, factors, {t.name for x in linears for t in x.tensors})


def _awq(
    linears: Sequence[Linear],
    values: Mapping[str, np.ndarray],
    hessians: Hessians,
    name: str,
    method: Method,
) -> np.ndarray:
    """The factors [I] with the least Σ |X (W' - W)ᵀ|² over the matrices."""
    mean, h = hessians.means(name), hessians.of(name)
    assert h is not None
    h = h.float()
    whole = [(x.scheme, x.weight(values)) for x in linears]
    parts = [(scheme, w[:: max(1, len(w) // ROWS)]) for scheme, w in whole]
    sizes = np.mean([np.abs(w).mean(0) for _, w in whole], 0)  # mean|w| of each column, [I]
    best, least = np.ones_like(mean), np.inf
    for exponent in GRID:
        alone = np.maximum(mean, LEAST) ** exponent
        for factors in (alone, alone / np.maximum(sizes, LEAST) ** (1 - exponent)):
            factors = np.maximum(factors, LEAST)
            factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
            error = sum(_error(w, factors, scheme, h) for scheme, w in parts)
            if error < least:
                best, least = factors, error
    plain = np.ones_like(best)
    before, after = (sum(_error(w, f, scheme, h, method) for scheme, w in parts)
                     for f in (plain, best))  # fmt: skip
    return best if after < WORTH * before else plain


def _error(
    weight: np.ndarray,
    factors: np.ndarray,
    scheme: Scheme,
    h: torch.Tensor,
    method: Method = "absmax",
) -> float:
    """|X (W' - W)ᵀ|², up to a factor, of weight[O, I] rounded with the factors."""
    scaled = weight * factors
    scales = choose_scales(scaled, scheme, method)
    off = decode(encode(scaled, scales, scheme), scales, scheme) / factors - weight
    m = torch.from_numpy(off).to(h.device)
    return float(((m @ h) * m).sum())


def _smoothquant(
    move: Move, values: Mapping[str, np.ndarray], peaks: np.ndarray, alpha: float
) -> np.ndarray:
    columns = [np.abs(values[t.name]).reshape(-1, t.shape[-1]).max(0) for t in move.readers]
    largest = np.max(columns, 0)  # max|w| of each column, [I]
    factors = np.maximum(peaks, LEAST) ** alpha / np.maximum(largest, LEAST) ** (1 - alpha)
    return np.asarray(np.maximum(factors, LEAST), np.float32)


def _apply(move: Move, values: Arrays, factors: np.ndarray, rounded: set[str]) -> None:
    stored = values[move.norm]
    made = round_bfloat16((stored + move.offset) / factors - move.offset)
    before, after = stored + move.offset, made + move.offset
    exact = (before != 0) & (after != 0)
    factors = np.where(exact, before / np.where(exact, after, 1), 1).astype(np.float32)
    values[move.norm] = np.where(exact, made, stored)
    for tensor in move.readers:
        scaled = values[tensor.name] * factors
        values[tensor.name] = scaled if tensor.name in rounded else round_bfloat16(scaled)
