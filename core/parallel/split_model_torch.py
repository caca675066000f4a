"""A model over the processes of a torch mesh; see core.parallel.split_model."""

from functools import partial
from typing import Any

import torch

from sabia.core.errors import UsageError
from sabia.core.model.lora import LoraConfig, lora_tensors
from sabia.core.parallel.build_ops import build_ops, load_ops
from sabia.core.parallel.collectives_torch import OPS_GROUPS, Groups, gathered
from sabia.core.parallel.mesh import AXES, Mesh, shard_slices, weight_split
from sabia.core.parallel.mesh_ops_torch import MeshOps
from sabia.core.parallel.split_interface import SplitModel, cached_part
from sabia.core.parallel.world import World
from sabia.core.spec.model import ModelSpec

TOGETHER = tuple(axis for axis in AXES if axis != "data")  # of processes with the same items


class TorchSplit(SplitModel):
    """See SplitModel."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, world: World) -> None:
        self.mesh, self.rank, self.vocabulary = mesh, world.rank, spec.vocab_size
        every = (*spec.tensors(), *lora_tensors(spec, LoraConfig(1)))  # of adapters of any rank
        table = {tensor.name: tensor for tensor in every}
        self.splits = {name: weight_split(tensor, mesh) for name, tensor in table.items()}
        self.groups = Groups(mesh, world.rank, (*OPS_GROUPS, TOGETHER))
        self.ops = build_ops("torch", spec, mesh=partial(MeshOps, table, self.groups))
        self.cached = cached_part(spec, mesh.tensor)
        self.part = (mesh.coordinates(world.rank)["data"], mesh.data)
        self.first = next(min(ranks) for ranks in mesh.peers(TOGETHER) if world.rank in ranks)
        self.leads = world.rank == self.first

    def to_mesh(self, name: str, whole: Any, dtype: str) -> Any:
        """See SplitModel."""
        try:
            cut = whole[shard_slices(whole.shape, self.splits[name], self.mesh, self.rank)]
        except ValueError as error:
            raise UsageError(f"--mesh: {self.mesh}: {name}: {error}") from None
        return load_ops("torch").to_device({name: cut}, dtype)[name]

    def copied(self, whole: Any, dtype: str) -> Any:
        """See SplitModel."""
        return load_ops("torch").to_device({"": whole}, dtype)[""]

    def agreed(self, value: object) -> Any:
        """See SplitModel."""
        values = [value]
        group = self.groups.along(*TOGETHER)
        if group is not None:
            torch.distributed.broadcast_object_list(values, self.first, group)
        return values[0]

    def whole_vocabulary(self, logits: Any) -> Any:
        """See SplitModel."""
        if logits.shape[-1] == self.vocabulary:
            return logits
        return gathered(logits, logits.ndim - 1, self.groups.along("tensor"))
