"""The plain form of sabia.kernels.row_products, in NumPy."""

import numpy as np


def wide(x: np.ndarray) -> np.ndarray:
    """float32 x, or the numbers whose bfloat16 bits x are."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def narrow(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """float32 values in the dtype of `like`: the nearest bfloat16 numbers, ties to even."""
    if like.dtype != np.uint16:
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


def matrix_vector(weight: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """See the interface."""
    out[:] = wide(weight) @ x


def scores(q: np.ndarray, keys: np.ndarray, first: np.ndarray, out: np.ndarray) -> None:
    """See the interface."""
    made = np.einsum("bkgn,bskn->bkgs", q, wide(keys[:, : out.shape[3]]))
    np.copyto(out, made, where=_from(first, out.shape[3]))


def weighted_sums(
    weights: np.ndarray, values: np.ndarray, first: np.ndarray, out: np.ndarray
) -> None:
    """See the interface."""
    weights = np.where(_from(first, weights.shape[3]), weights, 0)
    out[:] = np.einsum("bkgs,bskn->bkgn", weights, wide(values[:, : weights.shape[3]]))


def _from(first: np.ndarray, slots: int) -> np.ndarray:
    """[B, 1, 1, S]: whether the slot is first[b] or later."""
    return np.arange(slots) >= first[:, None, None, None]


def attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: np.ndarray, last: np.ndarray,
    out: np.ndarray, lse: np.ndarray,
) -> None:  # fmt: skip
    """See the interface."""
    group = q.shape[2] // keys.shape[2]
    keys, values = (wide(x).repeat(group, 2) for x in (keys, values))
    out[:], lse[:] = 0, 0
    for b, t in zip(*np.nonzero(first <= last), strict=True):
        seen = slice(first[b, t], last[b, t] + 1)
        s = np.einsum("hn,shn->hs", q[b, t], keys[b, seen])
        top = s.max(1)
        lse[b, t] = top + np.log(np.exp(s - top[:, None]).sum(1))
        out[b, t] = np.einsum("hs,shm->hm", np.exp(s - lse[b, t][:, None]), values[b, seen])
