"""Peak memory of this project's trainer on CPUs (torch), without interpreter and imports.

A process's memory is what its allocator has requested from the system. glibc returns blocks of
32 MiB or more when they are freed (mallopt(3), M_MMAP_THRESHOLD); smaller ones stay in the heap,
which never shrinks while blocks above them are in use. posix_memalign, which torch calls, asks for
more than the block's size, so that a block does not fit where one of its size was: what the layers
free between blocks that stay is reused in part. The rest is holes, which only the gradients, being
smaller, fill. The peak is the largest size of the heap, plus the large blocks at the one of four
instants that has most:

  loss       activations of a micro-batch, kept logits, gradient of the head
  backward   activations, and temporaries of one layer's backward pass
  end        all gradients, and the first layer's temporaries
  update     all gradients, and temporaries of the optimizer or of the reduction of gradients

Parameters, gradients and optimizer state are fp32 in every precision (core/train/stepper.py). BF16
copies of all matrices exist from the forward pass of a micro-batch to the end of its backward pass;
with fsdp only those of the layer that is computed. The state recipe only determines the optimizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sabia.core.numerics.optimizers import OPTIMIZERS, Optimizer
from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Recompute
from sabia.core.plan.device.memory_kept import FP32, Formats, formats, host_tensors
from sabia.core.plan.device.memory_state import StageCase, Term, billions, ways
from sabia.core.plan.elementwise import Number, choose, larger, smaller

HEAP_BLOCK = 32 << 20
# kernels/vocabulary_loss/torch_impl.py: larger logits are recomputed; of one product, and in fp32
KEPT_LOGITS, LOSS_PRODUCT, LOSS_BLOCK = 256 << 20, 64 << 20, 8 << 20
# measured (tests/bench/RESULTS.md): share of the freed bytes; layers whose recomputed tensors leave
# holes in BF16, where fp32 blocks that are freed hold BF16 blocks of other layers
HOLES, NARROW_LAYERS = 0.45, 4
BUCKET = 64 << 20  # gradients that are reduced together (core/train/stepper_torch_shards.py)
LION_GROUP = 4 << 26


@dataclass(frozen=True)
class AllocatedBytes:
    """Bytes in the heap, and in large blocks that are returned to the system."""

    heap: Number = 0
    mapped: Number = 0

    def __add__(self, other: "AllocatedBytes") -> "AllocatedBytes":
        return AllocatedBytes(self.heap + other.heap, self.mapped + other.mapped)

    @property
    def total(self) -> Number:
        """Heap and large blocks."""
        return self.heap + self.mapped

    def where(self, condition: Number) -> "AllocatedBytes":
        """These bytes where the condition holds, else none."""
        return AllocatedBytes(choose(condition, self.heap, 0), choose(condition, self.mapped, 0))


def most(first: AllocatedBytes, *others: AllocatedBytes) -> AllocatedBytes:
    """The largest heap and the largest mapped size: the arguments do not exist together."""
    for other in others:
        first = AllocatedBytes(larger(first.heap, other.heap), larger(first.mapped, other.mapped))
    return first


@dataclass(frozen=True)
class HostCase(StageCase):
    """A StageCase with properties of the trainer's process."""

    @property
    def formats(self) -> Formats:
        """Formats of activations."""
        return formats(self.workload.precision, self.stack.widened)

    def blocks(self, count: Number, size: Number) -> AllocatedBytes:
        """`count` blocks of `size` bytes."""
        small = size < HEAP_BLOCK
        return AllocatedBytes(choose(small, count * size, 0), choose(small, 0, count * size))

    @property
    def repeated(self) -> Number:
        """Whether gradients of an earlier micro-batch exist (gradient accumulation)."""
        return self.layout.accumulation(self.workload.batch_rows) > 1

    @property
    def split(self) -> Number:
        """Ranks over which a dense matrix is split while it is not in use."""
        return self.layout.tensor * self.layout.fsdp

    @property
    def vocabulary(self) -> Number:
        """Elements of the embedding or of the head before fsdp splits them."""
        return self.model.vocab * self.model.hidden / self.layout.tensor


