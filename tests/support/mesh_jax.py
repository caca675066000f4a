"""Trains a model on meshes of eight virtual CPU devices and prints how far they are apart.

usage: mesh_jax.py MODEL MESH…    (a mesh as --mesh has it)
Prints JSON: mesh → [largest difference of 20 losses, worst gradient, its tensor]. A process of its
own, because the number of devices is fixed when JAX starts. A rate of 3e-3, at which no near tie of
a router's scores is rounded to the other side in these runs: the flip of an expert is no error of a
mesh, but nothing can be compared behind it.
"""

import json
import sys

import jax
import mesh_cases

from sabia.core.parallel.mesh import make_mesh, parse_mesh
from sabia.core.train.stepper_factory import make_stepper

STEPS = 20
LR = {"hybrid": 1e-4}  # weights changed by 1e-7 drift by 1e-3 in 20 steps at the other rate


def run(kind: str, mesh: str) -> tuple[list[float], dict]:
    """(losses, gradients of the first batch) of a model on a mesh."""
    spec, params = mesh_cases.model(kind)
    size = 1
    for devices in parse_mesh(mesh).values():
        size *= devices
    stepper = make_stepper("jax", spec, params, mesh_cases.loss(spec), mesh=make_mesh(mesh, size))
    gradients = stepper.gradients(mesh_cases.batch(spec, 0))
    lr, batches = LR.get(kind, 3e-3), (mesh_cases.batch(spec, n) for n in range(STEPS))
    return [stepper.step(rows, lr).loss for rows in batches], gradients


def main(kind: str, *meshes: str) -> None:
    """Compare each mesh with one device."""
    jax.config.update("jax_num_cpu_devices", 8)
    losses, gradients = run(kind, "")
    report = {}
    for mesh in meshes:
        theirs, other = run(kind, mesh)
        worst = mesh_cases.apart(gradients, other)
        name = max(worst, key=worst.__getitem__)
        gap = max(abs(a - b) for a, b in zip(losses, theirs, strict=True))
        report[mesh] = [gap, worst[name], name]
    print(json.dumps({"learnt": losses[0] - losses[-1], "meshes": report}))


if __name__ == "__main__":
    main(*sys.argv[1:])
