"""Weights, gradients and optimizer state of one device.

Dense weights are split over tensor and, by layers, over pipe; experts over the expert ranks and
tensor besides. What the zero level names (arXiv 1910.02054: 1 optimizer, 2 gradients, 3 weights) is
split over fsdp, too, and dense weights' share over expert as well where a stack folds that axis.
The embedding is on the first stage, the head on the last, neither divided by layers. Experts
count whole: one that a token does not visit still takes its room.
"""

from dataclasses import dataclass

from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.memory_stage import Stage
from sabia.core.plan.device.memory_term import Term, billions, ways
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.elementwise import Number

ADAPTER_BYTES = 16  # bf16 weights and gradients, fp32 master, m and v (arXiv 2106.09685 trains few)


@dataclass(frozen=True)
class Elements:
    """Parameters on one stage before any other axis divides them."""

    dense: Number
    experts: Number


def elements(architecture: Architecture, stage: Stage) -> Elements:
    """Of the stage's layers (the mean of all kinds), its embedding and its head."""
    share = stage.layers / architecture.depth
    outer = stage.embedding * architecture.embedding_params + stage.head * _head(architecture)
    # A tied head on a stage of its own is a copy of the embedding.
    copies = stage.head * (1 - stage.embedding) * _tied(architecture)
    return Elements(
        dense=share * _dense(architecture.layers)
        + outer
        + copies
        + stage.head * _extra(architecture),
        experts=share * _experts(architecture.layers) + stage.head * _experts(architecture.extra),
    )


def _dense(kinds: tuple[LayerKind, ...]) -> int:
    return sum(kind.count * (kind.params - kind.expert_params) for kind in kinds)


def _experts(kinds: tuple[LayerKind, ...]) -> int:
    return sum(kind.count * kind.expert_params for kind in kinds)


def _head(architecture: Architecture) -> int:
    return architecture.head_params + architecture.other_params


def _tied(architecture: Architecture) -> int:
    return 0 if architecture.head_params else architecture.vocab * architecture.hidden


def _extra(architecture: Architecture) -> int:
    return _dense(architecture.extra) + architecture.extra_params


def state_terms(
    workload: Workload, layout: Layout, stack: Stack, stage: Stage
) -> tuple[Term, Term, Term, Term]:
    """Weights, gradients, optimizer state, and all that of adapters."""
    recipe, found = workload.recipe, elements(workload.architecture, stage)
    trained = (("gradients", recipe.gradients, 2), ("optimizer", recipe.optimizer, 1))
    terms = [_term("weights", found, recipe.weights, 3, layout, stack)]
    terms += [_term(name, found, size, level, layout, stack) for name, size, level in trained]
    return terms[0], terms[1], terms[2], _adapters(workload, layout)


def _term(
    name: str, found: Elements, size: float, level: int, layout: Layout, stack: Stack
) -> Term:
    split = layout.fsdp if layout.zero >= level else 1
    folded = layout.expert if stack.folded_experts and layout.zero >= level else 1
    dense = found.dense / (layout.tensor * split * folded)
    experts = found.experts / (layout.expert * layout.tensor * split)

    def formula() -> str:
        over = ways(("tensor", layout.tensor), ("fsdp", split), ("expert", folded))
        text = f"{billions(found.dense)} x {size:g} B{over}"
        if not found.experts:
            return text
        among = ways(("expert", layout.expert), ("tensor", layout.tensor), ("fsdp", split))
        return f"{text} + experts {billions(found.experts)} x {size:g} B{among}"

    return Term(name, (dense + experts) * size, formula)


def _adapters(workload: Workload, layout: Layout) -> Term:
    params = workload.adapter_params or 0
    split = layout.tensor * layout.pipe * (layout.fsdp if layout.zero >= 3 else 1)
    over = (("tensor", layout.tensor), ("pipe", layout.pipe))
    fsdp = ("fsdp", layout.fsdp if layout.zero >= 3 else 1)
    return Term(
        "adapters",
        params * ADAPTER_BYTES / split,
        lambda: f"{billions(params)} x {ADAPTER_BYTES} B{ways(*over, fsdp)}",
    )
