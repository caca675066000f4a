"""Quantization: recipes by component, calibration, GPTQ, export in compressed-tensors form."""
