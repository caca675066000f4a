"""What is trained and its parallel layout: Workload, Layout, and Setting (both with the software).

The axes are those of the trainer (core.parallel.mesh): rows of a batch are split over data, fsdp
and expert; the tokens of a row over context; heads, widths and vocabulary over tensor; layers over
pipe. In a search the numbers are NumPy arrays, one entry per candidate. A Setting has the common
properties for the formulas of memory and of time.
"""

from dataclasses import dataclass
from typing import Literal

from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.device.stack import Recompute, Stack
from sabia.core.plan.elementwise import Number, choose
from sabia.core.plan.memory import StateRecipe


@dataclass(frozen=True)
class Layout:
    """A parallel layout.

    zero: ZeRO level over fsdp: 0 none, 1 optimizer state, 2 also gradients, 3 also weights
    (arXiv 1910.02054). micro_batch: rows per forward pass of one device group. virtual: virtual
    pipeline stages per device (arXiv 2104.04473). recompute: activation recomputation in the
    backward pass. experts_over_tensor: tensor ranks hold different whole experts, not slices of
    each. sequence_parallel: norms and residual are split by tokens over the tensor ranks
    (arXiv 2205.05198).
    """

    data: Number = 1
    fsdp: Number = 1
    expert: Number = 1
    context: Number = 1
    tensor: Number = 1
    pipe: Number = 1
    micro_batch: Number = 1
    virtual: Number = 1
    recompute: Recompute = "full"
    zero: int = 3
    experts_over_tensor: bool = False
    sequence_parallel: bool = True

    @property
    def chips(self) -> Number:
        """Number of devices."""
        return self.rows * self.model_ranks

    @property
    def rows(self) -> Number:
        """Number of parts into which the rows of a batch are split."""
        return self.data * self.fsdp * self.expert

    @property
    def model_ranks(self) -> Number:
        """Devices that share the same rows."""
        return self.context * self.tensor * self.pipe

    @property
    def expert_ranks(self) -> Number:
        """Number of parts into which the set of experts is split."""
        return self.expert * (self.tensor if self.experts_over_tensor else 1)

    def accumulation(self, batch_rows: Number) -> Number:
        """Micro-batches of a step of `batch_rows` sequences; a whole number in a valid layout."""
        return batch_rows / (self.rows * self.micro_batch)


Precision = Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4", "int8"]


@dataclass(frozen=True)
class Workload:
    """One training step.

    sequence: tokens of a row. batch_rows: sequences of an optimizer step, over all chips.
    precision: of the layers' matrix products. recipe: bytes of state per parameter. adapter_params:
    trained elements of LoRA adapters; None where all parameters are trained. packed: rows contain
    several documents without attention between them.
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


PRODUCT_BYTES = {"fp8": 1, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "int8": 1}


@dataclass(frozen=True)
class Setting:
    """A workload, its layout and the training software."""

    workload: Workload
    layout: Layout
    stack: Stack

    @property
    def model(self) -> Architecture:
        """The model."""
        return self.workload.architecture

    @property
    def trained(self) -> bool:
        """Whether all weights are trained, and so have gradients, not only adapters."""
        return self.workload.adapter_params is None

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on one device, before tensor ranks split them."""
        return self.layout.micro_batch * self.workload.sequence / self.layout.context

    @property
    def element(self) -> int:
        """Bytes per element of the residual stream and of weights in computation."""
        return 4 if self.workload.precision == "fp32" else 2

    @property
    def input_element(self) -> float | None:
        """Bytes per element of kept inputs of products, where these are kept in the low format."""
        narrow = PRODUCT_BYTES.get(self.workload.precision)
        return narrow if self.stack.keeps_narrow else None

    @property
    def token_split(self) -> Number:
        """Ranks over which sequence parallelism splits norms and residual."""
        split = self.layout.sequence_parallel and self.stack.sequence_parallel
        return self.layout.tensor if split else 1

    @property
    def sharding(self) -> Number:
        """Ranks over which ZeRO splits dense weights and their state."""
        return self.expert_sharding * (self.layout.expert if self.stack.folded_experts else 1)

    @property
    def expert_sharding(self) -> Number:
        """The same for routed experts, which the expert axis always splits."""
        return self.layout.fsdp * (self.layout.context if self.stack.folded_context else 1)

    @property
    def keeps_gradients(self) -> Number:
        """1 where gradients are allocated before a backward pass begins, else 0."""
        several = self.layout.accumulation(self.workload.batch_rows) > 1
        return choose(several, 1, 1 if self.stack.keeps_gradients else 0)
