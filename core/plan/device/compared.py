"""How far a predicted step lies from the published ones that predictions were compared with.

data/judged.toml has the band of each kind of model, and what was compared: chips, formats, the
longest rows, the most chips (tests/bench/report_plan.py). A kind of too few rows, such as LoRA, and
what was not compared take the band of MoE models, the widest.
"""

from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import Chip
from sabia.core.plan.device.layout import Workload

FEWEST = 20  # rows of a band of its own


def band_kind(workload: Workload, chip: Chip) -> str:
    """The name of the step's band: dense, or mixture."""
    seen = read_data("judged.toml")["compared"]
    few = workload.adapter_params is not None and seen["lora_rows"] < FEWEST
    wide = workload.architecture.expert_params or few or _beyond(workload, chip)
    return "mixture" if wide else "dense"


def _beyond(workload: Workload, chip: Chip) -> list[str]:
    seen, words = read_data("judged.toml")["compared"], list[str]()
    if chip.name not in seen["chips"]:
        words.append(f"on {chip.name}")
    if workload.precision not in seen["precisions"]:
        words.append(f"in {workload.precision}")
    if workload.sequence > seen["longest_row"]:
        words.append(f"with rows of more than {seen['longest_row']} tokens")
    if any(kind.state_products for kind in workload.architecture.layers):
        words.append("with recurrent layers")
    return words


def outside(workload: Workload, chip: Chip, chips: int) -> str:
    """In words, why the band may not hold; empty where the step is like those compared."""
    seen, words = read_data("judged.toml")["compared"], _beyond(workload, chip)
    if chips > seen["most_chips"]:
        words.append(f"on more than {seen['most_chips']} chips")
    lines = [f"no published step {' or '.join(words)} was compared with"] if words else []
    if workload.adapter_params is not None and seen["lora_rows"] < FEWEST:
        lines.append(f"only {seen['lora_rows']} steps with LoRA were")
    return "; ".join([*lines, "the band is that of MoE models"]) if lines else ""