def host_terms(case: StageCase, instant: str) -> Iterator[Term]:
    """Memory of a process at one instant; the names of the terms are always the same."""
    case = HostCase(**vars(case))
    live, grads, copies = activations(case), gradients(case), narrow_copies(case)
    now = {"loss": loss, "backward": layer, "end": layer, "update": update}[instant](case)
    passing = instant in ("loss", "backward")
    heap = live.heap + copies.heap + larger(loss(case).heap, layer(case).heap)
    here = choose(case.repeated, grads.mapped, 0) if passing else grads.mapped
    yield _state("weights", case, 1)
    yield _state("optimizer", case, _states(case))
    adapters = (case.workload.adapter_params or 0) * 4 * FP32  # weights, gradients, m and v
    how = f"{case.workload.adapter_params} x {4 * FP32} B"
    yield Term("adapters", adapters / case.layout.pipe, lambda: how)
    yield Term("gradients", grads.heap + here, lambda: _text(case, "4 B"))
    yield Term("narrow copies", copies.total if passing else 0, lambda: _text(case, "2 B"))
    yield Term("activations", live.total if passing else 0, lambda: _activation_text(case))
    yield Term("temporaries", now.total, lambda: f"at this instant ({instant})")
    lost = holes(case, grads, copies)
    yield Term("holes", lost, lambda: f"{HOLES} of what is freed between blocks that stay")
    freed = 0 if passing else larger(heap, now.heap) - now.heap
    yield Term("freed heap", freed, lambda: "small blocks freed by the backward pass")


# -- state


def _outer(case: HostCase) -> Number:
    """Elements of embedding and head on this stage, before any split."""
    model, stage = case.model, case.stage
    tied = not model.head_params
    copy = stage.head * (1 - stage.embedding) * model.vocab * model.hidden if tied else 0
    head = stage.head * (model.head_params + model.other_params)
    return stage.embedding * model.embedding_params + head + copy


def _layers(case: HostCase) -> tuple[Number, Number]:
    """(dense elements, elements of routed experts) of this stage's layers, before any split."""
    model = case.model
    share = case.stage.layers / model.depth
    experts = sum(kind.count * kind.expert_params for kind in model.layers)
    dense = sum(kind.count * kind.params for kind in model.layers) - experts
    return share * dense, share * experts


def _elements(case: HostCase) -> Number:
    """Parameters on this device."""
    dense, experts = _layers(case)
    return (dense + _outer(case) + experts / case.layout.expert) / case.split


def _states(case: HostCase) -> Number:
    """fp32 elements of optimizer state per parameter, the mean."""
    if not case.trained:
        return 0
    record = _record(case)
    adamw = OPTIMIZERS["adamw"].state_per_parameter
    if record.scope != "hidden matrices":
        return record.state_per_parameter
    dense, experts = _layers(case)
    outer = _outer(case)  # which AdamW updates
    own = record.state_per_parameter
    return own + (adamw - own) * outer / (dense + experts + outer)


def _record(case: HostCase) -> Optimizer:
    """The optimizer of a state recipe; those that are no optimizers are of AdamW."""
    return OPTIMIZERS.get(case.workload.recipe.name, OPTIMIZERS["adamw"])


def _state(name: str, case: HostCase, per_parameter: Number) -> Term:
    size = FP32 * per_parameter
    return Term(name, _elements(case) * size, lambda: _text(case, f"{size:.3g} B"))


def _text(case: HostCase, size: str) -> str:
    layout = case.layout
    over = ways(("tensor", layout.tensor), ("fsdp", layout.fsdp))
    dense, experts = _layers(case)
    among = f" + experts {billions(experts)} x {size}{ways(('expert', layout.expert))}"
    return f"{billions(dense + _outer(case))} x {size}{among if experts else ''}{over}"


def _matrices(case: HostCase, kind: LayerKind) -> Iterator[tuple[Number, Number]]:
    """(number, mean elements of each on this device) of a layer's matrices."""
    tensor = case.layout.tensor
    yield 4, kind.mixer_params / 4 / tensor
    if kind.mlp_width:
        yield kind.matrices, kind.mlp_params / kind.matrices / tensor
    if kind.experts:
        yield kind.matrices, kind.expert_params / kind.matrices / tensor / case.layout.expert


