"""The loss of one torch process of a mesh, in one precision.

Operations are wrapped from the inside out: the precision rounds the matrices that this process
multiplies, the mesh adds sharding and communication, a pipeline stage ends the forward pass after
its last layer, and adapters add products that all of these treat as any other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sabia.core.errors import UsageError
from sabia.core.model.backend import load_ops
from sabia.core.model.lora import LoraOps
from sabia.core.model.precision import Precision
from sabia.core.model.precision_backends import wrap
from sabia.core.parallel.collectives_torch import Groups
from sabia.core.parallel.ops_torch import MeshOps
from sabia.core.parallel.pipe_torch import StageOps
from sabia.core.spec.model import ModelSpec
from sabia.core.train.stepper import Setup

Tensor = torch.Tensor


class ShardedLoss:
    """loss(params, micro-batch) of this process's shards and tokens and its stage's `layers`."""

    def __init__(
        self, setup: Setup, precision: Precision, groups: Groups, layers: range | None, last: bool
    ) -> None:
        self.setup, mesh = setup, groups.mesh
        self.bf16_weights = setup.bf16_weights(precision)
        self.quantized_ops = wrap(load_ops("torch"), setup.spec, precision, setup.seed)
        self.ops: Any = self.quantized_ops
        if mesh.size > mesh.data * mesh.pipe:
            # MeshOps casts each layer's weights when it gathers them
            self.ops = MeshOps(self.ops, setup.table(), groups, self.bf16_weights, torch.bfloat16)
            self.bf16_weights = frozenset()
        if layers is not None:
            self.ops = StageOps(self.ops, layers, last)
        if setup.compiled and mesh.size > mesh.data:
            raise UsageError(f"--compile with --mesh {mesh} (expected a mesh along data alone)")
        self._loss = _compiled(self._compute, setup.spec) if setup.compiled else self._compute

    def _compute(self, params: Mapping[str, Tensor], micro: Mapping[str, Tensor]) -> Any:
        if self.bf16_weights:
            params = {k: p.bfloat16() if k in self.bf16_weights else p for k, p in params.items()}
        ops = self.ops
        if self.setup.lora is not None:
            ops = LoraOps(ops, params, self.setup.lora)
        return self.setup.loss(self.setup.spec, params, micro, ops)

    def __call__(
        self, params: Mapping[str, Tensor], micro: Mapping[str, Tensor], number: int, part: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sums (loss, weight, extras); `number` and `part` select the random bits of rounding."""
        self.quantized_ops.at(number, part)
        return self._loss(params, micro)


def _compiled(function: Callable[..., Any], spec: ModelSpec) -> Callable[..., Any]:
    """torch.compile; fp32 copies of saved tensors are recomputed in the backward pass."""
    import torch._functorch.config as settings

    # cached by the spec before tracing, because the compiler cannot trace the lock of a cache
    _ = spec.tensors(), spec.layer_names(), spec.ropes, spec.windows
    compiled = torch.compile(function)

    def call(*args: Any) -> Any:
        with settings.patch(ban_recompute_materialized_backward=False):
            return compiled(*args)

    return call
