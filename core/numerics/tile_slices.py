"""Parts of matrices that are stored in tiles: what one device of a mesh holds of them."""

from collections.abc import Sequence


def whole_tiles(
    part: Sequence[slice], shape: Sequence[int], tile: Sequence[int | None]
) -> tuple[slice, ...]:
    """part of a matrix of this shape, counted in tiles, of which one spans a whole dimension where
    its size is None. ValueError for a part that cuts a tile."""
    made = []
    for what, one, size, each in zip(("rows", "columns"), part, shape, tile, strict=True):
        start, stop, _ = one.indices(size)
        if each is None:
            made.append(slice(None))
            continue
        if stop - start < size and (start % each or (stop - start) % each):
            raise ValueError(
                f"{size:,} {what} in parts of {stop - start:,} (expected multiples of {each}, "
                "whose codes share a scale or a word)"
            )
        made.append(slice(start // each, -(-stop // each)))
    return tuple(made)


def shape_of(part: Sequence[slice], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(len(range(size)[one]) for one, size in zip(part, shape, strict=True))
