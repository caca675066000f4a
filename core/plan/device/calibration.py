"""The fitted constants of the step-time model: what each means, and the file that holds them.

`tests/bench/calibrate_plan.py` fits them on published steps (tests/core/plan/calibration_rows.toml)
and writes data/calibration.toml with the rows' fingerprint and the errors found by
cross-validation, from which the band of a prediction follows. They are never set by hand.
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
    """

    gpu: float
    tpu: float
    balance: float
    shape: float
    attention: float
    elementwise: float
    collective: float
    exposed: float


@dataclass(frozen=True)
class Calibration:
    """Constants, and how far predictions with them were off on rows that they were not fitted on.

    error: root mean square of the logarithm of predicted over published time, each source left out
    in turn; new_chip_error: each chip left out in turn. chips: those that took part.
    """

    constants: Constants
    error: float
    new_chip_error: float
    chips: tuple[str, ...]
    fingerprint: str
    date: datetime.date


@cache
def load_calibration() -> Calibration:
    """What data/calibration.toml holds."""
    found = read_data("calibration.toml")
    return Calibration(
        constants=Constants(**found["constants"]),
        error=found["errors"]["source_left_out"]["rms_log"],
        new_chip_error=found["errors"]["chip_left_out"]["rms_log"],
        chips=tuple(found["rows"]["chips"]),
        fingerprint=found["rows"]["fingerprint"],
        date=found["date"],
    )
