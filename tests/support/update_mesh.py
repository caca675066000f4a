"""A process of four JAX devices: each optimizer on a 2 × 2 mesh and on one device.

Prints as JSON, kind by kind, the largest difference of a parameter after ten updates.
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from update_cases import KINDS, LR, problem, rule

from sabia.core.train.optimizer.config import state_parts
from sabia.core.train.optimizer.updates_jax import apply_jax, init_jax

SHAPES = {"matrix": (16, 16), "stack": (2, 8, 8), "vector": (16,)}
SPLITS = {
    "matrix": ("fsdp", "tensor"),
    "stack": (None, "fsdp", "tensor"),
    "vector": (("fsdp", "tensor"),),
}


def trained(kind: str, mesh: Mesh) -> dict[str, np.ndarray]:
    """Parameters after ten updates on the mesh."""
    rules = {k: rule("adamw" if kind in ("muon", "soap") and len(s) == 1 else kind)
             for k, s in SHAPES.items()}  # fmt: skip
    split = {k: NamedSharding(mesh, PartitionSpec(*axes)) for k, axes in SPLITS.items()}
    whole = NamedSharding(mesh, PartitionSpec())
    parts = {
        k: {p: whole if w else split[k] for p, (_, w) in state_parts(rules[k], s).items()}
        for k, s in SHAPES.items()
    }
    params, grads = problem(SHAPES)
    params = jax.device_put(params, split)
    state = jax.jit(lambda: init_jax(SHAPES, rules), out_shardings=parts)()

    def step(params, grads, state, count, lr):
        return apply_jax(params, grads, state, rules, count, lr)

    step = jax.jit(step, out_shardings=(split, parts))
    for count, g in enumerate(grads):
        g = jax.device_put(g, split)
        params, state = step(params, g, state, np.int32(count), np.float32(LR))
    return {k: np.asarray(v) for k, v in params.items()}


def main() -> None:
    """Compare all kinds."""
    jax.config.update("jax_num_cpu_devices", 4)
    devices = np.array(jax.devices())
    meshes = [Mesh(some, ("fsdp", "tensor")) for some in (devices.reshape(2, 2), devices[None, :1])]
    found = {}
    for kind in KINDS:
        a, b = (trained(kind, mesh) for mesh in meshes)
        found[kind] = max(float(np.abs(a[k] - b[k]).max()) for k in a)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
