"""The fitted constants of the step-time model: what each means, and the file that holds them.

`tests/bench/calibrate_plan.py` fits them on published steps (tests/core/plan/calibration_rows.toml;
the two that mixtures of experts have of their own on calibration_mixtures.toml) and writes
data/calibration.toml with the rows' fingerprint and the errors found by cross-validation. They are
never set by hand. The band of a prediction is what was then seen on
tables that took no part in the fit: `tests/bench/report_plan.py --write` puts it into
data/judged.toml. (Cross-validation alone promises a narrower one than those tables keep.)
"""

import datetime
from dataclasses import dataclass
from functools import cache

from sabia.core.plan.catalogue import read_data


@dataclass(frozen=True)
class Constants:
    """Few, shared by all chips and stacks.

    gpu, tpu: sustained rate of large matrix products in training over the chip's measured ceiling
    (its peak where none is published). balance: by which power of (peak FLOP per HBM byte) / 200
    that rate falls. shape: how much a product loses to small sides, over what
    its memory traffic at full HBM rate would cost. attention: rate of the attention kernel over
    that of large products. elementwise: bytes moved by norms, activations and residuals over what a
    fused implementation must move. collective: bandwidth that a ring collective reaches over the
    links' nominal one. exposed: share of a collective that stays visible where software hides it.
    grouped: what `shape` is for products of routed experts. routed_tpu: rate of these products on
    TPUs over that of large ones.
    """

    gpu: float
    tpu: float
    balance: float
    shape: float
    attention: float
    elementwise: float
    collective: float
    exposed: float
    grouped: float
    routed_tpu: float


@dataclass(frozen=True)
class Band:
    """Published over predicted time: nine of ten steps took longer than `fast`, one than `slow`.

    Each published table has the same weight, however many rows it has.
    """

    fast: float
    slow: float


@dataclass(frozen=True)
class Calibration:
    """Constants, the chips that took part in their fit, and what rows and formulas that used."""

    constants: Constants
    chips: tuple[str, ...]
    fingerprint: str
    date: datetime.date


@cache
def load_calibration() -> Calibration:
    """What data/calibration.toml holds."""
    found = read_data("calibration.toml")
    return Calibration(
        constants=Constants(**found["constants"]),
        chips=tuple(found["rows"]["chips"]),
        fingerprint=found["rows"]["fingerprint"],
        date=found["date"],
    )


@cache
def load_bands() -> dict[str, Band]:
    """What data/judged.toml holds, by kind of model: dense, mixture."""
    found = read_data("judged.toml")
    return {kind: Band(**found[kind]) for kind in ("dense", "mixture")}
