"""Every case of NVFP4 and FP8 through the interpreted Triton kernel: cases.npz → found.npz.

A program of its own, since the interpreter must be asked for before triton is imported. A case
`NAME.N` is the matrix NAME in the layout number N; `.s` behind it asks for stochastic rounding.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from sabia.kernels.quantize.definitions import (
    FP8,
    FP8_GRADIENT,
    FP8_TILES,
    FP8_WEIGHT_TILES,
    NVFP4,
    NVFP4_WEIGHT,
)
from sabia.kernels.quantize.interface import quantize

LAYOUTS = (
    NVFP4,
    NVFP4_WEIGHT,
    FP8,
    FP8_GRADIENT,
    FP8_TILES,
    FP8_WEIGHT_TILES,
)
KEY = (0x9E3779B9, 0x00C0FFEE)


def main(given: str, path: str) -> None:
    """Write codes, tiles and scale of each case."""
    found = {}
    for name, x in np.load(given).items():
        layout, *rest = name.split(".")[1:]
        key = KEY if rest else None
        parts = quantize(torch.from_numpy(x), LAYOUTS[int(layout)], key, implementation="triton")
        for field, part in parts._asdict().items():
            if part is not None:
                found[f"{name}/{field}"] = part.numpy()
    np.savez(path, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
