"""Energy of a run and what it emits: chip-hours · power · PUE · kg CO2e per kWh.

PUE is what the building takes over what the machines take. The intensity of the electricity is the
large unknown: it differs twentyfold between grids, so a figure is always shown with the range over
INTENSITIES. Published runs that these formulas give to the last digit: LLaMA (Touvron et al. 2023,
table 15: 400 W, PUE 1.1, 0.385 kg/kWh). The Llama 3.1 405B model card (30.84M hours, 700 W,
8,930 t) implies 0.414 kg/kWh. Making the chips is not counted, nor the hosts beside them.
"""

from dataclasses import dataclass

from sabia.core.errors import UsageError

# kg CO2e per kWh of electricity made, life cycle, 2023: Ember and the Energy Institute, by
# ourworldindata.org/grapher/carbon-intensity-electricity; the world's and Norway's: Ember
INTENSITIES = {
    "Norway": 0.030,
    "France": 0.056,
    "Brazil": 0.098,
    "Canada": 0.170,
    "Germany": 0.381,
    "world": 0.481,
    "India": 0.713,
}


@dataclass(frozen=True)
class Footprint:
    """What a run takes from the grid and emits; kWh and metric tons of CO2e.

    `low_t`, `high_t`: the same energy on the cleanest and the dirtiest grid of INTENSITIES.
    """

    chip_hours: float
    power_w: float
    pue: float
    kg_per_kwh: float

    @property
    def energy_kwh(self) -> float:
        """Chips and their share of the building."""
        return self.chip_hours * self.power_w / 1e3 * self.pue

    @property
    def tons(self) -> float:
        """At the given intensity."""
        return self.energy_kwh * self.kg_per_kwh / 1e3

    @property
    def low_t(self) -> float:
        """On the cleanest grid on file."""
        return self.energy_kwh * min(INTENSITIES.values()) / 1e3

    @property
    def high_t(self) -> float:
        """On the dirtiest grid on file."""
        return self.energy_kwh * max(INTENSITIES.values()) / 1e3


def footprint(
    chip_hours: float, power_w: float | None, chip: str, pue: float, kg_per_kwh: float
) -> Footprint:
    """The footprint of `chip_hours` of `chip`. Raises UsageError where its power is not known."""
    if power_w is None:
        raise UsageError(
            f"--carbon: no power of {chip} is on file (expected a chip with power_w in chips.toml)"
        )
    return Footprint(chip_hours, power_w, pue, kg_per_kwh)
