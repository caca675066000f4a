"""Failures, preemptions and checkpoints: how often to save and what stops cost.

Failures are Poisson: `chips` chips failing at a daily rate, and preemptions of the whole
cluster, add up to one mean time between stops M. A checkpoint of C bytes stalls the chips for
D = C / (chips · PCIe) while it is copied to host memory, then uploads for
U = C / min(chips · network, bucket) in the background. Only one upload may be in flight, so
the interval that loses least, τ = √(2·D·M) (Young 1974), is never shorter than U. The newest
checkpoint that survives a stop is U older than the newest one taken: a stop costs R + U.
Expected wall time after Daly 2006: W/τ · M · e^((R+U)/M) · (e^((τ+D)/M) − 1).
"""

import math
from dataclasses import dataclass

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.money.bills import DAY_S

WINDOW_S = 3 * DAY_S


@dataclass(frozen=True)
class StopModel:
    """What interrupts a run and how fast it is saved and brought back.

    `failures_per_chip_day` is a share (0.001 = 0.1 %), `preemption_s` the mean time between
    preemptions of the whole cluster (None: never), `spot_share` their price as a share of the
    on-demand price.
    """

    failures_per_chip_day: float = 0.001
    preemption_s: float | None = None
    restart_s: float = 15 * 60
    bucket_bytes_per_s: float = 8e9
    spot_share: float = 0.5

    def __post_init__(self) -> None:
        """Refuse what would divide by zero or pay nothing."""
        positive = {
            "--preempt": self.preemption_s,
            "--bucket-gbps": self.bucket_bytes_per_s,
            "--spot-share": self.spot_share,
        }
        for flag, value in positive.items():
            if value is not None and not value > 0:
                raise UsageError(f"{flag}: {value:g} (expected more than 0)")


@dataclass(frozen=True)
class StopForecast:
    """What a StopModel means for one cluster and run; seconds, bytes, shares."""

    chips: int
    mean_time_between_failures_s: float
    mean_time_between_stops_s: float
    failure_probability: float
    checkpoint_bytes: float
    offload_s: float
    upload_s: float
    interval_s: float
    work_s: float
    wall_s: float


def mean_time_between(chips: int, per_chip_day: float, preemption_s: float | None) -> float:
    """Seconds between stops from failures and preemptions together; inf if there are none."""
    rate = chips * per_chip_day / DAY_S + (1 / preemption_s if preemption_s else 0)
    return 1 / rate if rate else math.inf


def failure_probability(mean_s: float, window_s: float) -> float:
    """Chance of at least one stop within `window_s`."""
    return -math.expm1(-window_s / mean_s)


def offload_seconds(size_bytes: float, chips: int, host_bytes_per_s: float) -> float:
    """Time that chips stand still while a checkpoint goes to host memory."""
    return size_bytes / (chips * host_bytes_per_s)


def upload_seconds(
    size_bytes: float, chips: int, network_bytes_per_s: float, bucket_bytes_per_s: float
) -> float:
    """Time to bring a checkpoint to storage: the slower of all networks together and the bucket."""
    return size_bytes / min(chips * network_bytes_per_s, bucket_bytes_per_s)


def checkpoint_interval(offload_s: float, upload_s: float, mean_s: float) -> float:
    """Seconds from one checkpoint to the next: Young's optimum, but at least one upload."""
    return max(upload_s, math.sqrt(2 * offload_s * mean_s))


def expected_wall(
    work_s: float, interval_s: float, offload_s: float, mean_s: float, restart_s: float
) -> float:
    """Expected seconds for `work_s` of work with stops every `mean_s`.

    `restart_s` is everything a stop costs beside the work since the last checkpoint: with
    background uploads, restart + upload.
    """
    segment = interval_s + offload_s
    if math.isinf(mean_s):
        return work_s / interval_s * segment
    try:
        growth = math.exp(restart_s / mean_s) * math.expm1(segment / mean_s)
    except OverflowError:
        growth = math.inf
    return work_s / interval_s * mean_s * growth


def forecast(
    model: StopModel, chip: Chip, chips: int, checkpoint_bytes: float, work_s: float
) -> StopForecast:
    """Checkpoint interval and expected wall time for `chips` of `chip`.

    Raises UsageError where the chip's host or network rate is unknown, Infeasible where stops
    come faster than the run can be saved and brought back.
    """
    if chip.host_bytes_per_s is None or chip.network_bytes_per_s is None:
        raise UsageError(
            f"--chip: no host and network rates of {chip.name} are on file; "
            "checkpoints cannot be planned for it"
        )
    mean_s = mean_time_between(chips, model.failures_per_chip_day, model.preemption_s)
    failures_s = mean_time_between(chips, model.failures_per_chip_day, None)
    offload_s = offload_seconds(checkpoint_bytes, chips, chip.host_bytes_per_s)
    upload_s = upload_seconds(
        checkpoint_bytes, chips, chip.network_bytes_per_s, model.bucket_bytes_per_s
    )
    interval_s = checkpoint_interval(offload_s, upload_s, mean_s) if mean_s < math.inf else work_s
    wall_s = expected_wall(work_s, interval_s, offload_s, mean_s, model.restart_s + upload_s)
    if wall_s > 100 * work_s:
        raise Infeasible(
            f"checkpoints: a stop every {mean_s / 60:.0f} min leaves no progress (a save takes "
            f"{upload_s / 60:.0f} min to upload); use a faster --bucket-gbps or rarer --preempt"
        )
    return StopForecast(
        chips=chips,
        mean_time_between_failures_s=failures_s,
        mean_time_between_stops_s=mean_s,
        failure_probability=failure_probability(failures_s, WINDOW_S),
        checkpoint_bytes=checkpoint_bytes,
        offload_s=offload_s,
        upload_s=upload_s,
        interval_s=interval_s,
        work_s=work_s,
        wall_s=wall_s,
    )