def _spread(case: HostCase, size: float, *, outer: bool) -> AllocatedBytes:
    """`size` bytes per element of all matrices here, with embedding and head if `outer`."""
    total = AllocatedBytes()
    share = case.stage.layers / case.model.depth
    for kind in case.model.layers:
        for count, elements in _matrices(case, kind):
            whole = size * elements / case.layout.fsdp
            total += case.blocks(share * kind.count * count, whole)
    if outer:
        vocabulary = case.model.vocab * case.model.hidden
        table = size * case.vocabulary / case.layout.fsdp
        total += case.blocks(_outer(case) / vocabulary, table)
    return total


def gradients(case: HostCase) -> AllocatedBytes:
    """Gradients of all trained parameters."""
    return _spread(case, FP32, outer=True) if case.trained else AllocatedBytes()


def narrow_copies(case: HostCase) -> AllocatedBytes:
    """BF16 copies of the layers' matrices; with fsdp they are gathered again instead."""
    if not case.formats.narrow:
        return AllocatedBytes()
    return _spread(case, case.formats.stream, outer=False).where(case.layout.fsdp == 1)


# -- activations


def activations(case: HostCase) -> AllocatedBytes:
    """Activations of all layers and micro-batches in flight."""
    layer_bytes = AllocatedBytes()
    share = case.stage.layers / case.model.depth
    for kind in case.model.layers:
        layer_bytes += _tensors(case, kind, case.layout.recompute, share * kind.count)
    masked = case.workload.sequence if case.workload.packed else 0
    mask = case.blocks(1, case.tokens * masked * FP32)
    return AllocatedBytes(
        case.stage.in_flight * layer_bytes.heap + mask.heap,
        case.stage.in_flight * layer_bytes.mapped + mask.mapped,
    )


def _tensors(
    case: HostCase, kind: LayerKind, recompute: Recompute, layers: Number
) -> AllocatedBytes:
    total = AllocatedBytes()
    hidden = case.model.hidden
    for one in host_tensors(kind, hidden, case.formats, recompute):
        split = case.layout.tensor if one.split == "tensor" else 1
        total += case.blocks(layers, case.tokens * one.token_bytes / split)
    # outputs of experts are summed twice: on their rank, and on the token's
    if recompute == "none":
        sent = case.tokens * kind.top_k * hidden * case.formats.stream
        total += case.blocks(layers, sent).where(case.layout.expert > 1)
    return total


def holes(case: HostCase, grads: AllocatedBytes, copies: AllocatedBytes) -> Number:
    """Bytes of the heap that are freed between blocks that stay, and never used again.

    Gradients fill what the layers leave, but not what half as large blocks leave: BF16 copies of
    matrices, their BF16 gradients and the copies' fp32 copies.
    """
    left = larger(HOLES * _freed(case), grads.heap) - grads.heap
    sizes = 2 * case.formats.stream + case.formats.product * (case.formats.product == FP32)
    return left + HOLES * copies.heap * sizes / case.formats.stream


def _freed(case: HostCase) -> Number:
    """Bytes in the heap that the layers' passes free while other blocks above them stay.

    Of each pass: what rotary embeddings and residual sums replace, products before their adapters
    are added, weights that fsdp gathers. What is recomputed is freed again after the forward pass,
    and so is all of a micro-batch between gradients that stay.
    """
    freed: Number = 0
    share = case.stage.layers / case.model.depth
    recomputed = (
        smaller(1, NARROW_LAYERS / larger(1, case.stage.layers)) if case.formats.narrow else 1
    )
    for kind in case.model.layers:
        layers = share * kind.count
        passes = choose(case.repeated, 2, 1)
        for count, width in _replaced(case, kind):
            size = case.tokens * width * case.formats.stream
            freed += passes * case.blocks(layers * count, size).heap
        for count, elements in _matrices(case, kind):
            gathered = case.blocks(2 * layers * count, elements * case.formats.stream)
            freed += gathered.where(case.layout.fsdp > 1).heap
        whole = _tensors(case, kind, "none", layers).heap
        kept = _tensors(case, kind, case.layout.recompute, layers).heap
        freed += choose(case.repeated, whole, recomputed * (whole - kept))
    return freed


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
    live = activations(case).total / case.stage.in_flight / case.stage.layers / case.tokens
    flight = f" x {case.stage.in_flight:g} in flight" if case.stage.in_flight > 1 else ""
    layers = f"{case.stage.layers:g} layers x {case.tokens:g} tokens"
    return f"{layers} x {live:.6g} B{flight}, {case.layout.recompute} recomputed"


