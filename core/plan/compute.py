"""FLOPs of a training run, and whole numbers of chips and nodes.

A training token costs 6 FLOPs per active parameter (2 forward, 4 backward), 4 with LoRA, whose
frozen weights need no weight gradient. Attention over the sequence is not in this count (the 6ND
convention); MFU is measured against the same count. Numbers of chips are fractions until they are
shown, so that 63.01 and 64 differ.
"""

import math
from dataclasses import dataclass

FLOPS_PER_PARAM_TOKEN = 6
LORA_FLOPS_PER_PARAM_TOKEN = 4


@dataclass(frozen=True)
class MfuRange:
    """Usual MFU of well-tuned training, as a share of the dense BF16 peak."""

    low: float
    high: float


MFU_RANGES = {"dense": MfuRange(0.50, 0.60), "sparse": MfuRange(0.20, 0.40)}


def train_flops(active_params: float, tokens: float, lora: bool = False) -> float:
    """FLOPs of the whole run."""
    return (LORA_FLOPS_PER_PARAM_TOKEN if lora else FLOPS_PER_PARAM_TOKEN) * active_params * tokens


def whole_chips(chips: float) -> int:
    """`chips` rounded up, with a tolerance for the last bits of the division."""
    return max(1, math.ceil(chips * (1 - 1e-12)))


def whole_nodes(chips: float, node_chips: int) -> int:
    """`chips` rounded up to full nodes of `node_chips`."""
    return math.ceil(whole_chips(chips) / node_chips) * node_chips
