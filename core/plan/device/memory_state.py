"""Terms of a device's memory, and its weights, gradients and optimizer state.

Dense weights are split over tensor and, by layers, over pipe; experts also over the expert ranks.
ZeRO (arXiv 1910.02054: 1 optimizer, 2 gradients, 3 weights) splits over fsdp, and over context and
(dense weights) expert where the software folds these axes into it. The embedding is on the first
stage, the head on the last. Down-projections of latent attention are the same on all tensor ranks.
All experts count, active or not.

Terms of memory for a part of a step: activations, logits, gathered weights, buffers.

Activations are kept from a forward to its backward pass, or recomputed. Of the tensors of a layer
(memory_kept.py), recomputation `none` keeps all, `selective` those of the software's list (without
one all but the attention matrix, arXiv 2205.05198), and `full` only the layer's input.

The other terms:

  head input   inputs of the final norm and of the head
  logits       a micro-batch's tokens · V / tensor · bytes per logit, never more than the chunk of
               a chunked cross-entropy. 12 is torch's: kept fp32 log-probabilities and two fp32
               gradients; 10 counts bf16 logits, fp32 softmax, fp32 gradient
  gathered     under ZeRO-3 the whole weights (over fsdp) of the layers that compute, in the dtype
               of computation, and of the head at the loss. Embedding and head stay whole all step
               where they are one unit with the root of the model (torch's fully_shard)
  unreduced    the whole gradient of one unit before it is reduced over fsdp
  exchange     all-to-all of experts: tokens that are received and sent
  update       the optimizer's temporary tensors
  runtime      context, kernels, communicators: 3.5 GB, the margin of aiconfigurator

torch's allocator has a pool of blocks for each stream, and communication has streams of its own:
computation never uses their blocks. With such a stack (stream_pools) the largest unit's buffers
count at every instant, and a second time for the copy that computes. In a pipeline, fully_shard by
default gathers once per step and reduces once, after the last micro-batch (pipe_keeps_whole).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import PRODUCT_BYTES, PipelineStage, Setting, leading_kinds
from sabia.core.plan.device.memory_kept import FP32, KEYS, OUTPUT, SCORES, KeptTensor, layer_tensors
from sabia.core.plan.elementwise import Number, choose, larger, largest, smaller
from sabia.core.plan.memory import ADAPTERS

NEVER = 4  # a level of ZeRO above all: not split


@dataclass(frozen=True)
class Term:
    """`bytes` on one device; an array in a search. how: the formula with its numbers, as text."""

    name: str
    bytes: Number
    how: Callable[[], str] = lambda: ""


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

    @property
    def extent(self) -> str:
        """The layers of the stage and the tokens of a micro-batch, as text."""
        return f"{self.stage.layers:g} layers x {self.tokens:g} tokens"


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


def elements(case: StageCase) -> Elements:
    """Parameters of the stage's layers, its embedding, its head, and MTP layers."""
    model, stage = case.model, case.stage
    outer = stage.embedding * model.embedding_params + stage.head * head_params(case)
    extra = sum(kind.count * (kind.params - kind.expert_params) for kind in model.extra)

    def to_latents(kind: LayerKind) -> int:
        return model.hidden * (kind.query_latent + kind.cache_width if kind.key_latent else 0)

    down = over_layers(case, to_latents)
    dense = over_layers(case, lambda kind: kind.params - kind.expert_params)
    experts = sum(kind.count * kind.expert_params for kind in model.extra)
    return Elements(
        dense=dense - down + outer + stage.head * (extra + model.extra_params + model.other_params),
        experts=over_layers(case, lambda kind: kind.expert_params) + stage.head * experts,
        down=down,
    )


def over_layers(case: StageCase, of: Callable[[LayerKind], Number]) -> Number:
    """Sum of a figure over the stage's layers: leading ones exactly, others by their mean."""
    first, stage = leading_kinds(case.model), case.stage
    others = tuple(kind for kind in case.model.layers if kind not in first)
    total = (stage.layers - stage.leading) * _mean(others, of)
    return total + stage.leading * _mean(first, of) if first else total


