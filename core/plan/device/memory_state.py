"""Pipeline stages, terms of a device's memory, and its weights, gradients and optimizer state.

Only stages that can be the fullest are computed. Under 1F1B (arXiv 2006.09503) stage r of p has the
activations of p - r micro-batches; with v virtual stages per device (arXiv 2104.04473) of
2(p-1-r) + (v-1)p + 1 runs of its L/(pv) layers, that is of p + (p-1)/v micro-batches on the first
(arXiv 2205.05198, section 4.2.3); never of more than one step has. Where the depth is not
divisible, the first and the last stage, which have the embedding and the head, have fewer layers
(arXiv 2407.21783, section 3.3.2).

Dense weights are split over tensor and, by layers, over pipe; experts also over the expert ranks.
ZeRO (arXiv 1910.02054: 1 optimizer, 2 gradients, 3 weights) splits over fsdp, and over context and
(dense weights) expert where the software folds these axes into it. The embedding is on the first
stage, the head on the last. Down-projections of latent attention are the same on all tensor ranks.
All experts count, active or not.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.device.layout import Layout, Setting, Workload
from sabia.core.plan.elementwise import Number, choose, larger, rounded_up, smaller
from sabia.core.plan.memory import ADAPTERS

FEW = 1 / 8
NEVER = 4  # a level of ZeRO above all: not split


@dataclass(frozen=True)
class PipelineStage:
    """layers: number of its layers; leading: dense ones of them before the first MoE layer.

    in_flight: micro-batches whose activations it keeps. embedding, head: 1 where it has them.
    """

    name: Number
    layers: Number
    leading: Number
    in_flight: Number
    embedding: Number
    head: Number


def stages_of(workload: Workload, layout: Layout) -> Iterator[PipelineStage]:
    """The first stage, the last, and the second as one of the middle."""
    pipe, depth = layout.pipe, workload.architecture.depth
    passes = larger(1, layout.accumulation(workload.batch_rows))
    longest = rounded_up(depth / pipe)
    shortest = depth // pipe
    fits = (pipe - 2) * longest + 2 * shortest >= depth
    ends = choose(fits, shortest, longest)
    only = choose(pipe == 1, 1, 0)
    name = choose(pipe == 1, "only", "first")
    leading = smaller(ends, sum(kind.count for kind in leading_kinds(workload.architecture)))
    yield PipelineStage(name, ends, leading, _in_flight(layout, 0, passes), 1, only)
    if not hasattr(pipe, "shape") and pipe == 1:
        return
    last = larger(0, pipe - 1)
    yield PipelineStage("last", ends, only * leading, _in_flight(layout, last, passes), only, 1)
    middle = choose(pipe > 2, longest, 0)
    yield PipelineStage("second", middle, 0, _in_flight(layout, 1, passes), 0, 0)


def leading_kinds(model: Architecture) -> tuple[LayerKind, ...]:
    """Dense layers of an MoE model, if they are few and so its first (as in DeepSeek-V3)."""
    dense = tuple(kind for kind in model.layers if not kind.experts)
    few = sum(kind.count for kind in dense) <= model.depth * FEW
    return dense if few and len(dense) < len(model.layers) else ()


def over_layers(
    model: Architecture, stage: PipelineStage, of: Callable[[LayerKind], Number]
) -> Number:
    """Sum of a figure over the stage's layers: leading ones exactly, others by their mean."""
    first = leading_kinds(model)
    others = tuple(kind for kind in model.layers if kind not in first)
    total = (stage.layers - stage.leading) * _mean(others, of)
    return total + stage.leading * _mean(first, of) if first else total


def _mean(kinds: tuple[LayerKind, ...], of: Callable[[LayerKind], Number]) -> Number:
    return sum(kind.count * of(kind) for kind in kinds) / sum(kind.count for kind in kinds)


def _in_flight(layout: Layout, stage: Number, passes: Number) -> Number:
    pipe, virtual = layout.pipe, layout.virtual
    runs = 2 * (pipe - 1 - stage) + (virtual - 1) * pipe + 1
    held = choose(virtual > 1, runs / virtual, pipe - stage)
    return smaller(passes, larger(1, held))


@dataclass(frozen=True)
class Term:
    """`bytes` on one device; an array in a search. formula: returns the text of `how`."""

    name: str
    bytes: Number
    formula: Callable[[], str] = lambda: ""

    @property
    def how(self) -> str:
        """The formula with its numbers, for `--explain`."""
        return self.formula()


@dataclass(frozen=True)
class LayerFigures:
    """Figures of one layer on one device, before ZeRO splits anything.

    kept: bytes per token that are kept, by kind of layer; extra: of all MTP layers; again: most
    bytes per token that are recomputed in one layer's backward pass; elements: of the largest
    layer.
    """

    kept: Mapping[LayerKind, Number]
    extra: Number
    again: Number
    elements: Number


@dataclass(frozen=True)
class StageCase(Setting):
    """One device of one stage: everything that a term depends on."""

    stage: PipelineStage
    layers: LayerFigures


