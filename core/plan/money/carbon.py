"""Energy and emissions of a run: chip-hours · power · PUE · kg CO2e per kWh.

PUE (power usage effectiveness) is the power of the building over that of the machines. The carbon
intensity of the electricity differs twentyfold between grids, so a figure is always shown with the
range over INTENSITIES. The formulas reproduce LLaMA (Touvron et al. 2023, table 15: 400 W, PUE 1.1,
0.385 kg/kWh) exactly. The Llama 3.1 405B model card (30.84M hours, 700 W, 8,930 t) implies
0.414 kg/kWh. Production of the chips and power of the hosts are not counted.
"""

from sabia.core.plan.catalogue import read_data

# kg CO2e per kWh of generated electricity, by country
INTENSITIES: dict[str, float] = read_data("grids.toml")["kg_per_kwh"]


def footprint(chip_hours: float, power_w: float, pue: float, kg_per_kwh: float) -> dict[str, float]:
    """Energy and emissions of a run; kWh and metric tons of CO2e.

    `tons_co2e_low`, `tons_co2e_high`: the same energy on the grids of INTENSITIES with the least
    and the most CO2e.
    """
    energy_kwh = chip_hours * power_w / 1e3 * pue
    return {
        "chip_hours": chip_hours,
        "power_w": power_w,
        "pue": pue,
        "kg_per_kwh": kg_per_kwh,
        "energy_kwh": energy_kwh,
        "tons_co2e": energy_kwh * kg_per_kwh / 1e3,
        "tons_co2e_low": energy_kwh * min(INTENSITIES.values()) / 1e3,
        "tons_co2e_high": energy_kwh * max(INTENSITIES.values()) / 1e3,
    }