def _mean(kinds: tuple[LayerKind, ...], of: Callable[[LayerKind], Number]) -> Number:
    return sum(kind.count * of(kind) for kind in kinds) / sum(kind.count for kind in kinds)


def head_params(case: StageCase) -> Number:
    """Parameters of the head; a tied one is a copy if the embedding is on another stage."""
    tied = 0 if case.model.head_params else case.model.vocab * case.model.hidden
    return case.model.head_params + (1 - case.stage.embedding) * tied


def weights(case: StageCase) -> Term:
    """Weights in the format of the recipe."""
    return state_term("weights", case, case.workload.recipe.weights, 3)


def weight_copies(case: StageCase) -> Term:
    """Copies of all weights in the dtype of computation, where they are cast and not gathered."""
    needed = case.stack.casts_weights and case.workload.recipe.weights > case.element
    split = case.sharding > 1 if case.layout.zero >= 3 else False
    counts = elements(case)
    if case.stack.wide_embedding and case.model.head_params:  # a tied head needs the copy
        table = case.stage.embedding * case.model.embedding_params
        counts = replace(counts, dense=counts.dense - table)
    copies = state_term("weight copies", case, case.element if needed else 0, 3, counts)
    return replace(copies, bytes=copies.bytes * choose(split, 0, 1))


def gradients(case: StageCase) -> Term:
    """Reduced gradients of all trained parameters; those of adapters count with them."""
    size = case.workload.recipe.gradients * case.trained
    split = state_term("gradients", case, size, 2)
    if not case.stack.keeps_whole_gradients:
        return split
    whole = state_term("gradients", case, size, NEVER)
    several = case.layout.accumulation(case.workload.batch_rows) > 1
    size_bytes = choose(several, whole.bytes, split.bytes)
    return Term(split.name, size_bytes, lambda: (whole if several else split).how())


def optimizer(case: StageCase) -> Term:
    """Master weights and moments."""
    return state_term("optimizer", case, case.workload.recipe.optimizer * case.trained, 1)


def on_device(counts: Elements, case: StageCase, level: int) -> Number:
    """Those of the stage's parameters that one device has where ZeRO of `level` splits them."""
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


def state_term(
    name: str, case: StageCase, size: float, level: int, counts: Elements | None = None
) -> Term:
    """`size` bytes for each parameter (or of `counts`) on a device, split by ZeRO of `level`."""
    counts = counts or elements(case)

    def formula() -> str:
        shares = _shares(counts, case, level)
        texts = (f"{what}{billions(n)} x {size:g} B{ways(*cut)}" for what, n, cut in shares if n)
        return " + ".join(texts)

    return Term(name, on_device(counts, case, level) * size, formula)


def adapters(case: StageCase) -> Term:
    """Weights, gradients and optimizer state of LoRA adapters."""
    params, layout = case.workload.adapter_params or 0, case.layout
    zero = case.sharding if layout.zero >= 3 else 1
    over = (("tensor", layout.tensor), ("pipe", layout.pipe), ("zero", zero))
    each = ADAPTERS.bytes_per_param
    size = params * each / (layout.tensor * layout.pipe * zero)
    return Term("adapters", size, lambda: f"{billions(params)} x {each} B{ways(*over)}")


def kept(case: StageCase) -> Term:
    """Activations of all layers of the stage and all micro-batches in flight."""
    stage, layers, each = case.stage, case.layers, _of_stage(case)
    size = case.tokens * (stage.in_flight * each + stage.head * layers.extra)

    def formula() -> str:
        flight = f" x {stage.in_flight:g} in flight" if stage.in_flight > 1 else ""
        extra = f" + {layers.extra:.6g} B of extra layers" if stage.head * layers.extra else ""
        return f"{case.extent} x {each / stage.layers:.6g} B{flight}{extra}"

    return Term("activations", size, formula)


def kept_of_others(case: StageCase) -> Term:
    """Activations that remain after the backward pass of one micro-batch."""
    others = larger(0, case.stage.in_flight - 1)
    size = others * (case.tokens * _of_stage(case))
    return Term("other micro-batches", size, lambda: f"{others:g} x {case.extent}")


