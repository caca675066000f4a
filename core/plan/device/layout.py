"""How a run is spread over chips: the mesh axes of `--mesh`, the micro-batch and recomputation.

Axes and their meaning are those of the trainer (core.parallel.mesh): rows of a batch are split over
data, fsdp and expert; the tokens of a row over context; heads, widths and vocabulary over tensor;
layers over pipe. In a search the numbers are NumPy arrays, one entry a candidate.
"""

from dataclasses import dataclass
from typing import Literal

from sabia.core.plan.elementwise import Number

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
AXES = ("data", "fsdp", "expert", "context", "tensor", "pipe")


@dataclass(frozen=True)
class Layout:
    """One way to spread a run.

    zero: what is split over fsdp: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too
    (arXiv 1910.02054). micro_batch: rows that one device group passes at once. virtual: stages a
    device holds (interleaved pipeline, arXiv 2104.04473). recompute: what of a layer is computed
    again in its backward pass. experts_over_tensor: tensor ranks hold different experts whole,
    not slices of each. sequence_parallel: what tensor does not split (norms, residual) is split
    by tokens instead (arXiv 2205.05198).
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
        """Devices in all."""
        return self.rows * self.model_ranks

    @property
    def rows(self) -> Number:
        """Into how many parts the rows of a batch are split."""
        return self.data * self.fsdp * self.expert

    @property
    def model_ranks(self) -> Number:
        """Devices that work on the same rows."""
        return self.context * self.tensor * self.pipe

    @property
    def expert_ranks(self) -> Number:
        """Into how many parts the set of experts is split."""
        return self.expert * (self.tensor if self.experts_over_tensor else 1)

    def accumulation(self, batch_rows: Number) -> Number:
        """Micro-batches of a step of `batch_rows` sequences; whole where the layout fits it."""
        return batch_rows / (self.rows * self.micro_batch)
