"""The plain form of sabia.kernels.row_products, in NumPy."""

import numpy as np


def _wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def matrix_vector(weight: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """See the interface."""
    out[:] = _wide(weight) @ x


def scores(q: np.ndarray, keys: np.ndarray, out: np.ndarray) -> None:
    """See the interface."""
    out[:] = np.einsum("bkgn,bskn->bkgs", q, _wide(keys[:, : out.shape[3]]))


def weighted_sums(weights: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """See the interface."""
    out[:] = np.einsum("bkgs,bskn->bkgn", weights, _wide(values[:, : weights.shape[3]]))