def billions(count: float) -> str:
    """8030261248 as 8.03B; small counts as 12.6M or 4096."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:.6g}"


def ways(*splits: tuple[str, Number]) -> str:
    """' / (tensor 8 x pipe 4)' for splits above 1; empty without any."""
    cut = [f"{name} {size:g}" for name, size in splits if size > 1]
    return f" / ({' x '.join(cut)})" if len(cut) > 1 else f" / {cut[0]}" if cut else ""


Cuts = tuple[tuple[str, Number], ...]


@dataclass(frozen=True)
class Elements:
    """Parameters on one stage before any other axis splits them.

    down: down-projections of latent attention; dense: all others except the experts.
    """

    dense: Number
    experts: Number
    down: Number


def elements(model: Architecture, stage: PipelineStage) -> Elements:
    """Parameters of the stage's layers, its embedding, its head, and MTP layers."""
    outer = stage.embedding * model.embedding_params + stage.head * head_params(model, stage)
    extra = sum(kind.count * (kind.params - kind.expert_params) for kind in model.extra)
    after = extra + model.extra_params + model.other_params

    def down_params(kind: LayerKind) -> int:
        width = kind.query_latent + kind.cache_width if kind.key_latent else 0
        return model.hidden * width

    down = over_layers(model, stage, down_params)
    dense = over_layers(model, stage, lambda kind: kind.params - kind.expert_params)
    experts = sum(kind.count * kind.expert_params for kind in model.extra)
    return Elements(
        dense=dense - down + outer + stage.head * after,
        experts=over_layers(model, stage, lambda kind: kind.expert_params) + stage.head * experts,
        down=down,
    )


def head_params(model: Architecture, stage: PipelineStage) -> Number:
    """Parameters of the head; a tied one is a copy if the embedding is on another stage."""
    tied = 0 if model.head_params else model.vocab * model.hidden
    return model.head_params + (1 - stage.embedding) * tied


def weights(case: StageCase) -> Term:
    """Weights in the format of the recipe."""
    return _state("weights", case, case.workload.recipe.weights, 3)


def weight_copies(case: StageCase) -> Term:
    """Copies of all weights in the dtype of computation, where they are cast and not gathered."""
    needed = case.stack.casts_weights and case.workload.recipe.weights > case.element
    split = case.sharding > 1 if case.layout.zero >= 3 else False
    copies = _state("weight copies", case, case.element if needed else 0, 3)
    return Term(copies.name, copies.bytes * choose(split, 0, 1), copies.formula)


def gradients(case: StageCase) -> Term:
    """Reduced gradients of all trained parameters; those of adapters count with them."""
    size = case.workload.recipe.gradients * case.trained
    split = _state("gradients", case, size, 2)
    if not case.stack.keeps_whole_gradients:
        return split
    whole = _state("gradients", case, size, NEVER)
    several = case.layout.accumulation(case.workload.batch_rows) > 1
    size_bytes = choose(several, whole.bytes, split.bytes)
    return Term(split.name, size_bytes, lambda: (whole if several else split).how)


def optimizer(case: StageCase) -> Term:
    """Master weights and moments."""
    return _state("optimizer", case, case.workload.recipe.optimizer * case.trained, 1)


def trained_elements(case: StageCase) -> Number:
    """Parameters whose update one device computes."""
    if case.workload.adapter_params is not None:
        return case.workload.adapter_params
    return _on_device(elements(case.model, case.stage), case, level=1)


def _on_device(counts: Elements, case: StageCase, level: int) -> Number:
    shares = _shares(counts, case, level)
    return sum(count / math.prod(size for _, size in cut) for _, count, cut in shares)


def _shares(counts: Elements, case: StageCase, level: int) -> Iterator[tuple[str, Number, Cuts]]:
    """(name, elements, splits) of the parts of the parameters."""
    split, tensor = case.layout.zero >= level, ("tensor", case.layout.tensor)
    zero = ("zero", case.sharding if split else 1)
    experts = ("zero", case.expert_sharding if split else 1)
    yield "", counts.dense, (tensor, zero)
    yield "to latents ", counts.down, (zero,)
    yield "experts ", counts.experts, (("expert", case.layout.expert), tensor, experts)


def _state(name: str, case: StageCase, size: float, level: int) -> Term:
    counts = elements(case.model, case.stage)

    def formula() -> str:
        shares = _shares(counts, case, level)
        texts = (f"{what}{billions(n)} x {size:g} B{ways(*cut)}" for what, n, cut in shares if n)
        return " + ".join(texts)

    return Term(name, _on_device(counts, case, level) * size, formula)


def adapters(case: StageCase) -> Term:
    """Weights, gradients and optimizer state of LoRA adapters."""
    params, layout = case.workload.adapter_params or 0, case.layout
    zero = case.sharding if layout.zero >= 3 else 1
    over = (("tensor", layout.tensor), ("pipe", layout.pipe), ("zero", zero))
    each = ADAPTERS.bytes_per_param
    size = params * each / (layout.tensor * layout.pipe * zero)
    return Term("adapters", size, lambda: f"{billions(params)} x {each} B{ways(*over)}")
