"""Preemptible chips against on-demand ones: which bill is smaller, and from when on.

A preemptible cluster is stopped more often, so it works longer for the same run; it is cheaper iff
p_spot · E_spot < p_od · E_od, where E is the expected time that is paid for (process.py) and each
saves at its own best interval. The longer preemptions are apart, the smaller E_spot: there is one
mean time between preemptions at which both bills are equal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.money.bills import cost_usd
from sabia.core.plan.stops.failures import StopForecast, StopModel, forecast

SHORTEST_S, LONGEST_S = 1.0, 1e10
BISECTIONS = 25  # to a millionth


@dataclass(frozen=True)
class SpotComparison:
    """The same run on preemptible and on on-demand chips; `usd` are whole bills.

    `break_even_preemption_s`: with preemptions further apart the preemptible chips are cheaper;
    None where they never are, 0 where they always are.
    """

    spot: StopForecast
    on_demand: StopForecast
    spot_usd: float
    on_demand_usd: float
    break_even_preemption_s: float | None

    @property
    def cheaper(self) -> bool:
        """Whether the preemptible chips are."""
        return self.spot_usd < self.on_demand_usd

    @property
    def saving(self) -> float:
        """Share of the on-demand bill that preemptible chips save; negative if they cost more."""
        return 1 - self.spot_usd / self.on_demand_usd


def compare(
    model: StopModel,
    chip: Chip,
    chips: int,
    checkpoint_bytes: float,
    work_s: float,
    spot_usd_per_hour: float,
    on_demand_usd_per_hour: float,
) -> SpotComparison:
    """Both bills of a run on `chips` of `chip`, and the break-even of preemptions.

    `model` holds the preemptions of the preemptible cluster; the on-demand one has none. Raises
    UsageError without them, Infeasible where the preemptible run makes no progress.
    """
    if model.preemption_s is None:
        raise UsageError("--spot: how often are chips preempted? Give --preempt, as --preempt 6h")
    calm = replace(model, preemption_s=None, capacity_wait_s=0.0)
    spot = forecast(model, chip, chips, checkpoint_bytes, work_s)
    on_demand = forecast(calm, chip, chips, checkpoint_bytes, work_s)
    on_demand_usd = cost_usd(on_demand.billed_chip_s, on_demand_usd_per_hour)

    def excess(preemption_s: float) -> float:
        try:
            often = replace(model, preemption_s=preemption_s, capacity_wait_s=0.0)
            seen = forecast(often, chip, chips, checkpoint_bytes, work_s)
        except Infeasible:
            return math.inf
        return cost_usd(seen.billed_chip_s, spot_usd_per_hour) - on_demand_usd

    return SpotComparison(
        spot=spot,
        on_demand=on_demand,
        spot_usd=cost_usd(spot.billed_chip_s, spot_usd_per_hour),
        on_demand_usd=on_demand_usd,
        break_even_preemption_s=_crossing(excess),
    )


def _crossing(excess: Callable[[float], float]) -> float | None:
    """Where `excess` of a preemption time falls to 0, by bisection of its logarithm."""
    if excess(LONGEST_S) >= 0:
        return None
    if excess(SHORTEST_S) < 0:
        return 0.0
    low, high = math.log(SHORTEST_S), math.log(LONGEST_S)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(math.exp(middle)) >= 0 else (low, middle)
    return math.exp(high)
