"""What of a layer's forward pass runs again in its backward pass, product by product.

A product runs again if its output is needed and was not kept (names of memory_kept.py). The
output of a layer's last product is needed by nobody but the next layer, whose input is kept: XLA
drops it, torch stops before it (torch.utils.checkpoint, early stop), Megatron runs it all the same
(`Stack.reruns_all`). So full recomputation is a third of the forward and backward work only there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.stack import Stack


@dataclass(frozen=True)
class Product:
    """One matrix product of a layer: `params` elements of weight, `output` the name it is kept by.

    inner: its smaller side, before tensor ranks split it. routed: of the experts a token visits.
    """

    output: str
    params: float
    inner: float
    routed: bool = False


LAST = "layer_output"


def products(kind: LayerKind) -> Iterator[Product]:
    """All products of a layer. A mixer's elements are shared out by the widths of its tensors."""
    attended = kind.attended_width
    widths = {
        "query": kind.query_width, "key": kind.key_width, "value": kind.value_width,
        "middle": attended,
    }  # fmt: skip
    whole = sum(widths.values())
    for name, width in widths.items():
        if width:
            yield Product(name, kind.mixer_params * width / whole, width)
    if kind.mixer_params and not whole:
        yield Product("middle", kind.mixer_params, kind.mixer_params)
    if kind.mlp_params and not kind.mlp_width:
        yield Product("router", kind.mlp_params, kind.experts)
    yield from _mlp("", kind.mlp_params, kind.mlp_width, kind.matrices, routed=False)
    width = kind.expert_width
    yield from _mlp("expert_", kind.active_expert_params, width, kind.matrices, routed=True)


def _mlp(prefix: str, params: float, width: int, matrices: int, routed: bool) -> Iterator[Product]:
    if not params or not width:
        return
    for name in ("gate", "up") if matrices == 3 else ("up",):
        yield Product(prefix + name, params / matrices, width, routed)
    yield Product(LAST, params / matrices, width, routed)


def runs_again(output: str, layout: Layout, stack: Stack) -> bool:
    """Whether the product (or "attended": the attention kernel) runs twice."""
    if layout.recompute == "none":
        return False
    if layout.recompute == "full":
        return output != LAST or stack.reruns_all
    if stack.selective_keeps:
        return output != LAST and output not in stack.selective_keeps
    return output == "attended" and stack.attention_matrix
