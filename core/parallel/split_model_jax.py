"""A model over the devices of a JAX mesh; see core.parallel.split_model."""

import pickle
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sabia.core.ops.device_jax import to_device
from sabia.core.parallel.build_ops import build_ops
from sabia.core.parallel.mesh import Mesh
from sabia.core.parallel.mesh_ops_jax import MeshOps, device_mesh, partition
from sabia.core.parallel.sharding_rules import weight_split
from sabia.core.parallel.world import World
from sabia.core.spec.model import ModelSpec


class JaxSplit:
    """See SplitModel."""

    part = (0, 1)

    def __init__(self, spec: ModelSpec, mesh: Mesh, world: World) -> None:
        table = {tensor.name: tensor for tensor in spec.tensors()}
        self.devices = device_mesh(mesh, world)
        self.shardings = {
            name: NamedSharding(self.devices, partition(weight_split(tensor, mesh)))
            for name, tensor in table.items()
        }
        self.ops = build_ops("jax", spec, mesh=partial(MeshOps, table, mesh, self.devices))
        self.cached = spec
        self.rows, self.leads, self.size = mesh.rows, world.leads, world.size

    def to_mesh(self, name: str, whole: Any, dtype: str) -> Any:
        """See SplitModel."""

        def piece(index: object) -> Any:
            return to_device({name: np.asarray(whole[index])}, dtype)[name]

        return jax.make_array_from_callback(whole.shape, self.shardings[name], piece)

    def agreed(self, value: object) -> Any:
        """See SplitModel."""
        if self.size == 1:
            return value
        from jax.experimental import multihost_utils

        sent = np.frombuffer(pickle.dumps(value), np.uint8)
        length = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
        padded = np.zeros(length, np.uint8)
        padded[: min(len(sent), length)] = sent[:length]
        return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())

    def whole_vocabulary(self, logits: object) -> Any:
        """See SplitModel."""
        return logits

    def compiled(self, function: Any) -> Any:
        """See SplitModel."""
        return jax.jit(function, out_shardings=NamedSharding(self.devices, PartitionSpec()))
