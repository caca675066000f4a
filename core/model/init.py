"""Initial parameters, in NumPy, so that they are bit-identical in every backend and on every host.

Matrices are normal with standard deviation `initializer_range` (0.02; not truncated), the
outputs of both branches of a layer scaled by 1/sqrt(2L) as in GPT-2 (Radford et al. 2019, §2.3);
norms 1, biases 0; `core.spec.tensors.Init` names the rest. Each tensor has its own random stream
keyed by (seed, name), so the values do not depend on the order of the table or on which tensors a
host makes.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec


def init_tensor(tensor: TensorSpec, seed: int, std: float | None = None) -> np.ndarray:
    """Initial values of one tensor, fp32; `std` replaces the table's for normal ones."""
    kind = tensor.init.kind
    if kind in ("ones", "zeros"):
        return np.full(tensor.shape, float(kind == "ones"), np.float32)
    digest = hashlib.blake2b(f"{seed}:{tensor.name}".encode(), digest_size=16).digest()
    stream = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    if kind == "rate":
        # delta net: a_log = log A, A uniform in (0.01, 16)
        return np.log(stream.uniform(0.01, 16, tensor.shape)).astype(np.float32)
    if kind == "step":
        steps = np.exp(stream.uniform(np.log(0.001), np.log(0.1), tensor.shape))
        # delta net: dt_bias with softplus(dt_bias) log-uniform in (0.001, 0.1)
        return np.log(np.expm1(steps)).astype(np.float32)
    if std is None:
        std = tensor.init.std if kind == "normal" else tensor.shape[-1] ** -0.5
    return stream.standard_normal(tensor.shape, np.float32) * np.float32(std)


class LazyParams(Mapping[str, np.ndarray]):
    """Named arrays that are created only when they are read."""

    def __init__(self, names: Sequence[str], make: Callable[[str], np.ndarray]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> np.ndarray:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def init_params(
    spec: ModelSpec, seed: int, stds: Mapping[str, float] | None = None
) -> dict[str, np.ndarray]:
    """name → fp32 array, a pure function of (spec, seed, stds).

    stds: name → standard deviation in place of the table's (μP).
    """
    stds = stds or {}
    return {t.name: init_tensor(t, seed, stds.get(t.name)) for t in spec.tensors()}
