"""The random Hadamard transform of 16, in NumPy.

y = H·(s ∘ x) on each group of 16 along an axis, with H the Sylvester matrix of order 16 over 4
(orthogonal, so products over the axis keep their value) and random signs s from the seed. It
spreads an outlier over its group before quantization (arXiv 2509.25149 §3.2). It is computed in
four stages of sums and differences and an exact factor 1/4, so that all engines round equally.
"""

import numpy as np

from sabia.kernels.quantize.definitions import mix

SIZE = 16


def signs(seed: int) -> np.ndarray:
    """[16] random signs ±1 (float32) from the seed."""
    bits = mix((seed ^ 0x48414441) & 0xFFFFFFFF)
    return np.array([1 - 2 * (bits >> i & 1) for i in range(SIZE)], np.float32)


def transform(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """x[..., C] with each group of 16 columns transformed (C: a multiple of 16), float32."""
    y = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, SIZE) * signs  # [..., C / 16, 16]
    for stride in (1, 2, 4, 8):  # H16 = H2 ⊗ H2 ⊗ H2 ⊗ H2, one factor per stage
        pairs = y.reshape(*y.shape[:-1], SIZE // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        # (a, b) → (a + b, a - b)
        y = np.stack([low + high, low - high], -2).reshape(y.shape)
    return (y * np.float32(0.25)).reshape(x.shape)
