"""A model as data, standard library only: config.json → layers → an ordered table of tensors.

`load_spec`, `from_config` read a Hugging Face configuration; `new_config` writes one for a model
to be trained from scratch (`extend` for longer rows or new tokens); `parameter_count`,
`active_parameter_count`, `matmul_parameter_count` and `training_flops_per_token` count. The model
core, the sharding rules, the optimizer groups, the hub and the planner all read the same table,
`ModelSpec.tensors()`.
"""

from sabia.core.spec.families import families, from_config, load_spec
from sabia.core.spec.from_scratch import new_config, parse_shape
from sabia.core.spec.model import (
    ModelSpec,
    active_parameter_count,
    matmul_parameter_count,
    parameter_count,
    training_flops_per_token,
)
from sabia.core.spec.rope import inverse_frequencies
from sabia.core.spec.tensors import TensorSpec

__all__ = [
    "ModelSpec",
    "TensorSpec",
    "active_parameter_count",
    "families",
    "from_config",
    "inverse_frequencies",
    "load_spec",
    "matmul_parameter_count",
    "new_config",
    "parameter_count",
    "parse_shape",
    "training_flops_per_token",
]
