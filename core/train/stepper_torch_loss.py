"""The loss of a torch process at its place in the mesh, in one precision.

Operations are wrapped from the inside out: a number format sees the matrices that are multiplied
here, the mesh splits and exchanges around it, a pipeline ends the pass where its stage ends, and
adapters add products that all of these treat as any other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sabia.core.errors import UsageError
from sabia.core.model.backend import load_ops
from sabia.core.model.lora import LoraOps
from sabia.core.model.precision import Precision, wrap
from sabia.core.parallel.collectives_torch import Groups
from sabia.core.parallel.ops_torch import MeshOps
from sabia.core.parallel.pipe_torch import StageOps
from sabia.core.spec.model import ModelSpec
from sabia.core.train.stepper import Setup

Tensor = torch.Tensor


class PlacedLoss:
    """loss(params, micro-batch) of this process's shards and tokens; `layers`: of its stage."""

    def __init__(
        self, setup: Setup, precision: Precision, groups: Groups, layers: range | None, last: bool
    ) -> None:
        self.setup, mesh = setup, groups.mesh
        self.narrow = setup.narrow(precision)
        self.low = wrap(load_ops("torch"), setup.spec, precision, setup.seed)
        self.ops: Any = self.low
        if mesh.size > mesh.data * mesh.pipe:
            # here each layer's weights are cast when they are gathered
            self.ops = MeshOps(self.ops, setup.table(), groups, self.narrow, torch.bfloat16)
            self.narrow = frozenset()
        if layers is not None:
            self.ops = StageOps(self.ops, layers, last)
        if setup.compiled and mesh.size > mesh.data:
            raise UsageError(f"--compile with --mesh {mesh} (expected a mesh along data alone)")
        self._loss = _compiled(self._computed, setup.spec) if setup.compiled else self._computed

    def _computed(self, params: Mapping[str, Tensor], micro: Mapping[str, Tensor]) -> Any:
        if self.narrow:
            params = {k: p.bfloat16() if k in self.narrow else p for k, p in params.items()}
        ops = self.ops
        if self.setup.lora is not None:
            ops = LoraOps(ops, params, self.setup.lora)
        return self.setup.loss(self.setup.spec, params, micro, ops)

    def __call__(
        self, params: Mapping[str, Tensor], micro: Mapping[str, Tensor], number: int, part: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(loss, weight, extras), sums; `part` of step `number`: what rounds by chance."""
        self.low.at(number, part)
        return self._loss(params, micro)


def _compiled(function: Callable[..., Any], spec: ModelSpec) -> Callable[..., Any]:
    """torch.compile; widened copies of what is kept anyway are made again for the gradients."""
    import torch._functorch.config as settings

    # worked out here, because the compiler cannot trace the lock of what a spec caches
    _ = spec.tensors(), spec.layer_names(), spec.ropes, spec.windows
    compiled = torch.compile(function)

    def call(*args: Any) -> Any:
        with settings.patch(ban_recompute_materialized_backward=False):
            return compiled(*args)

    return call
