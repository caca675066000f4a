"""Peak memory of this project's trainer on CPUs (torch), without interpreter and imports.

A process's memory is what its allocator has requested from the system: the heap, which glibc never
returns (kernels/runtime/freed_memory.py), so that its largest size counts: state, gradients, and
most of what a micro-batch has at one time:

  loss        activations, kept logits, gradient of the head
  layer       activations, and temporaries of one layer's backward pass
  embedding   its gradient, at the end of the backward pass
  update      temporaries of the optimizer or of the reduction of gradients

posix_memalign, which torch calls, asks for more than the block's size, so that a block does not fit
where one of its size was: what the layers free between blocks that stay is reused in part. The rest
is holes, which only the gradients, being smaller, fill. gloo gathers in two threads, whose heaps
have blocks of less than ARENA; larger ones are returned.

Parameters, gradients and optimizer state are fp32 in every precision (core/train/stepper.py). BF16
copies of all matrices exist from the forward pass of a micro-batch to the end of its backward pass;
with fsdp only those of the layer that is computed. The state recipe only determines the optimizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sabia.core.numerics.optimizers import OPTIMIZERS, Optimizer
from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device import memory_state as state
from sabia.core.plan.device.layout import Recompute
from sabia.core.plan.device.memory_kept import FP32, Formats, formats, host_tensors
from sabia.core.plan.device.memory_state import StageCase, Term, on_device, state_term
from sabia.core.plan.elementwise import Number, choose, larger, largest, smaller

# kernels/vocabulary_loss/torch_impl.py: larger logits are recomputed; of one product, and in fp32
KEPT_LOGITS, LOSS_PRODUCT, LOSS_BLOCK = 256 << 20, 64 << 20, 8 << 20
# measured (tests/bench/RESULTS.md): share of the freed bytes; layers whose recomputed tensors leave
# holes in BF16, where fp32 blocks that are freed hold BF16 blocks of other layers
HOLES, NARROW_LAYERS = 0.45, 4
BUCKET = 64 << 20  # gradients that are reduced together (core/train/stepper_torch_shards.py)
LION_GROUP = 4 << 26
ARENA = 64 << 20  # largest heap of a thread (HEAP_MAX_SIZE of glibc)


@dataclass(frozen=True)
class HostCase(StageCase):
    """A StageCase with properties of the trainer's process."""

    @property
    def formats(self) -> Formats:
        """Formats of activations."""
        return formats(self.workload.precision, self.stack.widened)

    @property
    def repeated(self) -> Number:
        """Whether gradients of an earlier micro-batch exist (gradient accumulation)."""
        return self.layout.accumulation(self.workload.batch_rows) > 1

    @property
    def gathers(self) -> Number:
        """1 where weights are gathered over fsdp, else 0."""
        return choose(self.layout.fsdp > 1, 1, 0)

    @property
    def table(self) -> Number:
        """Elements of the embedding or of the head before fsdp splits them."""
        return self.model.vocab * self.model.hidden / self.layout.tensor

    @property
    def head_element(self) -> int:
        """Bytes of an element of the gathered head; a tied one is gathered as the embedding is."""
        return self.formats.stream if self.model.head_params else FP32

    def of_layers(self, figure: Callable[[LayerKind], Number]) -> Number:
        """The sum of a figure of one layer over the layers of this stage."""
        share = self.stage.layers / self.model.depth
        return sum(share * kind.count * figure(kind) for kind in self.model.layers)


def host_terms(case: StageCase) -> Iterator[Term]:
    """Memory of a process; the names of the terms are always the same."""
    case = HostCase(**vars(case))
    live = activations(case)
    # the layer whose backward pass needs most: recomputed tensors, unreduced gradients
    passing = largest((loss(case), *(_one_layer(case, kind) for kind in case.model.layers)))
    copies = narrow_copies(case)
    alone = larger(case.stage.embedding * _exchanged(case, case.table, FP32), update(case))
    grads, own = FP32 if case.trained else 0, on_device(state.elements(case), case, 3)
    yield state_term("weights", case, FP32, 3)
    yield state_term("optimizer", case, FP32 * _states(case), 3)
    adapters = (case.workload.adapter_params or 0) * 4 * FP32  # weights, gradients, m and v
    how = f"{case.workload.adapter_params} x {4 * FP32} B"
    yield Term("adapters", adapters / case.layout.pipe, lambda: how)
    yield state_term("gradients", case, grads, 3)
    yield Term("narrow copies", copies, lambda: "all matrices of the layers in BF16")
    yield Term("activations", live, lambda: _activation_text(case))
    most = larger(passing, alone - live - copies)
    yield Term("temporaries", most, lambda: "of the loss, a layer, the embedding or the update")
    yield Term("received", received(case), lambda: "by gloo, of the largest gather")
    lost = holes(case, grads * own, copies)
    yield Term("holes", lost, lambda: f"{HOLES} of what is freed between blocks that stay")


