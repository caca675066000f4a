"""Sizes that bound the memory of a quantization; in a file of their own, without torch."""

BATCH_TOKENS = 2_048  # of the calibration tokens that are computed together
HESSIAN_BYTES = 2 << 30  # of Hessians of experts that are held together
SENSITIVITY_TOKENS = 16_384  # of the calibration tokens on which gradients are measured
SENSITIVITY_BATCH = 512  # of those that are computed together
