"""The view of energy and emissions: what the run takes from the grid, and the range over grids."""

from dataclasses import asdict

from sabia.core.plan.money.carbon import INTENSITIES, Footprint, footprint
from sabia.core.plan.output.stops import paid
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import Request
from sabia.core.units import format_count


def see(asked: Request, plan: Plan) -> View:
    """The footprint of the plan's best row, with stops where they were asked about.

    Raises UsageError.
    """
    chip, said = plan.cluster.chip, asked.settings
    hours = paid(asked, plan)[0] / 3600
    seen = footprint(
        hours, chip.power_w, chip.name, said.value("pue"), said.value("carbon_intensity")
    )
    figures = asdict(seen) | {
        "energy_kwh": seen.energy_kwh,
        "tons_co2e": seen.tons,
        "tons_co2e_low": seen.low_t,
        "tons_co2e_high": seen.high_t,
    }
    return View(_line(seen), figures)


def _line(seen: Footprint) -> str:
    grids = sorted(INTENSITIES, key=lambda name: INTENSITIES[name])
    return (
        f"carbon    {format_count(seen.energy_kwh)} kWh ({seen.power_w:g} W a chip, PUE "
        f"{seen.pue:g}), {tons(seen.tons)} CO2e at {seen.kg_per_kwh:g} kg/kWh; {tons(seen.low_t)} "
        f"on the grid of {grids[0]}, {tons(seen.high_t)} of {grids[-1]}"
    )


def tons(value: float) -> str:
    """173 t, 8.9 t, 12 kg."""
    if value < 1:
        return f"{value * 1e3:.0f} kg"
    return f"{value:,.0f} t" if value >= 10 else f"{value:.1f} t"