def _of_stage(case: StageCase) -> Number:
    """Bytes per token that one micro-batch keeps in the stage's layers."""
    return over_layers(case, lambda kind: case.layers.kept[kind])


def recomputed(case: StageCase) -> Term:
    """Recomputed tensors for the backward pass of one layer."""
    tokens, each = case.tokens, case.layers.again
    how = "1 layer x {:g} tokens x {:.6g} B"
    return Term("recomputed layer", tokens * each, lambda: how.format(tokens, each))


def layer_figures(case: Setting) -> LayerFigures:
    """Figures that depend on the layers and not on the stage."""
    model = case.model
    sizes = {kind: _layer(case, kind) for kind in dict.fromkeys((*model.layers, *model.extra))}
    again = largest(used - lasting for used, lasting in (sizes[kind] for kind in model.layers))
    on_device = (
        kind.params - kind.expert_params + kind.expert_params / case.layout.expert
        for kind in model.layers
    )
    elements = largest(size / case.layout.tensor for size in on_device)
    kept_bytes = {kind: lasting for kind, (_, lasting) in sizes.items()}
    extra = sum(kind.count * kept_bytes[kind] for kind in model.extra)
    return LayerFigures(kept_bytes, extra, again, elements)


def _layer(case: Setting, kind: LayerKind) -> tuple[Number, Number]:
    """Bytes per token on one device: used in the backward pass, and kept from the forward pass."""
    hidden, sequence, stack = case.model.hidden, case.workload.sequence, case.stack
    tensors = list(layer_tensors(kind, hidden, sequence, case.element, stack, case.input_element))
    if case.layout.recompute == "full" and case.workload.precision in PRODUCT_BYTES:
        tensors.append(KeptTensor("input", hidden, stack.narrow_input_bytes))
    used = [one for one in tensors if one.name != OUTPUT]
    lasting = [one for one in tensors if _is_kept(one.name, case)]
    local = case.layout.recompute == "selective"  # keeps results of products, before a gather
    return _bytes(used, case), _bytes(lasting, case, local)


def _is_kept(name: str, case: Setting) -> bool:
    if case.layout.recompute == "full":
        return name == "input"
    if case.layout.recompute == "selective" and case.stack.selective_keeps:
        return name in case.stack.selective_keeps
    dropped = {OUTPUT} if case.layout.recompute == "none" else {OUTPUT, *SCORES}
    return name not in dropped


def _bytes(tensors: Iterable[KeptTensor], case: Setting, local: bool = False) -> Number:
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


def runtime(case: StageCase) -> Term:
    """Memory of the runtime."""
    how = "context, kernels, communicators (margin)"
    return Term("runtime", case.stack.context_bytes, lambda: how)


def head_input(case: StageCase) -> Term:
    """Inputs of the final norm and of the head."""
    split = case.token_split
    whole = 1 if case.stack.keeps_gathered else split
    hidden, element = case.model.hidden, case.element
    norm = case.stack.final_norm_bytes or element

    size = case.tokens * hidden * (norm / split + element / whole)

    def formula() -> str:
        return f"{case.tokens:g} tokens x {hidden} x ({norm:g}/{split:g} + {element}/{whole:g}) B"

    return Term("head input", case.stage.head * size, formula)


def logits(case: StageCase) -> Term:
    """Logits of one micro-batch, on the stage with the head."""
    stack, vocab, tensor = case.stack, case.model.vocab, case.layout.tensor
    each = choose(tensor > 1, stack.split_logit_bytes or stack.logit_bytes, stack.logit_bytes)
    passes = 1 + sum(kind.count for kind in case.model.extra)
    size = passes * case.tokens * vocab * each / tensor
    most = stack.loss_chunk_bytes
    size = smaller(size, most) if most else size

    def formula() -> str:
        chunk = f", in chunks of {billions(most)}B" if most else ""
        times = f"{passes} x " if passes > 1 else ""
        over = ways(("tensor", tensor))
        return f"{times}{case.tokens:g} tokens x {vocab} x {each:g} B{over}{chunk}"

    return Term("logits", case.stage.head * size, formula)


