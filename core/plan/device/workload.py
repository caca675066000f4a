"""What is trained, apart from where: the model, the sequence, the batch, the number formats."""

from dataclasses import dataclass
from typing import Literal

from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.memory import StateRecipe

Precision = Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4", "int8"]


@dataclass(frozen=True)
class Workload:
    """One training step's work.

    sequence: tokens of a row. batch_rows: sequences of an optimizer step, over all chips.
    precision: of the layers' matrix products. recipe: bytes held per parameter. adapter_params:
    trained elements of LoRA adapters; None where all parameters are trained. packed: rows hold
    several documents that do not see each other.
    """

    architecture: Architecture
    sequence: int
    batch_rows: int
    recipe: StateRecipe
    precision: Precision = "bf16"
    adapter_params: int | None = None
    packed: bool = False

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.sequence * self.batch_rows
