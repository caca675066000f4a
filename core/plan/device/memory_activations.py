"""Activations that a device keeps from a forward to its backward pass, and those it makes again.

Of the tensors of a layer (memory_kept.py) a policy keeps all (none), those of the software's list
(selective; without one all but the attention matrix, arXiv 2205.05198) or the layer's input (full).
"""

from collections.abc import Iterable

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.memory_kept import OUTPUT, SCORES, Kept, layer_tensors
from sabia.core.plan.device.memory_term import Case, Term
from sabia.core.plan.elementwise import Number, choose, larger


def kept(case: Case) -> Term:
    """Of all layers of the stage and all micro-batches in flight."""
    return _held(case, case.stage.in_flight)


def left(case: Case) -> Term:
    """The same when the backward pass of one micro-batch has ended."""
    return Term("other micro-batches", _held(case, larger(0, case.stage.in_flight - 1)).bytes)


def _held(case: Case, in_flight: Number) -> Term:
    model, stage = case.model, case.stage
    mean = sum(kind.count * _layer(case, kind) for kind in model.layers) / model.depth
    extra = sum(kind.count * _layer(case, kind) for kind in model.extra)
    size = case.tokens * (in_flight * stage.layers * mean + stage.head * extra)

    def formula() -> str:
        flight = f" x {in_flight:g} in flight" if in_flight > 1 else ""
        return f"{stage.layers:g} layers x {case.tokens:g} tokens x {mean:.6g} B{flight}"

    return Term("activations", size, formula)


def made_again(case: Case) -> Term:
    """What recomputation brings back for the backward pass of one layer, the largest kind."""
    most: Number = 0
    for kind in case.model.layers:
        every = [one for one in _tensors(case, kind) if one.name != OUTPUT]
        most = larger(most, _bytes(every, case) - _layer(case, kind))
    most = larger(most, 0)
    return Term(
        "recomputed layer", case.tokens * most, lambda: f"{case.tokens:g} tokens x {most:.6g} B"
    )


def _layer(case: Case, kind: LayerKind) -> Number:
    """Bytes a token that one layer keeps on one device under the layout's policy."""
    return _bytes([one for one in _tensors(case, kind) if _is_kept(one.name, case)], case)


def _tensors(case: Case, kind: LayerKind) -> list[Kept]:
    hidden, sequence, stack = case.model.hidden, case.workload.sequence, case.stack
    return list(layer_tensors(kind, hidden, sequence, case.element, stack, case.input_element))


def _is_kept(name: str, case: Case) -> bool:
    if case.layout.recompute == "full":
        return name == "input"
    if case.layout.recompute == "selective" and case.stack.selective_keeps:
        return name in case.stack.selective_keeps
    dropped = {OUTPUT} if case.layout.recompute == "none" else {OUTPUT, *SCORES}
    return name not in dropped


def _bytes(tensors: Iterable[Kept], case: Case) -> Number:
    layout, stack = case.layout, case.stack
    divisors = {
        "tokens": case.token_split,
        "gathered": 1 if stack.keeps_gathered else case.token_split,
        "tensor": layout.tensor,
        "experts": layout.tensor if layout.experts_over_tensor else 1,
    }
    crowded = choose(layout.expert_ranks > 1, stack.expert_imbalance, 1)
    total: Number = 0
    for one in tensors:
        total = total + (crowded if one.routed else 1) * one.token_bytes / divisors[one.split]
    return total
