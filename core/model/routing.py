"""The experts that tokens went to, as bytes that travel with a sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sabia.core.spec.layers import Experts
from sabia.core.spec.model import ModelSpec

ROUTED_EXPERTS = "routed_experts"  # the field of the replies of servers


@dataclass(frozen=True)
class Routing:
    """`top_k` of `experts` are chosen in each of `layers` layers."""

    layers: int
    top_k: int
    experts: int

    @classmethod
    def of(cls, spec: ModelSpec) -> "Routing | None":
        """That of a model, None for one without experts or with layers of several kinds."""
        routers = {p.router for p in (spec.layers[i].mlp for i in spec.expert_layers)
                   if isinstance(p, Experts)}  # fmt: skip
        kinds = {(router.top_k, router.experts) for router in routers}
        return cls(len(spec.expert_layers), *kinds.pop()) if len(kinds) == 1 else None

    @property
    def dtype(self) -> np.dtype:
        """Of an expert's number in the bytes."""
        return np.dtype("u1" if self.experts <= 256 else "<u2")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.dtype.itemsize

    def packed(self, parts: Sequence[np.ndarray]) -> bytes:
        """The bytes of experts [T, L, k] of consecutive tokens."""
        return np.concatenate(parts).astype(self.dtype).tobytes()

    def unpacked(self, packed: bytes) -> np.ndarray:
        """int16 [T, L, k]."""
        numbers = np.frombuffer(packed, self.dtype)
        return numbers.reshape(-1, self.layers, self.top_k).astype(np.int16)

    def check(self, packed: bytes, tokens: int) -> None:
        """Raise ValueError for what this model has not chosen for so many tokens."""
        expected = tokens * self.token_bytes
        if len(packed) != expected:
            raise ValueError(
                f"{len(packed)} bytes (expected {expected}: {self.top_k} experts for each of "
                f"{tokens} tokens in {self.layers} layers)"
            )
        if (most := np.frombuffer(packed, self.dtype).max(initial=0)) >= self.experts:
            raise ValueError(f"expert {most} (expected one below {self.experts})")
