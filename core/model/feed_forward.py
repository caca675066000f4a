"""The feed-forward parts of a layer, by the class of their settings."""

from collections.abc import Callable, Mapping

from sabia.core.model.block import INNER, Block
from sabia.core.ops.base import Array, Ops
from sabia.core.spec.layers import GatedMlp

ACTIVATIONS: Mapping[str, Callable[[Ops, Array], Array]] = {
    "silu": lambda ops, x: ops.silu(x),
    "gelu": lambda ops, x: ops.gelu(x),
    "gelu_pytorch_tanh": lambda ops, x: ops.gelu(x, tanh=True),
}


def gated(activation: str, ops: Ops, gate: Array, up: Array) -> Array:
    """activation(gate) · up."""
    if activation == "silu":
        return ops.silu_product(gate, up)
    return ACTIVATIONS[activation](ops, gate) * up


def gated_mlp(part: GatedMlp, block: Block, y: Array) -> Array:
    """down(activation(gate(y)) · up(y)) of y[B, T, D] (SwiGLU, GeGLU: arXiv 2002.05202)."""
    ops = block.ops
    gate, up = (ops.shard(x, INNER) for x in block.products(y, "mlp.gate", "mlp.up"))  # [B, T, F]
    return block.project("mlp.down", gated(part.activation, ops, gate, up))


MLPS: Mapping[type, Callable[..., Array]] = {GatedMlp: gated_mlp}
