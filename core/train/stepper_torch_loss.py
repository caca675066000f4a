"""The loss of one torch process of a mesh, in one precision."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from sabia.core.errors import UsageError
from sabia.core.ops.base import Stage
from sabia.core.ops.precision import Precision
from sabia.core.parallel.build_ops import build_ops
from sabia.core.parallel.collectives_torch import Groups
from sabia.core.spec.model import ModelSpec
from sabia.core.train.stepper import Setup
from sabia.kernels.runtime.compilations import allow_compilations

Tensor = torch.Tensor


class ShardedLoss:
    """`sums(params, micro-batch)` of this process's shards, tokens and stage of a pipeline."""

    def __init__(
        self, setup: Setup, precision: Precision, groups: Groups, stage: Stage | None
    ) -> None:
        self.setup, mesh = setup, groups.mesh
        self.bf16_weights = setup.bf16_weights(precision)
        sharded: Any = None
        if mesh.size > mesh.data * mesh.pipe:
            from sabia.core.parallel.mesh_ops_torch import ExactMeshOps, MeshOps

            # MeshOps casts each layer's weights when it gathers them
            of_mesh = ExactMeshOps if setup.exact else MeshOps
            sharded = partial(of_mesh, setup.table(), groups, self.bf16_weights, torch.bfloat16)
            self.bf16_weights = frozenset()
        settings: Any = {"precision": precision, "seed": setup.seed, "adapters": setup.lora}
        settings["exact"] = setup.exact
        self.ops = build_ops("torch", setup.spec, **settings, mesh=sharded, stage=stage)
        if setup.compiled and mesh.size > mesh.data:
            raise UsageError(f"--compile with --mesh {mesh} (expected a mesh along data alone)")
        self.sums = _compiled(self._sums, setup.spec) if setup.compiled else self._sums

    def _sums(self, params: Mapping[str, Tensor], micro: Mapping[str, Tensor]) -> Any:
        """Sums (loss, weight, extras); call `ops.at` before, which selects the random bits."""
        if self.bf16_weights:
            params = {k: p.bfloat16() if k in self.bf16_weights else p for k, p in params.items()}
        return self.setup.loss(self.setup.spec, params, micro, self.ops)


def _compiled(function: Callable[..., Any], spec: ModelSpec) -> Callable[..., Any]:
    """torch.compile; fp32 copies of saved tensors are recomputed in the backward pass."""
    import torch._functorch.config as settings

    allow_compilations()  # for the shapes of batches
    # cached by the spec before tracing, because the compiler cannot trace the lock of a cache
    _ = spec.tensors(), spec.layer_names(), spec.ropes, spec.windows
    compiled = torch.compile(function, fullgraph=True)  # part by part it would be eager in part

    def call(*args: object) -> Any:
        with settings.patch(ban_recompute_materialized_backward=False):
            return compiled(*args)

    return call