# -- state


def _states(case: HostCase) -> Number:
    """fp32 elements of optimizer state per parameter, the mean."""
    if not case.trained:
        return 0
    record = _record(case)
    adamw = OPTIMIZERS["adamw"].state_per_parameter
    if record.scope != "hidden matrices":
        return record.state_per_parameter
    model, stage, counts = case.model, case.stage, state.elements(case)
    outer = stage.head * (state.head_params(case) + model.other_params)  # which AdamW updates
    outer += stage.embedding * model.embedding_params
    own = record.state_per_parameter
    return own + (adamw - own) * outer / (counts.dense + counts.experts + counts.down)


def _record(case: HostCase) -> Optimizer:
    """The optimizer of a state recipe; those that are no optimizers are of AdamW."""
    return OPTIMIZERS.get(case.workload.recipe.name, OPTIMIZERS["adamw"])


def _matrices(case: HostCase, kind: LayerKind) -> list[Number]:
    """Mean elements of a layer's matrices on this device: mixer, MLP, experts."""
    experts = kind.expert_params / kind.matrices / case.layout.expert
    sizes = kind.mixer_params / 4, kind.mlp_width and kind.mlp_params / kind.matrices, experts
    return [size / case.layout.tensor for size in sizes]


def _gathered(case: HostCase, kind: LayerKind) -> Number:
    """Elements of a layer's matrices on this device, whole over fsdp."""
    mixer, mlp, experts = _matrices(case, kind)
    return 4 * mixer + kind.matrices * (mlp + experts)


def narrow_copies(case: HostCase) -> Number:
    """BF16 copies of the layers' matrices; with fsdp they are gathered again instead."""
    if not case.formats.narrow:
        return 0
    copied = case.of_layers(lambda kind: _gathered(case, kind)) * case.formats.stream
    return choose(case.layout.fsdp > 1, 0, copied)


# -- activations


def activations(case: HostCase) -> Number:
    """Activations of all layers and micro-batches in flight."""
    kept = case.of_layers(lambda kind: _tensors(case, kind, case.layout.recompute))
    masked = case.workload.sequence if case.workload.packed else 0
    return case.stage.in_flight * kept + case.tokens * masked * FP32


def _tensors(case: HostCase, kind: LayerKind, recompute: Recompute) -> Number:
    """Bytes that one layer keeps."""
    tensors = host_tensors(kind, case.model.hidden, case.formats, recompute)
    split = {"tensor": case.layout.tensor}
    total = sum(case.tokens * one.token_bytes / split.get(one.split, 1) for one in tensors)
    # outputs of experts are summed twice: on their rank, and on the token's
    sent = case.tokens * kind.top_k * case.model.hidden * case.formats.stream
    return total + choose(case.layout.expert > 1, sent, 0) * (recompute == "none")


def holes(case: HostCase, grads: Number, copies: Number) -> Number:
    """Bytes of the heap that are freed between blocks that stay, and never used again.

    Gradients fill what the layers leave, but not what half as large blocks leave: BF16 copies of
    matrices, their BF16 gradients and the copies' fp32 copies. Of the vocabulary's tables under
    fsdp one block is lost each time that some are made, the largest: two gathers, the loss, and two
    gradients.
    """
    left = larger(HOLES * _freed(case), grads) - grads
    sizes = 2 * case.formats.stream + case.formats.product * (case.formats.product == FP32)
    table, stage, stream = case.table, case.stage, case.formats.stream
    scores = case.tokens * case.model.vocab / case.layout.tensor * stream
    tables = stage.embedding * 2 * table * FP32
    tables += stage.head * (table * (FP32 + case.head_element) + larger(scores, table * stream))
    return left + HOLES * copies * sizes / stream + case.gathers * tables


def _freed(case: HostCase) -> Number:
    """Bytes in the heap that the layers' passes free while other blocks above them stay.

    Of each pass: what rotary embeddings and residual sums replace, products before their adapters
    are added, weights that fsdp gathers. What is recomputed is freed again after the forward pass,
    and so is all of a micro-batch between gradients that stay.
    """
    recomputed = (
        smaller(1, NARROW_LAYERS / larger(1, case.stage.layers)) if case.formats.narrow else 1
    )

    def of_layer(kind: LayerKind) -> Number:
        replaced = sum(count * width for count, width in _replaced(case, kind)) * case.tokens
        gathered = case.gathers * 2 * _gathered(case, kind)
        whole = _tensors(case, kind, "none")
        kept = _tensors(case, kind, case.layout.recompute)
        freed = (choose(case.repeated, 2, 1) * replaced + gathered) * case.formats.stream
        return freed + choose(case.repeated, whole, recomputed * (whole - kept))

    return case.of_layers(of_layer)


