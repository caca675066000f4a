"""A layer for one token: both engines agree, with all that a layer may have and without, and
several rows are as each alone."""

from typing import Any

import numpy as np
import pytest
import torch

from sabia.kernels.decoder_layer.interface import (
    Cached,
    LayerWeights,
    added,
    attend,
    decoder_layer,
    gated,
    heads,
    normed,
)
from sabia.kernels.runtime.torch_support import numbers

D, INNER, N = 24, 40, 8
BARE = {"heads": 4, "groups": 4, "rotated": 0, "biased": False, "normed": "pre", "of_heads": 0}
WIDE = {"groups": 2, "of_heads": "each", "wide": True}  # norms in float32


def layer(dtype: torch.dtype, more: dict[str, Any]) -> tuple[Any, ...]:
    """(x, weights, cos, sin, keys, values) of a layer with these settings."""
    draw, is_ = torch.Generator().manual_seed(5), BARE | more
    q, k = is_["heads"] * N, is_["groups"] * N
    gate = q if more.get("gated") else 0
    shapes = [(q, D), (k, D), (k, D), (gate, D), (D, q), (INNER, D), (INNER, D), (D, INNER)]

    def drawn(*shape: int) -> Any:
        return numbers((torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(dtype))

    def vector(size: int, wanted: Any, dtype: torch.dtype = dtype) -> Any:
        return numbers((1 + torch.randn(size * bool(wanted), generator=draw) / 3).to(dtype))

    biases = [vector(rows, rows and is_["biased"]) for rows, _ in shapes]
    of_norms = torch.float32 if more.get("wide") else dtype
    norms = [vector(D, kind in is_["normed"], of_norms) for kind in ("pre", "post") * 2]
    norms += [vector(size, is_["of_heads"], of_norms) for size in (
        (q, k) if is_["of_heads"] == "whole" else (N, N))]  # fmt: skip
    settings = 1e-6, is_.get("offset", 0.0), is_.get("offset", 0.0), is_.get("factor", 1.0), 0.3
    matrices = tuple(drawn(*shape) for shape in shapes)
    weights = LayerWeights(matrices, tuple(biases), tuple(norms), settings)
    angles = torch.rand(is_["rotated"], generator=draw)
    cache = drawn(2, 1, 9, is_["groups"], N)
    cos, sin = angles.cos()[None].numpy(), angles.sin()[None].numpy()
    return drawn(1, D), weights, cos, sin, *cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ({}, (0, 0, 0)),
        ({"groups": 2, "rotated": N, "biased": True}, (6, 0, 6)),
        ({"groups": 1, "rotated": 4, "of_heads": "each", "gated": True, "biased": True}, (8, 3, 8)),
        ({"normed": "post", "of_heads": "whole", "rotated": N, "offset": 1.0}, (2, 0, 8)),
        ({"normed": "pre, post", "factor": 0.22, "gated": True}, (5, 0, 5)),
        (WIDE, (5, 0, 5)),
    ],
)
def test_engines_agree(
    more: dict[str, Any], seen: tuple[int, int, int], dtype: torch.dtype
) -> None:
    made = []
    for engine in ("numba", "reference"):
        x, weights, cos, sin, keys, values = layer(dtype, more)
        before = keys.copy(), values.copy()
        cached = Cached(keys, values, *(np.array([slot]) for slot in seen))
        decoder_layer(x, weights, cos, sin, cached, engine)
        for old, new in zip(before, (keys, values), strict=True):  # one slot is written
            assert [slot for slot in range(9) if (old[0, slot] != new[0, slot]).any()] == [seen[0]]
        arrays = (torch.from_numpy(part) for part in (x, keys, values))
        made.append([part if dtype == torch.float32 else part.view(dtype) for part in arrays])
    for ours, theirs in zip(*made, strict=True):
        bound = 2e-6 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


