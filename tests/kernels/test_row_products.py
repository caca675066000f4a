"""Loops of one row at a time: both engines agree, and attention over a cache with them is that of
torch's fused kernel, in groups of queries, with a window, sinks and a cap."""

from typing import Any

import numpy as np
import pytest
import torch

from sabia.kernels.attention import torch_cached
from sabia.kernels.attention.interface import attention, attention_mask
from sabia.kernels.row_products import interface, torch_arrays
from sabia.kernels.runtime.torch_support import numbers

DTYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 3), (5, 64), (33, 100)])
def test_engines_agree(rows: int, size: int, dtype: torch.dtype) -> None:
    weight, x = numbers(drawn(rows, size, dtype=dtype)), drawn(size).numpy()
    made = np.zeros((2, rows), np.float32)
    cache = numbers(drawn(2, rows + 3, 3, size, dtype=dtype))
    q, parts = drawn(2, 3, 2, size).numpy(), drawn(2, 3, 2, rows).numpy()
    found, sums = np.ones((2, 2, 3, 2, rows), np.float32), np.ones((2, *q.shape), np.float32)
    first = np.array([0, rows // 2])
    for number, engine in enumerate(("numba", "reference")):
        interface.matrix_vector(weight, x, made[number], engine)
        interface.scores(q, cache, first, found[number], engine)
        interface.weighted_sums(parts, cache, first, sums[number], engine)
    for both in (made, found, sums):
        np.testing.assert_allclose(*both, atol=2e-5)


def test_a_number_that_is_none_is_in_the_result() -> None:
    weight, out = np.ones((3, 40), np.float32), np.zeros(3, np.float32)
    weight[1, 17] = np.nan
    interface.matrix_vector(weight, np.ones(40, np.float32), out)
    assert np.isnan(out).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes", "window", "softcap", "sinks"),
    [
        (6, 2, (16, 16), None, None, False),
        (4, 4, (24, 16), 5, None, False),
        (8, 1, (16, 16), None, None, True),
        (4, 2, (16, 16), 7, 3.0, True),
    ],
)
def test_attention_of_one_query(
    heads: int, kv_heads: int, sizes: tuple[int, int], window: int | None, softcap: float | None,
    sinks: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    positions = torch.tensor([[0], [12], [4], [3]])
    q = drawn(4, 1, heads, sizes[0], dtype=dtype)
    # rows with more slots than are read
    k, v = (drawn(4, 20, kv_heads, size, dtype=dtype, seed=size)[:, :13] for size in sizes)
    mask = attention_mask(q[:, :, 0], 1, 13, slots=positions, window=window)
    settings: Any = {"softcap": softcap, "sinks": drawn(heads, seed=4) if sinks else None}
    with torch.inference_mode():
        fused = attention(q, k, v, mask, **settings)
        called = list[Any]()
        mine = torch_cached._one_query
        monkeypatch.setattr(torch_arrays, "LEAST_BYTES", 0)
        monkeypatch.setattr(torch_cached, "_one_query",
                            lambda *args: called.append(args) or mine(*args))  # fmt: skip
        in_order = attention(q, k, v, mask, **settings)
    assert called
    assert in_order.dtype == dtype
    bound = 2e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(in_order, fused, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("groups", "window", "softcap", "sinks"),
    [
        ([([0, 1, 2, 3, 4, 5], 40)], None, None, False),
        ([([0, 2, 5], 37), ([1, 3], 11)], None, None, True),
        ([([1, 2, 3], 22), ([4, 5], 1)], 25, 3.0, False),
    ],
)
def test_slots_that_rows_share(
    groups: list[tuple[list[int], int]], window: int | None, softcap: float | None, sinks: bool,
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As without groups; only the first row of a group is read up to what it shares."""
    monkeypatch.setattr(torch_arrays, "LEAST_BYTES", 0)
    q, k, v = (drawn(6, n, h, 16, dtype=dtype, seed=n + h) for n, h in ((1, 6), (50, 2), (50, 3)))
    v = v[:, :, :2].contiguous()
    for rows, slots in groups:
        k[rows, :slots], v[rows, :slots] = k[rows[0], :slots], v[rows[0], :slots]
    slots = torch.tensor([[41], [45], [40], [47], [43], [44]])
    shared = [torch_cached.SharedSlots.of(*group) for group in groups]
    settings: Any = {"softcap": softcap, "sinks": drawn(6, seed=4) if sinks else None}
    with torch.inference_mode():
        one = attention_mask(q[:, :, 0], 1, 48, slots=slots, window=window)
        plain = attention(q, k[:, :48], v[:, :48], one, **settings)
        for rows, count in groups:
            k[rows[1:], :count], v[rows[1:], :count] = torch.nan, torch.nan
        both = attention_mask(q[:, :, 0], 1, 48, slots=slots, window=window, shared=shared)
        made = attention(q, k[:, :48], v[:, :48], both, **settings)
    torch.testing.assert_close(made, plain, rtol=0, atol=2e-6 if dtype == torch.float32 else 0.01)


def test_other_layouts_and_gradients_are_left_to_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_arrays, "LEAST_BYTES", 0)
    q, k = drawn(2, 1, 4, 16), drawn(2, 20, 2, 16)
    assert torch_cached._in_order(q, k, k) is None  # a gradient is asked for
    with torch.no_grad():
        assert torch_cached._in_order(q, k, k) is not None
        assert torch_cached._in_order(q, k[:, ::2], k[:, ::2]) is None
        assert torch_cached._in_order(q, k[:1].expand(2, -1, -1, -1), k) is None
        assert torch_cached._in_order(q, k.transpose(1, 2), k) is None
        assert torch_cached._in_order(q, k.bfloat16(), k) is None
        assert torch_cached._in_order(drawn(2, 2, 4, 16), k, k) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5])
def test_attention_of_all_queries(dtype: torch.dtype, window: int | None) -> None:
    q = drawn(3, 23, 4, 12).numpy()
    k, v = (numbers(drawn(3, 30, 2, n, dtype=dtype, seed=n)) for n in (12, 7))
    last = np.tile(np.arange(23), (3, 1))
    first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
    first[1, 20:] = 30  # padding
    made = [(np.ones((3, 23, 4, 7), np.float32), np.ones((3, 23, 4), np.float32)) for _ in "ab"]
    for engine, out in zip(("numba", "reference"), made, strict=True):
        interface.attention(q, k, v, first, last, *out, engine)
    for ours, theirs in zip(*made, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)
    assert not made[0][0][1, 20:].any()
    # some queries alone, of fewer slots and rows, have the same bits
    for b, t in ((0, 0), (2, 7), (1, 19), (2, 22)):
        one, cut = (slice(b, b + 1), slice(t, t + 1)), (slice(b, b + 1), slice(t + 1))
        out, lse = np.ones((1, 1, 4, 7), np.float32), np.ones((1, 1, 4), np.float32)
        keys, values = k[cut].copy(), v[cut].copy()
        interface.attention(q[one].copy(), keys, values, first[one], last[one], out, lse)
        assert np.array_equal(out, made[0][0][one])
        assert np.array_equal(lse, made[0][1][one])
