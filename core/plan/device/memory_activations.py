"""Activations that a device keeps from a forward to its backward pass, and those it makes again.

Of the tensors of a layer (memory_kept.py) a policy keeps all (none), those of the software's list
(selective; without one all but the attention matrix, arXiv 2205.05198) or the layer's input (full).
"""

from collections.abc import Iterable

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.memory_kept import KEYS, OUTPUT, SCORES, Kept, layer_tensors
from sabia.core.plan.device.memory_stage import over_layers
from sabia.core.plan.device.memory_term import Case, LayerFigures, Term
from sabia.core.plan.device.setting import Setting
from sabia.core.plan.elementwise import Number, choose, larger


def kept(case: Case) -> Term:
    """Of all layers of the stage and all micro-batches in flight."""
    stage, layers = case.stage, case.layers
    each = _of_stage(case)
    size = case.tokens * (stage.in_flight * each + stage.head * layers.extra)

    def formula() -> str:
        flight = f" x {stage.in_flight:g} in flight" if stage.in_flight > 1 else ""
        extra = f" + {layers.extra:.6g} B of extra layers" if stage.head * layers.extra else ""
        mean = each / stage.layers
        return f"{stage.layers:g} layers x {case.tokens:g} tokens x {mean:.6g} B{flight}{extra}"

    return Term("activations", size, formula)


def left(case: Case) -> Term:
    """What of it is left when the backward pass of one micro-batch has ended."""
    stage, others = case.stage, larger(0, case.stage.in_flight - 1)
    each = case.tokens * _of_stage(case)

    def formula() -> str:
        return f"{others:g} x {stage.layers:g} layers x {case.tokens:g} tokens"

    return Term("other micro-batches", others * each, formula)


def _of_stage(case: Case) -> Number:
    """Bytes a token that one micro-batch leaves in the stage's layers."""
    return over_layers(case.model, case.stage, lambda kind: case.layers.kept[kind])


def made_again(case: Case) -> Term:
    """What recomputation brings back for the backward pass of one layer."""
    again = case.layers.again
    return Term(
        "recomputed layer",
        case.tokens * again,
        lambda: f"1 layer x {case.tokens:g} tokens x {again:.6g} B",
    )


def layer_figures(case: Setting) -> LayerFigures:
    """All that depends on the layers and not on the stage."""
    model = case.model
    sizes = {kind: _layer(case, kind) for kind in dict.fromkeys((*model.layers, *model.extra))}
    again: Number = 0
    elements: Number = 0
    for kind in model.layers:
        used, lasting = sizes[kind]
        again = larger(again, used - lasting)
        elements = larger(elements, _elements(kind, case))
    return LayerFigures(
        kept={kind: lasting for kind, (_, lasting) in sizes.items()},
        extra=sum(kind.count * sizes[kind][1] for kind in model.extra),
        again=again,
        elements=elements,
    )


def _layer(case: Setting, kind: LayerKind) -> tuple[Number, Number]:
    """Bytes a token on one device: what the backward pass uses, what the policy keeps till then."""
    hidden, sequence, stack = case.model.hidden, case.workload.sequence, case.stack
    found = list(layer_tensors(kind, hidden, sequence, case.element, stack, case.input_element))
    used = [one for one in found if one.name != OUTPUT]
    lasting = [one for one in found if _is_kept(one.name, case)]
    local = case.layout.recompute == "selective"  # keeps what products made, before it is gathered
    return _bytes(used, case), _bytes(lasting, case, local)


def _is_kept(name: str, case: Setting) -> bool:
    if case.layout.recompute == "full":
        return name == "input"
    if case.layout.recompute == "selective" and case.stack.selective_keeps:
        return name in case.stack.selective_keeps
    dropped = {OUTPUT} if case.layout.recompute == "none" else {OUTPUT, *SCORES}
    return name not in dropped


def _bytes(tensors: Iterable[Kept], case: Setting, local: bool = False) -> Number:
    layout = case.layout
    rows = layout.context if case.stack.whole_context and not local else 1
    divisors = {
        "tokens": case.token_split,
        "gathered": 1 if case.stack.keeps_gathered else case.token_split,
        "tensor": layout.tensor,
        "experts": layout.tensor if layout.experts_over_tensor else 1,
    }
    sums: dict[tuple[str, bool, bool], float] = {}
    for one in tensors:
        group = (one.split, one.routed, one.name in KEYS)
        sums[group] = sums.get(group, 0) + one.token_bytes
    crowded = choose(layout.expert_ranks > 1, case.stack.expert_imbalance, 1)
    return sum(
        size / divisors[split] * (crowded if routed else 1) * (rows if keys else 1)
        for (split, routed, keys), size in sums.items()
    )


def _elements(kind: LayerKind, case: Setting) -> Number:
    dense = kind.params - kind.expert_params
    return (dense + kind.expert_params / case.layout.expert) / case.layout.tensor
