"""Activations that a device keeps from a forward to its backward pass, and those it makes again.

Of the tensors of a layer (memory_kept.py) a policy keeps all (none), those of the stack's list
(selective) or the layer's input alone (full). A micro-batch has b·s/context tokens a device.
"""

from collections.abc import Iterable

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.memory_kept import Kept, layer_tensors
from sabia.core.plan.device.memory_stage import Stage
from sabia.core.plan.device.memory_term import Term
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.elementwise import Number, choose, larger

NAME, AGAIN = "activations", "recomputed layer"
SCORES = ("scores", "score_mask", "dropped_scores")


def kept(workload: Workload, layout: Layout, stack: Stack, stage: Stage) -> Term:
    """Of all layers of the stage and all micro-batches in flight."""
    model = workload.architecture
    mean = sum(kind.count * _layer(workload, layout, stack, kind) for kind in model.layers)
    mean = mean / model.depth
    extra = sum(kind.count * _layer(workload, layout, stack, kind) for kind in model.extra)
    tokens = live_tokens(workload, layout)
    total = tokens * (stage.in_flight * stage.layers * mean + stage.head * extra)

    def formula() -> str:
        flight = f" x {stage.in_flight:g} in flight" if stage.in_flight > 1 else ""
        return f"{stage.layers:g} layers x {tokens:g} tokens x {mean:.6g} B{flight}"

    return Term(NAME, total, formula)


def made_again(workload: Workload, layout: Layout, stack: Stack) -> Term:
    """What recomputation brings back for the backward pass of one layer, the largest kind."""
    tokens = live_tokens(workload, layout)
    most: Number = 0
    for kind in workload.architecture.layers:
        every = _bytes(_tensors(workload, stack, kind), layout, stack)
        most = larger(most, every - _layer(workload, layout, stack, kind))

    def formula() -> str:
        return f"1 layer x {tokens:g} tokens x {most:.6g} B"

    return Term(AGAIN, tokens * most, formula)


def live_tokens(workload: Workload, layout: Layout) -> Number:
    """Tokens of a micro-batch on one device, before tensor ranks split them."""
    return layout.micro_batch * workload.sequence / layout.context


def element_bytes(workload: Workload) -> int:
    """Of the stream between layers."""
    return 4 if workload.precision == "fp32" else 2


def _layer(workload: Workload, layout: Layout, stack: Stack, kind: LayerKind) -> Number:
    """Bytes a token that one layer keeps on one device under the layout's policy."""
    found = [t for t in _tensors(workload, stack, kind) if _is_kept(t.name, layout, stack)]
    return _bytes(found, layout, stack)


def _tensors(workload: Workload, stack: Stack, kind: LayerKind) -> list[Kept]:
    hidden = workload.architecture.hidden
    element = element_bytes(workload)
    return list(layer_tensors(kind, hidden, workload.sequence, element, stack))


def _is_kept(name: str, layout: Layout, stack: Stack) -> bool:
    if layout.recompute == "none":
        return True
    if layout.recompute == "full":
        return name == "input"
    if stack.selective_keeps:
        return name in stack.selective_keeps
    return name not in SCORES


def _bytes(tensors: Iterable[Kept], layout: Layout, stack: Stack) -> Number:
    divisors = {
        "tokens": layout.tensor if layout.sequence_parallel else 1,
        "tensor": layout.tensor,
        "experts": layout.tensor if layout.experts_over_tensor else 1,
    }
    crowded = choose(layout.expert_ranks > 1, stack.expert_imbalance, 1)
    total: Number = 0
    for one in tensors:
        total = total + (crowded if one.routed else 1) * one.token_bytes / divisors[one.split]
    return total
