"""One layout of one workload under one software: what formulas of memory and of time both ask."""

from dataclasses import dataclass

from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.elementwise import Number, choose

PRODUCT_BYTES = {"fp8": 1, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "int8": 1}


@dataclass(frozen=True)
class Setting:
    """What is trained, where and with which software."""

    workload: Workload
    layout: Layout
    stack: Stack

    @property
    def model(self) -> Architecture:
        """The model."""
        return self.workload.architecture

    @property
    def tokens(self) -> Number:
        """Of a micro-batch on one device, before tensor ranks split them."""
        return self.layout.micro_batch * self.workload.sequence / self.layout.context

    @property
    def element(self) -> int:
        """Bytes of an element of the stream, and of a weight as it is computed with."""
        return 4 if self.workload.precision == "fp32" else 2

    @property
    def input_element(self) -> float | None:
        """Bytes of an element of what products read, where that is kept as they read it."""
        narrow = PRODUCT_BYTES.get(self.workload.precision)
        return narrow if self.stack.keeps_narrow else None

    @property
    def token_split(self) -> Number:
        """Tensor ranks over which norms and residual are split by tokens."""
        split = self.layout.sequence_parallel and self.stack.sequence_parallel
        return self.layout.tensor if split else 1

    @property
    def sharding(self) -> Number:
        """Ranks over which the zero level splits dense weights and their state."""
        ranks = self.layout.fsdp * (self.layout.context if self.stack.folded_context else 1)
        return ranks * (self.layout.expert if self.stack.folded_experts else 1)

    @property
    def expert_sharding(self) -> Number:
        """The same for routed experts, which the expert axis splits at any level."""
        return self.layout.fsdp * (self.layout.context if self.stack.folded_context else 1)

    @property
    def keeps_gradients(self) -> Number:
        """1 where room for gradients is taken when a backward pass begins, else 0."""
        several = self.layout.accumulation(self.workload.batch_rows) > 1
        return choose(several, 1, 1 if self.stack.keeps_gradients else 0)
