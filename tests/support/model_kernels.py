"""Loss and gradients of small models by the implementations that SABIA_KERNELS names.

usage: model_kernels.py BACKEND FILE MODEL…    (writes MODEL/tensor arrays to FILE, .npz)
A process of its own: the variable and the interpreters' switches are read while modules are
imported. Rows are packed, with padding behind; all terms of the loss take part.
"""

import sys
from functools import partial
from typing import Any

import mesh_cases
import numpy as np

from sabia.core.model.init import init_params
from sabia.core.parallel.mesh import make_mesh
from sabia.core.spec import ModelSpec, from_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper

CAPPED = mesh_cases.LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 28}
CAPPED |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 7}
CAPPED |= {"layer_types": ["sliding_attention", "full_attention"]}
CAPPED |= {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def model(name: str) -> tuple[ModelSpec, dict[str, Any]]:
    """(spec, parameters, twice as large as fresh ones) of a model by name."""
    if name == "capped":
        spec = from_config(CAPPED)
        params = init_params(spec, 3)
    else:
        spec, params = mesh_cases.model(name)
    return spec, {key: value * 2 for key, value in params.items()}


def found(backend: str, name: str, mesh: str) -> dict[str, np.ndarray]:
    """loss and gradients of a model, by name."""
    spec, params = model(name)
    terms = {"z_loss": 1e-2, "balance": 1e-2, "router_z": 1e-2}
    loss, placed = partial(next_token_loss, **terms), make_mesh(mesh, 8 if mesh else 1)
    stepper = make_stepper(backend, spec, params, loss, mesh=placed)
    batch = mesh_cases.batch(spec, 0, rows=2 if not mesh else 8)
    return stepper.gradients(batch) | {"loss": np.array(stepper.evaluate(batch).loss)}


def main(backend: str, file: str, *models: str) -> None:
    """Write what is found; MODEL may be MODEL@MESH, on eight virtual devices (JAX)."""
    if any("@" in name for name in models):
        import jax

        jax.config.update("jax_num_cpu_devices", 8)
    arrays = {}
    for word in models:
        name, _, mesh = word.partition("@")
        for key, value in found(backend, name, mesh).items():
            arrays[f"{word}/{key}"] = value
    np.savez(file, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
