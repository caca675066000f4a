"""A model over the devices of a mesh, for passes without gradients.

Weights are split as in training: over `fsdp`, gathered for each layer; over `tensor` and `expert`,
with split products. torch has one process per device: those along `data` have items of their own,
and the others compute the same rows together. In JAX rows are split over data, fsdp and expert, and
every process makes the same calls.

Generation, in torch and over data and tensor alone: processes along `tensor` decode the same rows,
each with its own heads of keys and values, and the first of them draws the tokens.
"""

from typing import Any

from sabia.core.errors import UsageError
from sabia.core.parallel.build_ops import ops_as_served
from sabia.core.parallel.mesh import Mesh, check_fits
from sabia.core.parallel.split_interface import SplitModel
from sabia.core.parallel.world import World
from sabia.core.spec.model import ModelSpec

AXES = ("data", "fsdp", "expert", "tensor")
GENERATION_AXES = ("data", "tensor")


class Beside:
    """A smaller model that every device has whole, beside one that is split over them; it draws the
    same tokens on all."""

    rows, part = 1, (0, 1)

    def __init__(self, backend: str, spec: ModelSpec, split: SplitModel) -> None:
        self.ops, self.cached = ops_as_served(backend, spec), spec
        self.leads, self.copied, self.compiled = split.leads, split.copied, split.compiled
        self.agreed = split.agreed

    def to_mesh(self, name: str, whole: object, dtype: str) -> Any:
        """See SplitModel."""
        return self.copied(whole, dtype)

    def whole_vocabulary(self, logits: object) -> Any:
        """See SplitModel."""
        return logits

    def of_cache(self, layers: object) -> Any:
        """See SplitModel."""
        return layers


def split_model(backend: str, spec: ModelSpec, mesh: Mesh, world: World) -> SplitModel:
    """A model over the mesh. UsageError where it does not fit."""
    if others := [a for a in ("context", "pipe") if mesh.along(a) > 1]:
        raise UsageError(f"--mesh: axis {others[0]} (expected {', '.join(AXES)})")
    check_fits(spec, mesh)
    if backend == "jax":
        from sabia.core.parallel.split_model_jax import JaxSplit

        return JaxSplit(spec, mesh, world)
    from sabia.core.parallel.split_model_torch import TorchSplit

    return TorchSplit(spec, mesh, world)
