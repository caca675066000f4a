"""The feed-forward parts of a layer, by the class of their settings."""

from collections.abc import Callable, Mapping

from sabia.core.model.block import INNER, Block
from sabia.core.model.ops import Array, Ops
from sabia.core.spec.layers import GatedMlp

ACTIVATIONS: Mapping[str, Callable[[Ops, Array], Array]] = {
    "silu": lambda ops, x: ops.silu(x),
    "gelu": lambda ops, x: ops.gelu(x),
    "gelu_pytorch_tanh": lambda ops, x: ops.gelu(x, tanh=True),
}


def gated_mlp(part: GatedMlp, block: Block, y: Array) -> Array:
    """down(activation(gate(y)) · up(y)) of y[B, T, D] (SwiGLU, GeGLU: arXiv 2002.05202)."""
    ops = block.ops
    gate = ops.shard(block.project("mlp.gate", y), INNER)  # [B, T, F]
    up = ops.shard(block.project("mlp.up", y), INNER)
    return block.project("mlp.down", ACTIVATIONS[part.activation](ops, gate) * up)


MLPS: Mapping[type, Callable[..., Array]] = {GatedMlp: gated_mlp}
