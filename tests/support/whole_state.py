"""The state of a stepper as whole arrays by name, and such arrays as what a stepper loads."""

from collections.abc import Mapping

import numpy as np

from sabia.core.train.stepper import ReadPiece, Stepper


def whole_state(stepper: Stepper) -> dict[str, np.ndarray]:
    """Copies of all arrays of a state that the mesh does not shard."""
    return {piece.name: np.array(piece.array) for piece in stepper.pieces()}


def reading(state: Mapping[str, np.ndarray]) -> ReadPiece:
    """What reads pieces of whole arrays."""

    def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        return state[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    return read