def product(x: np.ndarray, matrices: Any, biases: Any) -> np.ndarray:
    """x[B, in] by several matrices with biases, in the dtype of x."""
    dtype = torch.float32 if x.dtype == np.float32 else torch.bfloat16
    made = [
        torch.from_numpy(x).view(dtype).float() @ torch.from_numpy(m).view(dtype).float().T
        for m in matrices
    ]
    both = [
        one.to(dtype) + (torch.from_numpy(b).view(dtype) if len(b) else 0)
        for one, b in zip(made, biases, strict=True)
    ]
    return numbers(torch.cat(both, -1).contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["numba", "reference"])
@pytest.mark.parametrize(
    ("more", "window"),
    [
        ({"groups": 2, "rotated": N}, 20),
        ({"groups": 1, "rotated": 4, "of_heads": "each", "biased": True}, 3),
        ({"normed": "post", "of_heads": "whole", "rotated": N, "offset": 1.0}, 20),
        ({"normed": "pre, post", "factor": 0.22}, 5),
        (WIDE, 5),
    ],
)
def test_rows_between_products_are_each_row_alone(
    more: dict[str, Any], window: int, engine: str, dtype: torch.dtype
) -> None:
    """Rows at several places, of which two know the scores of the slots that they share."""
    rows = 4
    _, weights, cos, sin, keys, values = layer(dtype, more)
    draw = torch.Generator().manual_seed(8)
    x = numbers(torch.randn(rows, D, generator=draw).to(dtype))
    angles = torch.rand(rows, cos.shape[1], generator=draw)
    cos, sin = angles.cos().numpy(), angles.sin().numpy()
    keys, values = keys.repeat(rows, 0), values.repeat(rows, 0)
    last = np.array([6, 8, 0, 5])
    cached = Cached(keys, values, last, np.maximum(last - window + 1, 0), last)
    alone = [x.copy(), keys.copy(), values.copy()]
    for b in range(rows):
        one = slice(b, b + 1)
        of_row = Cached(*(part[one] for part in (alone[1], alone[2], last, cached.first, last)))
        decoder_layer(alone[0][one], weights, cos[one], sin[one], of_row, "reference")

    eps, offset, of_heads, factor, scale = weights.numbers
    matrices, biases, norms = weights.matrices, weights.biases, weights.norms
    y = np.empty_like(x)
    normed(x, norms[0], offset, eps, y, engine)
    made = product(y, matrices[:3], biases[:3])
    groups, size = keys.shape[2:]
    q = np.empty((rows, groups, matrices[0].shape[0] // (groups * size), size), np.float32)
    settings = (of_heads, eps, scale)
    heads(made, norms[4:], settings, cos, sin, cached, q, engine)
    parts, out = np.full((*q.shape[:3], 12), np.nan, np.float32), np.empty_like(q)
    known = np.array([4, 4, 0, 0])
    wide = torch.from_numpy(keys).view(dtype).float().numpy()
    parts[:2, ..., :4] = np.einsum("bkgn,bskn->bkgs", q[:2], wide[:2, :4])
    attend(q, cached, known, parts, out, engine)
    wide = torch.from_numpy(values).view(dtype).float().numpy()
    out[:2] += np.einsum("bkgs,bskn->bkgn", parts[:2, ..., :4], wide[:2, :4])
    mixed = numbers(torch.from_numpy(out.reshape(rows, -1)).to(dtype))
    z = product(mixed, matrices[4:5], biases[4:5])
    added(x, z, norms[1], offset, eps, factor, engine)
    normed(x, norms[2], offset, eps, y, engine)
    inner = np.empty((rows, INNER), x.dtype)
    gated(product(y, matrices[5:7], biases[5:7]), inner, engine)
    added(x, product(inner, matrices[7:], biases[7:]), norms[3], offset, eps, factor, engine)
    bound = 3e-6 if dtype == torch.float32 else 0.03
    for mine, theirs in zip((x, keys, values), alone, strict=True):
        both = (torch.from_numpy(part).view(dtype) for part in (mine, theirs))
        torch.testing.assert_close(*both, rtol=bound, atol=bound)
