"""Matrices in NVFP4 and FP8."""
