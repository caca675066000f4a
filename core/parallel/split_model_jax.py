"""A model over the devices of a JAX mesh; see core.parallel.split_model."""

import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sabia.core.ops.base import is_stored
from sabia.core.ops.kv_cache import cache_shapes
from sabia.core.parallel.build_ops import build_ops
from sabia.core.parallel.mesh import Mesh, weight_split
from sabia.core.parallel.mesh_ops_jax import MeshOps, device_mesh
from sabia.core.parallel.split_interface import SplitModel, cached_part
from sabia.core.parallel.world import World
from sabia.core.spec.model import ModelSpec


class JaxSplit(SplitModel):
    """See SplitModel."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, world: World) -> None:
        table = {tensor.name: tensor for tensor in spec.tensors()}
        self.devices = device_mesh(mesh, world)
        self.shardings = {
            name: NamedSharding(self.devices, PartitionSpec(*weight_split(tensor, mesh)))
            for name, tensor in table.items()
        }
        self.whole = NamedSharding(self.devices, PartitionSpec())
        self.ops = build_ops("jax", spec, mesh=partial(MeshOps, table, mesh, self.devices))
        self.cached = cached_part(spec, mesh.tensor)
        shapes = (cache_shapes(one, 1, 1, "float32") for one in (spec, self.cached))
        self.of_caches = [
            {name: self._split(layer[name][0], part[name][0]) for name in layer}
            for layer, part in zip(*shapes, strict=True)
        ]
        self.rows, self.leads, self.size = mesh.rows, world.leads, world.size

    def _split(self, whole: Sequence[int], part: Sequence[int]) -> NamedSharding:
        pairs = zip(whole, part, strict=True)
        axes = ("tensor" if size != own else None for size, own in pairs)
        return NamedSharding(self.devices, PartitionSpec(*axes))

    def of_cache(self, layers: object) -> Any:
        """The layers of a cache, each device with its heads."""
        return jax.device_put(layers, self.of_caches)

    def to_mesh(self, name: str, whole: Any, dtype: str) -> Any:
        """See SplitModel."""

        if is_stored(whole):
            whole = whole.decoded()

        def piece(index: object) -> Any:
            return self.ops.to_device({name: np.asarray(whole[index])}, dtype)[name]

        if name not in self.shardings:
            return self.copied(whole, dtype)
        return jax.make_array_from_callback(whole.shape, self.shardings[name], piece)

    def copied(self, whole: Any, dtype: str) -> Any:
        """See SplitModel."""
        return jax.device_put(self.ops.to_device({"": whole}, dtype)[""], self.whole)

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

    def compiled(self, function: Any) -> Any:
        """See SplitModel."""
        return jax.jit(function, out_shardings=self.whole)