# -- instants


def loss(case: HostCase) -> AllocatedBytes:
    """Final norm, kept logits, gradient of a product's, fp32 copy and gradient of the head."""
    tokens, hidden = case.tokens, case.model.hidden
    logits = tokens * case.model.vocab / case.layout.tensor
    # measured with units for BF16; without, BF16 scores are products in fp32, twice as large
    scores = logits * case.formats.stream
    norm = 3 if case.formats.narrow else 2
    total = case.blocks(1, choose(scores <= KEPT_LOGITS, scores, 0))
    total += case.blocks(1, smaller(LOSS_PRODUCT, scores))
    total += case.blocks(1, smaller(LOSS_BLOCK, logits * FP32))
    # the final norm, and the gradient of the input of the head
    total += case.blocks(norm + 1, tokens * hidden * FP32)
    table = case.blocks(1, case.vocabulary * FP32)
    total += table.where(case.trained)
    if case.formats.narrow and case.formats.attention == FP32:
        total += table
    # a tied head gathers the table in fp32, as the embedding has it
    head = case.formats.stream if case.model.head_params else FP32
    total += _exchanged(case, case.vocabulary, head)
    return total.where(case.stage.head > 0)


def layer(case: HostCase) -> AllocatedBytes:
    """The layer whose backward pass needs most: recomputed tensors, unreduced gradients."""
    return most(*(_one_layer(case, kind) for kind in case.model.layers))


def _one_layer(case: HostCase, kind: LayerKind) -> AllocatedBytes:
    total = AllocatedBytes()
    if case.layout.recompute != "none":
        total = _tensors(case, kind, "none", 1)
    inner = kind.mlp_width + kind.top_k * kind.expert_width
    pairs = kind.query_width + kind.key_width + kind.value_width
    widest = larger(inner, pairs) / case.layout.tensor
    element = case.formats.product if case.formats.narrow else FP32
    total += case.blocks(2, case.tokens * widest * element)
    total += case.blocks(2, case.tokens * case.model.hidden * element)
    if kind.experts:  # their gradient before it is reordered
        stack = kind.expert_params / kind.matrices / case.layout.tensor / case.layout.expert
        total += case.blocks(1, stack * FP32)
    elements = sum(count * size for count, size in _matrices(case, kind))
    if case.formats.narrow:  # the fp32 gradient of one matrix before it is rounded, and a copy
        largest: Number = 0
        for _, size in _matrices(case, kind):
            largest = larger(largest, size)
        total += case.blocks(2, largest * FP32)
    return total + _exchanged(case, elements, case.formats.stream)


def _exchanged(case: HostCase, elements: Number, element: int) -> AllocatedBytes:
    """Gathered weights, their gradients, the same split in parts, and in one fp32 buffer."""
    size = elements * (3 * element + FP32 + FP32 / case.layout.fsdp)
    return case.blocks(1, size).where(case.layout.fsdp > 1)


def update(case: HostCase) -> AllocatedBytes:
    """Temporaries of the optimizer, or gradients that are sent to other processes."""
    layout = case.layout
    largest = case.vocabulary * FP32
    buckets = smaller(larger(BUCKET, largest), gradients(case).total)
    others = layout.data * layout.context * layout.expert * layout.fsdp
    sent = case.blocks(1, buckets).where(others > 1)
    if not case.trained:
        return sent
    return most(sent, _optimizer(case))


def _optimizer(case: HostCase) -> AllocatedBytes:
    record = _record(case)
    if record.name == "lion":
        return case.blocks(1, smaller(LION_GROUP, _elements(case) * FP32))
    sizes = [size * FP32 for kind in case.model.layers for _, size in _matrices(case, kind)]
    if record.scope == "all":
        sizes.append(case.vocabulary * FP32)
    largest = AllocatedBytes()
    for size in sizes if record.update_copies else ():
        largest = most(largest, case.blocks(record.update_copies, size))
    return largest
