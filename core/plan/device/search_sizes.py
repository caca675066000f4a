"""Over how many chips a search may go: the numbers that can be rented.

GPUs come by the node. TPUs come as slices of a torus (cloud.google.com/tpu/docs, pages of each
version, seen 2026-11): v5e and v6e as 1, 4, 8, 16, 32, 64, 128 or 256 chips and multiples of whole
pods of 256; those of three dimensions as 4, 8, 16 or 32 chips and then cubes of 4 x 4 x 4.
"""

from collections.abc import Iterator

from sabia.core.plan.chips import Chip

CUBE = 64
FLAT_SLICES = (1, 4, 8, 16, 32, 64, 128, 256)
CUBE_PARTS = (4, 8, 16, 32)
FINE = 16  # all sizes up to so many units, then as many to each doubling as half of it


def rentable(chip: Chip, limit: int, start: int = 1) -> Iterator[int]:
    """Numbers of chips from `start` to `limit` that can be rented, ascending."""
    parts: tuple[int, ...] = ()
    unit = chip.node_chips
    if chip.torus_axes == 2:
        parts, unit = FLAT_SLICES, chip.scale_up_domain
    elif chip.torus_axes == 3:
        parts, unit = CUBE_PARTS, CUBE
    yield from (n for n in parts if start <= n <= min(limit, unit - 1))
    first = max(1, -(-start // unit))
    yield from range(first * unit, limit + 1, unit)


def coarse(chip: Chip, limit: int) -> list[int]:
    """`rentable`, but of the many large ones only about FINE/2 to each doubling."""
    unit = CUBE if chip.torus_axes == 3 else chip.node_chips
    unit = chip.scale_up_domain if chip.torus_axes == 2 else unit

    def round_number(size: int) -> bool:
        units = size // unit
        return size % (unit << max(0, (units // FINE).bit_length())) == 0 or units <= FINE

    return [size for size in rentable(chip, limit) if round_number(size)]
