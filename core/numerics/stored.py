"""Quantized matrices as files hold them, for models that are run without decoding all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.numerics import compressed, nf4
from sabia.core.numerics.nf4 import Nf4
from sabia.core.numerics.scales import Scales
from sabia.core.numerics.schemes import Scheme


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """weight[O, I] in the stored parts of a format; see `compressed`."""

    parts: Mapping[str, np.ndarray]
    scheme: Scheme
    shape: tuple[int, int]

    @cached_property
    def scales(self) -> Scales:
        """The scales, with zero points for each tile."""
        return compressed.stored_scales(self.parts, self.scheme, self.shape)

    def __getitem__(self, part: tuple[slice, slice]) -> "StoredMatrix":
        """weight[rows, columns]; ValueError where they cut what shares a scale or a word."""
        return StoredMatrix(*compressed.part_of(self.parts, self.scheme, self.shape, part))

    def decoded(self) -> np.ndarray:
        """float32 [O, I]."""
        return compressed.decode_weight(self.parts, self.scheme)


@dataclass(frozen=True, eq=False)
class StoredStack:
    """weight[E, O, I] of experts, each stored apart."""

    experts: Sequence[StoredMatrix | Nf4]

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, O, I)."""
        return (len(self.experts), *self.experts[0].shape)

    def __getitem__(self, part: tuple[slice, slice, slice]) -> "StoredStack":
        """weight[experts, rows, columns]; see StoredMatrix."""
        return StoredStack([expert[part[1:]] for expert in self.experts[part[0]]])

    def decoded(self) -> np.ndarray:
        """float32 [E, O, I]."""
        return np.stack([expert.decoded() for expert in self.experts])


Stored = StoredMatrix | StoredStack | Nf4


def is_nf4(stored: Stored) -> bool:
    """Whether all of it is in NF4."""
    parts = stored.experts if isinstance(stored, StoredStack) else [stored]
    return all(isinstance(part, Nf4) for part in parts)


def stored_matrix(
    name: str, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], shape: tuple[int, int]
) -> StoredMatrix | Nf4 | None:
    """The matrix of the files named NAME.weight, in the format of a `quantization_config`; None if
    it is not quantized, or its columns have been sorted into groups.

    Raises BadData for parts that do not fit the format or the shape.
    """
    if config.get("quant_method") == "bitsandbytes":
        coded = nf4.read(tensors, name)
        if coded is not None and coded.shape != shape:
            raise BadData(f"model: {name} has shape {coded.shape} (expected {shape})")
        return coded
    module = name.removesuffix(".weight")
    if f"{module}.weight_scale" not in tensors or f"{module}.weight_g_idx" in tensors:
        return None
    parts = compressed.parts_of(module, tensors)
    scheme = compressed.scheme_of(module, config)
    stored = StoredMatrix(parts, scheme, shape)
    if scheme.bits not in (4, 8):
        return None
    compressed.stored_scales(parts, scheme, shape)  # checked
    return stored


def part_names(name: str, config: Mapping[str, Any]) -> list[str]:
    """The names that the parts of the matrix NAME.weight may have in the files."""
    if config.get("quant_method") == "bitsandbytes":
        return [name + suffix for suffix in nf4.PARTS]
    return [f"{name.removesuffix('.weight')}.{part}" for part in compressed.PARTS]
