"""Products of rows with a matrix on a CPU, the matrix in panels of PANEL outputs: definitions.

A step of decoding multiplies some tens of rows by every matrix, which no cache of a core holds.
oneDNN and MKL wait for memory and compute in turns then; here the next panel is fetched while one
is computed with, and eight rows share each number that is read (tests/bench/RESULTS.md). The bits
of a result depend on its row and its output alone: numbers are multiplied and added at once, in
their order, in sums of at most `depth(I)` that are then added (as oneDNN does, where measured).
"""

import numpy as np

from sabia.kernels.runtime.dispatch import engine_module

PANEL = 48


def depth(inputs: int) -> int:
    """Products that are summed up before the sum is added to the others."""
    return 512 if inputs <= 1024 else 1024


def panels_for(weight: np.ndarray, outputs: int) -> np.ndarray:
    """Panels [P, I, PANEL] for matrices like weight[O, I], of so many outputs together; what is
    beyond these is 0."""
    panels = np.empty((-(-outputs // PANEL), weight.shape[1], PANEL), weight.dtype)
    panels[-1, :, outputs - (len(panels) - 1) * PANEL :] = 0
    return panels


def fill(panels: np.ndarray, weight: np.ndarray, first: int, engine: str = "numba") -> None:
    """Write weight[O, I] to the panels, as outputs first to first + O - 1."""
    engine_module("panel_products", engine).fill(panels, weight, first)


def product(x: np.ndarray, panels: np.ndarray, out: np.ndarray, engine: str = "numba") -> None:
    """float32 out[M, O] = x[M, I] · weightᵀ, of float32 x and panels of float32, or of bfloat16 as
    uint16 (their bits)."""
    engine_module("panel_products", engine).product(x, panels, out, depth(x.shape[1]))
