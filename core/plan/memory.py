"""Bytes that training needs over the whole cluster, and how many chips can hold them.

State is bytes per parameter (weights + gradients + optimizer) by recipe, over *all* parameters:
inactive experts need memory too. Activations are those of full recomputation: each layer keeps its
input, 2 bytes (BF16) per token and hidden unit, for all tokens of the batch. With gradient
accumulation fewer tokens have activations at the same time, down to one sequence: `state + one
sequence` is the minimum, `state + batch` needs no accumulation.
"""

from dataclasses import dataclass

from sabia.core.numerics.optimizers import OPTIMIZERS

ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class StateRecipe:
    """Bytes per parameter. `durable`: the part that a checkpoint must contain."""

    name: str
    weights: float
    gradients: float
    optimizer: float
    durable: float

    @property
    def bytes_per_param(self) -> float:
        """All training state."""
        return self.weights + self.gradients + self.optimizer


# the optimizers besides AdamW: BF16 weights and gradients, FP32 master and state of square matrices
OTHER_OPTIMIZERS = [
    StateRecipe(name, 2, 2, size, size)
    for name, record in OPTIMIZERS.items()
    for size in [4 + 4 * record.state_per_parameter]
    if name != "adamw"
]
RECIPES = {
    recipe.name: recipe
    for recipe in (
        StateRecipe("adamw16", 2, 2, 12, 12),  # BF16 weights and gradients, FP32 master, m and v
        StateRecipe("megatron18", 2, 4, 12, 12),  # as adamw16 with FP32 gradients
        StateRecipe("fsdp-fp32", 4, 4, 8, 12),  # FP32 weights and gradients, m and v
        StateRecipe("jax10", 2, 0, 8, 10),  # BF16 weights, FP32 m and v, no master or gradient
        StateRecipe("bf16-moments", 2, 2, 8, 8),  # as adamw16 with BF16 m and v (DeepSeek-V3)
        *OTHER_OPTIMIZERS,
        StateRecipe("adam8bit", 2, 2, 6, 6),  # as adamw16 with 8-bit m and v
    )
}
# bytes of a frozen weight under LoRA. nf4: 4 bits and 0.127 for constants, with double quantization
# (Dettmers et al. 2023, arXiv 2305.14314, section 3); fp8 and int8: one scale for a row or more;
# int4: a BF16 scale for 64
FROZEN = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "nf4": (4 + 0.127) / 8, "int4": 0.5 + 2 / 64}
ADAPTERS = RECIPES["adamw16"]


def frozen_recipe(name: str) -> StateRecipe:
    """Frozen weights in a format of FROZEN, without the adapters."""
    return StateRecipe("lora", FROZEN[name], 0, 0, 0)
