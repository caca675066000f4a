"""Energy and emissions of a run: chip-hours · power · PUE · kg CO2e per kWh.

PUE (power usage effectiveness) is the power of the building over that of the machines. The carbon
intensity of the electricity differs twentyfold between grids, so a figure is always shown with the
range over INTENSITIES. The formulas reproduce LLaMA (Touvron et al. 2023, table 15: 400 W, PUE 1.1,
0.385 kg/kWh) exactly. The Llama 3.1 405B model card (30.84M hours, 700 W, 8,930 t) implies
0.414 kg/kWh. Production of the chips and power of the hosts are not counted.
"""

from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data

# kg CO2e per kWh of generated electricity, by country
INTENSITIES: dict[str, float] = read_data("grids.toml")["kg_per_kwh"]


@dataclass(frozen=True)
class Footprint:
    """Energy and emissions of a run; kWh and metric tons of CO2e.

    `tons_co2e_low`, `tons_co2e_high`: the same energy on the grids of INTENSITIES with the least
    and the most CO2e.
    """

    chip_hours: float
    power_w: float
    pue: float
    kg_per_kwh: float

    @property
    def energy_kwh(self) -> float:
        """Energy of the chips times PUE."""
        return self.chip_hours * self.power_w / 1e3 * self.pue

    @property
    def tons_co2e(self) -> float:
        """Emissions at the given intensity."""
        return self.energy_kwh * self.kg_per_kwh / 1e3

    @property
    def tons_co2e_low(self) -> float:
        """Emissions on the grid with the least CO2e."""
        return self.energy_kwh * min(INTENSITIES.values()) / 1e3

    @property
    def tons_co2e_high(self) -> float:
        """Emissions on the grid with the most CO2e."""
        return self.energy_kwh * max(INTENSITIES.values()) / 1e3


def footprint(
    chip_hours: float, power_w: float | None, chip: str, pue: float, kg_per_kwh: float
) -> Footprint:
    """The footprint of `chip_hours` of `chip`. Raises UsageError if its power is not known."""
    if power_w is None:
        raise UsageError(
            f"--carbon: no power of {chip} is on file (expected a chip with power_w in chips.toml)"
        )
    return Footprint(chip_hours, power_w, pue, kg_per_kwh)
