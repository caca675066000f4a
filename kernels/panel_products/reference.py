"""The plain form of sabia.kernels.panel_products, in NumPy."""

import numpy as np

from sabia.kernels.row_products.reference import wide


def fill(panels: np.ndarray, weight: np.ndarray, first: int) -> None:
    """See the interface."""
    at = first + np.arange(len(weight))
    panels[at // panels.shape[2], :, at % panels.shape[2]] = weight


def product(x: np.ndarray, panels: np.ndarray, out: np.ndarray, depth: int) -> None:
    """See the interface; a product of two float32 numbers is exact in float64, and its sum with a
    third is rounded twice in a few cases in 2^29."""
    whole = wide(panels).transpose(0, 2, 1).reshape(-1, panels.shape[1])[: out.shape[1]]
    out[:] = 0
    for start in range(0, x.shape[1], depth):
        total = np.zeros_like(out)
        for i in range(start, min(start + depth, x.shape[1])):
            total[:] = np.multiply.outer(x[:, i].astype(np.float64), whole[:, i]) + total
        out += total
