"""Number formats: BF16, FP8, FP4 and their tiles, 8- and 4-bit integers; NumPy oracles.

Files named `_torch` and `_jax` have the same rounding for training.
"""
