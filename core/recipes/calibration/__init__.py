"""Calibration records of a quantization: a sample, and one that is like the use of the model."""
