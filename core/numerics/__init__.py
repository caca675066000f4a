"""Number formats: BF16, FP8, 8-bit and 4-bit integers; encode, decode, NumPy oracles."""
