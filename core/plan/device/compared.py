"""How far a predicted step lies from the published ones that predictions were compared with.

data/judged.toml has the band of each kind of step, with its rows, and what was compared: chips,
formats, the longest rows, the most chips (tests/bench/report_plan.py). A kind of too few rows, such
as LoRA, and what was not compared take the widest band of those with enough.
"""

from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import Chip
from sabia.core.plan.device.layout import Workload

FEWEST = 20  # rows of a band of its own
LONG = 16_384  # tokens of a long row
WORDS = {
    "dense": "dense models", "long": f"rows of {LONG} tokens and more", "mixture": "MoE models",
    "lora": "LoRA",
}  # fmt: skip


def kind_of(workload: Workload) -> str:
    """The kind of a step: lora, mixture (MoE), long (rows), or dense."""
    if workload.adapter_params is not None:
        return "lora"
    if workload.architecture.expert_params:
        return "mixture"
    return "long" if workload.sequence >= LONG else "dense"


def band_kind(workload: Workload, chip: Chip) -> str:
    """The kind whose band the step has."""
    bands = read_data("judged.toml")["band"]
    enough = {kind: band for kind, band in bands.items() if band["rows"] >= FEWEST}
    own = kind_of(workload)
    if own in enough and not _beyond(workload, chip):
        return own
    return max(enough, key=lambda kind: float(enough[kind]["slow"] / enough[kind]["fast"]))


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
    data, words = read_data("judged.toml"), _beyond(workload, chip)
    if chips > data["compared"]["most_chips"]:
        words.append(f"on more than {data['compared']['most_chips']} chips")
    lines = [f"no published step {' or '.join(words)} was compared with"] if words else []
    rows = data["band"][kind_of(workload)]["rows"]
    if rows < FEWEST:
        lines.append(f"only {rows} steps with {WORDS[kind_of(workload)]} were")
    band = f"the band is that of {WORDS[band_kind(workload, chip)]}"
    return "; ".join([*lines, band]) if lines else ""
