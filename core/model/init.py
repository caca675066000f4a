"""Initial parameters, in NumPy, so that every backend and every host starts bit-identically.

Matrices are normal with standard deviation `initializer_range` (0.02; not truncated), the
outputs of both branches of a layer scaled by 1/sqrt(2L) as in GPT-2 (Radford et al. 2019, §2.3);
norms 1, biases 0. Each tensor has its own random stream keyed by (seed, name), so the values do
not depend on the order of the table or on which tensors a host makes.
"""

import hashlib

import numpy as np

from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec


def init_tensor(tensor: TensorSpec, seed: int) -> np.ndarray:
    """Initial values of one tensor, fp32."""
    if tensor.init.kind != "normal":
        return np.full(tensor.shape, float(tensor.init.kind == "ones"), np.float32)
    digest = hashlib.blake2b(f"{seed}:{tensor.name}".encode(), digest_size=16).digest()
    stream = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return stream.standard_normal(tensor.shape, np.float32) * np.float32(tensor.init.std)


def init_params(spec: ModelSpec, seed: int) -> dict[str, np.ndarray]:
    """name → fp32 array, a pure function of (spec, seed)."""
    return {tensor.name: init_tensor(tensor, seed) for tensor in spec.tensors()}
