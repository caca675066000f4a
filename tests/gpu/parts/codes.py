"""NVFP4 and FP8: codes equal the NumPy definition bit for bit, products by the chip's own units."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from cases import Case, Comparison, Device, Failed, Figures, Skipped

from sabia.core.numerics import tiles
from sabia.kernels.quantize import definitions
from sabia.kernels.quantize.definitions import Layout
from sabia.kernels.runtime.dispatch import KERNELS, Unavailable

NAMES = ("NVFP4", "NVFP4_WEIGHT", "FP8", "FP8_GRADIENT", "FP8_TILES", "FP8_WEIGHT_TILES")
KEY = (0x9E3779B9, 0x00C0FFEE)
SPECIAL = (0.0, 1e-36, 3e38, np.nan, np.inf, -np.inf)
PRODUCT_ALLOWED = 5e-3  # FP8 units of Hopper sum with fewer bits than fp32


def cases(device: Device) -> Iterator[Case]:
    """Both torch implementations, all layouts, both roundings; then products."""
    for implementation in KERNELS["quantize"].implementations["torch"]:
        for name in NAMES:
            for stochastic in (False, True):
                words = (name, implementation, "stochastic" if stochastic else "nearest")
                run = partial(codes, device, getattr(definitions, name), implementation, stochastic)
                yield Case(" / ".join(words), run)
    for name in NAMES:
        run = partial(special_values, device, getattr(definitions, name))
        yield Case(f"{name} / special values", run)
    for name, weight in (("FP8", "FP8"), ("FP8_TILES", "FP8_WEIGHT_TILES"),
                         ("FP8_GRADIENT", "FP8"), ("NVFP4", "NVFP4_WEIGHT")):  # fmt: skip
        layouts = (getattr(definitions, name), getattr(definitions, weight))
        yield Case(f"product of {name} and {weight} by units", partial(product, device, *layouts))


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Many magnitudes, zeros, subnormals, outliers and ties of rounding."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, columns)) * np.exp2(draw.integers(-8, 8, (rows, columns)))
    kind = draw.random((rows, columns))
    x = np.where(kind < 0.03, 0.0, x)
    x = np.where((kind > 0.03) & (kind < 0.04), 1e-39 * kind, x)
    x = np.where(kind > 0.9995, x * 3000, x)
    x = np.where((kind > 0.5) & (kind < 0.6), np.round(x * 4) / 4, x)
    x[: rows // 8, : columns // 4] = 0
    return x.astype(np.float32)


def _difference(device: Device, x: np.ndarray, layout: Layout, name: str, draws: bool) -> list[str]:
    """Texts of what differs between an implementation and the definition."""
    import torch

    given = torch.from_numpy(x).to(device.kind)
    run = KERNELS["quantize"].function()
    try:
        actual = run(given, layout, KEY if draws else None, implementation=name)
    except Unavailable as reason:
        raise Skipped(str(reason)) from None
    expected = tiles.encode(x, layout, tiles.uniforms(x.shape, KEY) if draws else None)
    wrong = []
    for field, mine, theirs in zip(expected._fields, actual, expected, strict=True):
        if theirs is None:
            continue
        mine, theirs = mine.cpu().numpy(), np.asarray(theirs)
        unequal = (mine != theirs) & ~(np.isnan(mine) & np.isnan(theirs))
        if mine.dtype != theirs.dtype or unequal.any():
            first = [int(i) for i in np.argwhere(np.atleast_1d(unequal))[0]]
            wrong.append(
                f"{field} {list(theirs.shape)}: {int(unequal.sum())} differ, first {first}"
            )
    return wrong


def codes(device: Device, layout: Layout, implementation: str, stochastic: bool) -> Figures:
    """Codes, tile scales and scale of matrices of odd sizes."""
    sizes = [(37, 150)] if device.tiny else [(1000, 1003), (129, 4096), (4096, 130), (1, 1)]
    for rows, columns in sizes:
        wrong = _difference(device, matrix(rows, columns), layout, implementation, stochastic)
        if wrong:
            raise Failed(f"[{rows}, {columns}]: {'; '.join(wrong)}")
    return {"elements": sum(rows * columns for rows, columns in sizes)}


def special_values(device: Device, layout: Layout) -> Figures:
    """Matrices with zeros, subnormals, huge values, NaN and infinity."""
    for value in SPECIAL:
        x = matrix(20, 150, 1) * np.float32(1e-3)
        x[3, 5] = value
        if abs(value) < 1:
            x = np.full_like(x, value)
        for implementation in KERNELS["quantize"].implementations["torch"]:
            wrong = _difference(device, x, layout, implementation, False)
            if wrong:
                raise Failed(f"{value} by {implementation}: {'; '.join(wrong)}")
    return {"values": len(SPECIAL)}


def product(device: Device, a_layout: Layout, b_layout: Layout) -> Figures:
    """Products of codes by the chip beside products of their values."""
    import torch

    from sabia.core.ops.rounding_units_torch import has_units
    from sabia.core.ops.rounding_units_torch import product as quantized_product

    if not has_units(a_layout, torch.device(device.kind)):
        raise Skipped(f"{device.name} has no units for {a_layout}")
    comparison, key = Comparison(), torch.tensor([7, 9], dtype=torch.int32, device=device.kind)
    for m, n, k in ((256, 512, 384), (130, 70, 200), (1, 16, 64)):
        a, b = (torch.from_numpy(matrix(r, k, r)).to(device.kind) for r in (m, n))
        for draws in (None, key):
            both: list[Any] = [
                quantized_product(a, a_layout, b, b_layout, torch.bfloat16, draws, units=units)
                for units in (True, False)
            ]
            words = f"[{m}, {k}] × [{n}, {k}]{', stochastic' if draws is not None else ''}"
            comparison.add(words, both[0], both[1], PRODUCT_ALLOWED)
    return comparison.check()
