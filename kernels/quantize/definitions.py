"""Layouts, constants and the hash of quantized matrices; `interface` defines the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}
BITS = {"e2m1": (2, 1, 1), "e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}  # exponent, mantissa, bias
NAN = {"e2m1": 0, "e4m3": 0x7F, "e5m2": 0x7F}
SMALLEST_SCALE = 2.0**-100
SMALLEST_NORMAL = 2.0**-126
MIX = (16, 0x21F0AAAD, 15, 0xD35A2D97, 15)


@dataclass(frozen=True)
class Layout:
    """Format of the elements, rows and columns of a tile (None: no tiles), kind of scale."""

    element: str
    scale: str  # tensor, power2 or e4m3
    tile: tuple[int, int] | None = None

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """How many tiles a matrix has, down and across."""
        height, width = self.tile or (max(rows, 1), max(columns, 1))
        return -(-rows // height), -(-columns // width)


NVFP4 = Layout("e2m1", "e4m3", (1, 16))
NVFP4_WEIGHT = Layout("e2m1", "e4m3", (16, 16))
FP8 = Layout("e4m3", "tensor")
FP8_GRADIENT = Layout("e5m2", "tensor")
FP8_TILES = Layout("e4m3", "power2", (1, 128))
FP8_WEIGHT_TILES = Layout("e4m3", "power2", (128, 128))


class Quantized(NamedTuple):
    """codes uint8 [R, C]; tiles: E4M3 codes (uint8), float32 powers of two, or None; scale []."""

    codes: Any
    tiles: Any
    scale: Any


def mix(x: int) -> int:
    """The hash on a Python integer of 32 bits."""
    first, multiply, second, again, third = MIX
    x = ((x ^ (x >> first)) * multiply) & 0xFFFFFFFF
    x = ((x ^ (x >> second)) * again) & 0xFFFFFFFF
    return x ^ (x >> third)
