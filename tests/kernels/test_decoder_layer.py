"""A layer for one token: both engines agree, with all that a layer may have and without."""

from typing import Any

import pytest
import torch

from sabia.kernels.decoder_layer.interface import Cached, LayerWeights, decoder_layer
from sabia.kernels.row_products.torch_arrays import numbers

D, INNER, N = 24, 40, 8
BARE = {"heads": 4, "groups": 4, "rotated": 0, "biased": False, "normed": "pre", "of_heads": 0}


def layer(dtype: torch.dtype, more: dict[str, Any]) -> tuple[Any, ...]:
    """(x, weights, cos, sin, keys, values) of a layer with these settings."""
    draw, is_ = torch.Generator().manual_seed(5), BARE | more
    q, k = is_["heads"] * N, is_["groups"] * N
    gate = q if more.get("gated") else 0
    shapes = [(q, D), (k, D), (k, D), (gate, D), (D, q), (INNER, D), (INNER, D), (D, INNER)]

    def drawn(*shape: int) -> Any:
        return numbers((torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(dtype))

    def vector(size: int, wanted: Any) -> Any:
        return numbers((1 + torch.randn(size * bool(wanted), generator=draw) / 3).to(dtype))

    biases = [vector(rows, rows and is_["biased"]) for rows, _ in shapes]
    norms = [vector(D, kind in is_["normed"]) for kind in ("pre", "post") * 2]
    norms += [vector(size, is_["of_heads"]) for size in (
        (q, k) if is_["of_heads"] == "whole" else (N, N))]  # fmt: skip
    settings = 1e-6, is_.get("offset", 0.0), is_.get("offset", 0.0), is_.get("factor", 1.0), 0.3
    weights = LayerWeights(tuple(drawn(*shape) for shape in shapes), (*biases, *norms), settings)
    angles = torch.rand(is_["rotated"], generator=draw)
    cache = drawn(2, 9, is_["groups"], N)
    return drawn(D), weights, angles.cos().numpy(), angles.sin().numpy(), *cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ({}, (0, 0, 0)),
        ({"groups": 2, "rotated": N, "biased": True}, (6, 0, 6)),
        ({"groups": 1, "rotated": 4, "of_heads": "each", "gated": True, "biased": True}, (8, 3, 8)),
        ({"normed": "post", "of_heads": "whole", "rotated": N, "offset": 1.0}, (2, 0, 8)),
        ({"normed": "pre, post", "factor": 0.22, "gated": True}, (5, 0, 5)),
    ],
)
def test_engines_agree(
    more: dict[str, Any], seen: tuple[int, int, int], dtype: torch.dtype
) -> None:
    made = []
    for engine in ("numba", "reference"):
        x, weights, cos, sin, keys, values = layer(dtype, more)
        before = keys.copy(), values.copy()
        decoder_layer(x, weights, cos, sin, Cached(keys, values, *seen), engine)
        for old, new in zip(before, (keys, values), strict=True):  # one slot is written
            assert [slot for slot in range(9) if (old[slot] != new[slot]).any()] == [seen[0]]
        arrays = (torch.from_numpy(part) for part in (x, keys, values))
        made.append([part if dtype == torch.float32 else part.view(dtype) for part in arrays])
    for ours, theirs in zip(*made, strict=True):
        bound = 2e-6 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)