def gathered(case: StageCase, instant: str) -> Term:
    """Gathered weights of the layers that compute at that instant."""
    layer, (embedding, head), unit = case.layers.elements, _outer(case), case.element
    layers = {"loss": 1, "update": 0}.get(instant, case.stack.gathered_layers)
    layers = choose(_stays_whole(case), case.stage.layers, layers)
    if case.stack.whole_ends:
        ends = embedding + head
    elif instant == "loss":
        ends = head + (0 if case.model.head_params else embedding * case.stage.head)
    else:
        ends = 0
    # a tied head's table is gathered in FP32, and cast to the dtype of computation
    tied = instant == "loss" and case.stack.wide_embedding and not case.model.head_params
    each = unit + FP32 if tied and unit < FP32 <= case.workload.recipe.weights else unit
    pooled = larger(layer, embedding + head) if case.stack.stream_pools else 0
    size = (layers * layer + pooled) * unit + ends * each

    def formula() -> str:
        parts = [f"{layers:g} layers of {billions(layer)}"] if layers else []
        parts += [f"embedding and head {billions(ends)}"] if ends and each == unit else []
        parts += [f"buffer {billions(pooled)}"] if pooled else []
        wide = f" + tied head {billions(ends)} x {each} B" if ends and each > unit else ""
        return f"({' + '.join(parts)}) x {unit} B{wide}"

    return Term("gathered weights", size * _is_split(case, 3), formula)


def unreduced(case: StageCase, instant: str) -> Term:
    """The whole gradient of a layer, of the head at the loss, of the embedding at the end."""
    layer, (embedding, head) = case.layers.elements, _outer(case)
    size = max(case.workload.recipe.gradients, case.element)
    if not case.trained or instant == "update":
        size = 0
    count = {"loss": head, "backward": layer, "end": embedding}.get(instant, 0)
    kept: Number = 0
    if case.stack.stream_pools:
        count, kept = larger(layer, embedding + head), head
    count = choose(_stays_whole(case), case.stage.layers * layer + embedding + head, count)
    size_bytes = (count * size + kept * (case.element if size else 0)) * _is_split(case, 2)

    def formula() -> str:
        also = f" + head {billions(kept)} x {case.element} B" if kept else ""
        return f"{billions(count)} x {size:g} B{also}"

    return Term("unreduced gradient", size_bytes, formula)


def exchange(case: StageCase) -> Term:
    """Tokens that one layer sends to and receives from experts on other devices."""
    hidden, top_k = case.model.hidden, max(kind.top_k for kind in case.model.layers)
    among = case.layout.tensor if case.layout.experts_over_tensor else 1
    copies = (1 + case.stack.expert_imbalance) * top_k * case.tokens / among
    size = choose(case.layout.expert_ranks > 1, copies * hidden * case.element, 0)
    return Term("expert exchange", size, lambda: f"{copies:g} copies x {hidden} x {case.element} B")


def update(case: StageCase) -> Term:
    """Temporary tensors of the optimizer step for the parameters that the device updates."""
    count, each = case.workload.adapter_params, case.stack.update_bytes
    if count is None:
        count = on_device(elements(case), case, level=1)
    return Term("update", count * each, lambda: f"{billions(count)} x {each:g} B")


def _stays_whole(case: StageCase) -> Number:
    """Whether weights and gradients stay whole between the micro-batches of a pipeline."""
    return case.layout.pipe > 1 if case.stack.pipe_keeps_whole else False


def _is_split(case: StageCase, level: int) -> Number:
    """1 where ZeRO of at least `level` splits over several ranks, else 0."""
    return choose(case.sharding > 1, 1, 0) if case.layout.zero >= level else 0


def _outer(case: StageCase) -> tuple[Number, Number]:
    """Elements of embedding and head on one device of the stage, before fsdp splits them."""
    embedding = case.stage.embedding * case.model.embedding_params
    return embedding / case.layout.tensor, case.stage.head * head_params(case) / case.layout.tensor
