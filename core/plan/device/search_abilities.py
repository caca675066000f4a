"""What a training software can do with a model, by the name of its preset (data/stacks.toml).

sabia(-cpu)    core.parallel of this project: weights cut along their dimensions (so fsdp divides
               the hidden size), always ZeRO-3, no interleaving; pipelines in torch only
fsdp           torchtitan: FSDP2 with or without resharding, and all other axes; a row is cut into
               twice as many pieces as context ranks, for balance under a causal mask
fsdp-2023      PyTorch's first FSDP alone, over flat shards
megatron       Megatron-Core: distributed optimizer, sequence parallelism, interleaving, experts
               over the tensor ranks, key and value heads copied where tensor exceeds them; the
               embedding and the head may take the place of a layer each
megatron-2021  arXiv 2104.04473: data, tensor and interleaved pipelines
llama3         arXiv 2407.21783: weights stay whole between forward and backward (ZeRO-2)
maxtext        JAX and GSPMD: arrays split evenly; pipelines of repeated stages
zero-2021      DeepSpeed ZeRO-3 alone
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.device.layout import AXES, RECOMPUTE, Recompute
from sabia.core.plan.device.stack import Stack


@dataclass(frozen=True)
class Abilities:
    """What a training software can do.

    axes: those that may be above 1. zero: levels of splitting over fsdp. even_hidden: fsdp divides
    the hidden size. copied_heads: tensor may be a multiple of the key-value heads. loose_stages:
    stages may differ by a layer; otherwise the layers and up to `outer` more (embedding, head) are
    cut evenly. halves: context cuts a row into twice as many pieces (causal balance). recipes: how
    it holds state, its usual one first (empty: in any way).
    """

    axes: tuple[str, ...] = AXES
    zero: tuple[int, ...] = (3,)
    recompute: tuple[Recompute, ...] = RECOMPUTE
    interleaved: bool = False
    experts_over_tensor: tuple[bool, ...] = (False,)
    sequence_parallel: bool = True
    even_hidden: bool = False
    copied_heads: bool = False
    loose_stages: bool = False
    outer: int = 0
    halves: bool = False
    recipes: tuple[str, ...] = ()

    def choices(self, field: str) -> tuple[Any, ...]:
        """The values of a setting that is no number of devices."""
        if field == "sequence_parallel":
            return (True, False) if self.sequence_parallel else (False,)
        return tuple(getattr(self, field))


SABIA = Abilities(
    sequence_parallel=False, even_hidden=True, loose_stages=True, recipes=("fsdp-fp32", "lora")
)
TITAN = Abilities(zero=(2, 3), interleaved=True, loose_stages=True, halves=True)
ABILITIES: Mapping[str, Abilities] = {
    "sabia": SABIA,
    "sabia-cpu": SABIA,
    "fsdp": TITAN,
    "fsdp-async": TITAN,
    "fsdp-2023": Abilities(axes=("data", "fsdp"), zero=(2, 3), sequence_parallel=False),
    "megatron": Abilities(
        zero=(0, 1),
        interleaved=True,
        experts_over_tensor=(False, True),
        copied_heads=True,
        outer=2,
        halves=True,
    ),
    "megatron-2021": Abilities(
        axes=("data", "tensor", "pipe"), zero=(0,), interleaved=True, sequence_parallel=False
    ),
    "llama3": Abilities(zero=(2,), interleaved=True, outer=2, halves=True),
    "maxtext": Abilities(interleaved=True, even_hidden=True),
    "zero-2021": Abilities(axes=("fsdp",), sequence_parallel=False),
}


def abilities_of(stack: Stack, chip: Chip) -> Abilities:
    """What the software can do on this chip. Raises UsageError where nothing is known of it."""
    if stack.name not in ABILITIES:
        known = ", ".join(ABILITIES)
        raise UsageError(
            f"--stack: the layouts of {stack.name} are not known (expected one of {known}; "
            "--fixed-layout needs no search)"
        )
    found = ABILITIES[stack.name]
    if stack.name == "sabia" and chip.family == "TPU":  # which JAX drives
        return replace(found, axes=AXES[:-1])
    return found