def _replaced(case: HostCase, kind: LayerKind) -> Iterator[tuple[Number, Number]]:
    """(number, elements of a token) of blocks of a layer's forward pass that nothing keeps."""
    hidden, tensor = case.model.hidden, case.layout.tensor
    heads = (kind.query_width / tensor, kind.key_width / tensor)
    yield from ((4, width) for width in heads)
    yield 2, hidden
    if case.trained or case.layout.recompute != "none":
        return
    for width in (*heads, kind.value_width / tensor, hidden, hidden):
        yield 2, width
    yield 2 * (kind.matrices - 1), kind.mlp_width / tensor


def _activation_text(case: HostCase) -> str:
    live = activations(case) / case.stage.in_flight / case.stage.layers / case.tokens
    flight = f" x {case.stage.in_flight:g} in flight" if case.stage.in_flight > 1 else ""
    return f"{case.extent} x {live:.6g} B{flight}, {case.layout.recompute} recomputed"


# -- temporaries


def loss(case: HostCase) -> Number:
    """Final norm, kept logits, gradient of a product's, fp32 copy and gradient of the head."""
    tokens, table = case.tokens, case.table
    logits = tokens * case.model.vocab / case.layout.tensor
    # measured with units for BF16; without, BF16 scores are products in fp32, twice as large
    scores = logits * case.formats.stream
    total = choose(scores <= KEPT_LOGITS, scores, 0)
    total += smaller(LOSS_PRODUCT, scores) + smaller(LOSS_BLOCK, logits * FP32)
    # the final norm, and the gradient of the input of the head
    total += (4 if case.formats.narrow else 3) * tokens * case.model.hidden * FP32
    copied = case.formats.narrow and case.formats.attention == FP32
    total += (case.trained + copied) * table * FP32 + case.gathers * table * case.head_element
    # the scores are freed before the head's gradient is exchanged
    return case.stage.head * larger(total, _exchanged(case, table, case.head_element))


def _one_layer(case: HostCase, kind: LayerKind) -> Number:
    total = _tensors(case, kind, "none") if case.layout.recompute != "none" else 0
    inner = kind.mlp_width + kind.top_k * kind.expert_width
    pairs = kind.query_width + kind.key_width + kind.value_width
    widest, sizes = larger(inner, pairs) / case.layout.tensor, _matrices(case, kind)
    element = case.formats.product if case.formats.narrow else FP32
    total += 2 * case.tokens * (widest + case.model.hidden) * element
    total += sizes[-1] * FP32  # of experts: their gradient before it is reordered
    if case.formats.narrow:  # the fp32 gradient of one matrix before it is rounded, and a copy
        total += 2 * FP32 * largest(sizes)
    whole, stream = _gathered(case, kind), case.formats.stream
    return total + case.gathers * whole * stream + _exchanged(case, whole, stream)


def _exchanged(case: HostCase, elements: Number, element: int) -> Number:
    """Gradients, the same split in parts, in one fp32 buffer and in gloo's; those of this rank."""
    return case.gathers * elements * (2 * element + 2 * FP32 + FP32 / case.layout.fsdp)


def received(case: HostCase) -> Number:
    """What gloo's threads hold of the largest gather: embedding, head or a layer."""
    tables = case.stage.embedding * FP32, case.stage.head * case.head_element
    layers = (_gathered(case, kind) * case.formats.stream for kind in case.model.layers)
    most = largest((case.table * larger(*tables), *layers))
    return case.gathers * most * choose(most < ARENA, 2, 1)


def update(case: HostCase) -> Number:
    """Temporaries of the optimizer, or gradients that are sent to other processes."""
    layout, record = case.layout, _record(case)
    sizes = [case.table] if record.scope == "all" else []
    sizes += [size for kind in case.model.layers for size in _matrices(case, kind)]
    grads = on_device(state.elements(case), case, 3) * FP32 * case.trained
    buckets = smaller(larger(BUCKET, case.table * FP32), grads)
    others = layout.data * layout.context * layout.expert * layout.fsdp
    own = largest(record.update_copies * size * FP32 for size in sizes)
    if record.name == "lion":
        own = smaller(LION_GROUP, grads)
    return larger(choose(others > 1, buckets, 0), own * case.trained)
