"""Peak memory of this project's trainer on CPUs (torch), interpreter and imports left out.

A process's memory is what its allocator has taken from the system. glibc gives large blocks back
when they are freed (mallopt(3), M_MMAP_THRESHOLD; from 32 MiB, or from 1 MiB in a run that is to
spare memory, core/train/host_heap.py); smaller ones stay in the heap. There, gradients settle in
the holes that activations leave, and the next temporaries find no hole that is large enough: so
what the heap ever held of both adds up, though they are not alive together. The peak is therefore
the heap at its fullest, and the large blocks at the fullest of four instants:

  loss       activations of a micro-batch, kept logits, the head's gradient
  backward   activations, and what one layer's backward pass needs besides
  end        all gradients, and those of the embedding on their way or the first layer at work
  update     all gradients, and the temporaries of the optimizer or of the gradients' sum

Parameters, gradients and optimizer state are fp32 in every precision (core/train/stepper.py). BF16
copies of all matrices live from the forward pass of a micro-batch to the end of its backward pass;
under fsdp a layer has them only while it is computed. The state recipe names the optimizer alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device import host_kept
from sabia.core.plan.device.host_kept import FP32, Formats
from sabia.core.plan.device.layout import Recompute
from sabia.core.plan.device.memory_kept import KeptTensor
from sabia.core.plan.device.memory_state import StageCase, Term, billions, ways
from sabia.core.plan.elementwise import Number, choose, larger, smaller

HEAP_BLOCK, SPARING_BLOCK = 32 << 20, 1 << 20
KEPT_LOGITS = 256 << 20  # more are computed again (core/model/ops_torch_loss.py)
LOSS_BLOCK = 8 << 20
BUCKET = 64 << 20  # of gradients that travel together (core/train/stepper_torch_shards.py)
LION_GROUP = 4 << 26

# fp32 elements of state per parameter; whole copies of a tensor that its update makes
STATES = {"muon": 1, "lion": 1, "adafactor": 0, "soap": 6}  # soap: of square matrices
COPIES = {"muon": 6, "adafactor": 5}


@dataclass(frozen=True)
class AllocatedBytes:
    """Of one thing: in the heap, and in blocks that go back to the system."""

    heap: Number = 0
    mapped: Number = 0

    def __add__(self, other: "AllocatedBytes") -> "AllocatedBytes":
        return AllocatedBytes(self.heap + other.heap, self.mapped + other.mapped)

    @property
    def total(self) -> Number:
        """Both."""
        return self.heap + self.mapped

    def where(self, condition: Number) -> "AllocatedBytes":
        """Nothing unless the condition holds."""
        return AllocatedBytes(choose(condition, self.heap, 0), choose(condition, self.mapped, 0))


def most(first: AllocatedBytes, *others: AllocatedBytes) -> AllocatedBytes:
    """The largest of each, heap and mapped: they are not alive together."""
    for other in others:
        first = AllocatedBytes(larger(first.heap, other.heap), larger(first.mapped, other.mapped))
    return first


@dataclass(frozen=True)
class HostCase(StageCase):
    """A case, and what formulas of a process's memory ask of it."""

    @property
    def formats(self) -> Formats:
        """Of activations."""
        return host_kept.formats(self.workload.precision, self.stack.widened)

    @property
    def trained(self) -> bool:
        """Whether all parameters are trained, not adapters alone."""
        return self.workload.adapter_params is None

    @property
    def heap_block(self) -> Number:
        """From this size on a block is given back; micro-batches and fsdp are to spare memory."""
        work, layout = self.workload, self.layout
        plain = work.precision == "fp32" and layout.recompute == "none" and self.trained
        spared = (layout.accumulation(work.batch_rows) > 1) | (layout.fsdp > 1)
        return choose(spared, SPARING_BLOCK, HEAP_BLOCK if plain else SPARING_BLOCK)

    def blocks(self, count: Number, size: Number) -> AllocatedBytes:
        """`count` blocks of `size` bytes."""
        small = size < self.heap_block
        return AllocatedBytes(choose(small, count * size, 0), choose(small, 0, count * size))

    @property
    def repeated(self) -> Number:
        """Whether gradients of an earlier micro-batch are there."""
        return self.layout.accumulation(self.workload.batch_rows) > 1

    @property
    def split(self) -> Number:
        """Ways in which a dense matrix is split while it is not in use."""
        return self.layout.tensor * self.layout.fsdp

    @property
    def vocabulary(self) -> Number:
        """Elements of the embedding or of the head, whole over fsdp."""
        return self.model.vocab * self.model.hidden / self.layout.tensor

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return not self.model.head_params


def host_terms(case: StageCase, instant: str) -> Iterator[Term]:
    """What a process of `case` holds at one instant; the names do not depend on it."""
    place = HostCase(**vars(case))
    live, grads, copies = activations(place), gradients(place), narrow_copies(place)
    now = {"loss": loss, "backward": layer, "end": end, "update": update}[instant](place)
    passing = instant in ("loss", "backward")
    heap = live.heap + copies.heap + larger(loss(place).heap, layer(place).heap)
    here = choose(place.repeated, grads.mapped, 0) if passing else grads.mapped
    yield _state("weights", place, 1)
    yield _state("optimizer", place, _states(place))
    yield _adapters(place)
    yield Term("gradients", grads.heap + here, lambda: _text(place, "4 B"))
    yield Term("narrow copies", copies.total if passing else 0, lambda: _text(place, "2 B"))
    yield Term("activations", live.total if passing else 0, lambda: _activation_text(place))
    yield Term("temporaries", now.total, lambda: f"of the instant ({instant})")
    freed = 0 if passing else larger(heap, now.heap) - now.heap
    yield Term("freed heap", freed, lambda: "small blocks that the backward pass has freed")


# -- state


def _outer(place: HostCase) -> Number:
    """Elements of embedding and head that this stage holds, before any split."""
    model, stage = place.model, place.stage
    copy = stage.head * (1 - stage.embedding) * model.vocab * model.hidden if place.tied else 0
    return (
        stage.embedding * model.embedding_params
        + stage.head * (model.head_params + model.other_params)
        + copy
    )


def _layers(place: HostCase) -> tuple[Number, Number]:
    """(dense elements, routed experts') of this stage's layers, before any split."""
    model = place.model
    share = place.stage.layers / model.depth
    experts = sum(kind.count * kind.expert_params for kind in model.layers)
    dense = sum(kind.count * kind.params for kind in model.layers) - experts
    return share * dense, share * experts


def _elements(place: HostCase) -> Number:
    """Parameters that this device holds."""
    dense, experts = _layers(place)
    return (dense + _outer(place) + experts / place.layout.expert) / place.split


def _states(place: HostCase) -> Number:
    """fp32 elements of optimizer state per parameter, the mean."""
    if not place.trained:
        return 0
    name = place.workload.recipe.name
    if name != "muon":
        return STATES.get(name, 2)
    dense, experts = _layers(place)
    outer = _outer(place)  # which AdamW updates
    return 1 + outer / (dense + experts + outer)


def _state(name: str, place: HostCase, per_parameter: Number) -> Term:
    size = FP32 * per_parameter
    return Term(name, _elements(place) * size, lambda: _text(place, f"{size:.3g} B"))


def _text(place: HostCase, size: str) -> str:
    layout = place.layout
    over = ways(("tensor", layout.tensor), ("fsdp", layout.fsdp))
    dense, experts = _layers(place)
    among = f" + experts {billions(experts)} x {size}{ways(('expert', layout.expert))}"
    return f"{billions(dense + _outer(place))} x {size}{among if experts else ''}{over}"


def _adapters(place: HostCase) -> Term:
    """fp32 weights, gradients, m and v of LoRA's matrices."""
    size = (place.workload.adapter_params or 0) * 4 * FP32 / place.layout.pipe
    return Term("adapters", size, lambda: f"{place.workload.adapter_params} x 16 B")


def _matrices(place: HostCase, kind: LayerKind) -> Iterator[tuple[Number, Number]]:
    """(how many, elements of each on this device) of a layer, as large as they are on average."""
    tensor = place.layout.tensor
    yield 4, kind.mixer_params / 4 / tensor
    if kind.mlp_width:
        yield kind.matrices, kind.mlp_params / kind.matrices / tensor
    if kind.experts:
        yield kind.matrices, kind.expert_params / kind.matrices / tensor / place.layout.expert


def _spread(place: HostCase, size: float, *, outer: bool) -> AllocatedBytes:
    """`size` bytes an element of all matrices held here, and of embedding and head if `outer`."""
    found = AllocatedBytes()
    share = place.stage.layers / place.model.depth
    for kind in place.model.layers:
        for count, elements in _matrices(place, kind):
            whole = size * elements / place.layout.fsdp
            found += place.blocks(share * kind.count * count, whole)
    if outer:
        vocabulary = place.model.vocab * place.model.hidden
        table = size * place.vocabulary / place.layout.fsdp
        found += place.blocks(_outer(place) / vocabulary, table)
    return found


def gradients(place: HostCase) -> AllocatedBytes:
    """Of all that is trained."""
    return _spread(place, FP32, outer=True) if place.trained else AllocatedBytes()


def narrow_copies(place: HostCase) -> AllocatedBytes:
    """BF16 copies of the layers' matrices; under fsdp they are gathered again instead."""
    if not place.formats.narrow:
        return AllocatedBytes()
    return _spread(place, place.formats.stream, outer=False).where(place.layout.fsdp == 1)


# -- activations


def activations(place: HostCase) -> AllocatedBytes:
    """Of all layers and micro-batches in flight."""
    found = AllocatedBytes()
    share = place.stage.layers / place.model.depth
    for kind in place.model.layers:
        found += _tensors(place, kind, place.layout.recompute, share * kind.count)
    masked = place.workload.sequence if place.workload.packed else 0
    mask = place.blocks(1, place.tokens * masked * FP32)
    return AllocatedBytes(
        place.stage.in_flight * found.heap + mask.heap,
        place.stage.in_flight * found.mapped + mask.mapped,
    )


def _tensors(
    place: HostCase, kind: LayerKind, recompute: Recompute, layers: Number
) -> AllocatedBytes:
    found = AllocatedBytes()
    hidden = place.model.hidden
    for one in host_kept.layer_tensors(kind, hidden, place.formats, recompute):
        found += place.blocks(layers, _size(place, one))
    if recompute == "none":  # experts' outputs are added up twice: where they are, and at home
        sent = place.tokens * kind.top_k * hidden * place.formats.stream
        found += place.blocks(layers, sent).where(place.layout.expert > 1)
    return found


def _size(place: HostCase, one: KeptTensor) -> Number:
    return place.tokens * one.token_bytes / (place.layout.tensor if one.split == "tensor" else 1)


def _activation_text(place: HostCase) -> str:
    live = activations(place).total / place.stage.in_flight / place.stage.layers / place.tokens
    flight = f" x {place.stage.in_flight:g} in flight" if place.stage.in_flight > 1 else ""
    layers = f"{place.stage.layers:g} layers x {place.tokens:g} tokens"
    return f"{layers} x {live:.6g} B{flight}, {place.layout.recompute} recomputed"


# -- instants


def loss(place: HostCase) -> AllocatedBytes:
    """Last norm, kept logits, a block of scores, the head's fp32 copy, its gradient."""
    tokens, hidden = place.tokens, place.model.hidden
    kept = tokens * place.model.vocab / place.layout.tensor * FP32
    kept = choose(kept <= KEPT_LOGITS, kept, smaller(LOSS_BLOCK, kept))
    norm = 3 if place.formats.narrow else 2
    found = place.blocks(1, kept) + place.blocks(1, smaller(LOSS_BLOCK, kept))
    found += place.blocks(
        norm + 1, tokens * hidden * FP32
    )  # and the gradient of what the head reads
    table = place.blocks(1, place.vocabulary * FP32)
    found += table.where(place.trained)
    if place.formats.narrow and place.formats.attention == FP32:
        found += table
    found += place.blocks(1, place.vocabulary * place.formats.stream).where(place.layout.fsdp > 1)
    return found.where(place.stage.head > 0)


def layer(place: HostCase) -> AllocatedBytes:
    """Of the layer whose backward pass needs most: tensors made again, gradients on their way."""
    found = most(*(_one_layer(place, kind) for kind in place.model.layers))
    pending = place.blocks(1, place.vocabulary * (place.formats.stream if place.tied else FP32))
    early = pending.where(place.stage.head > 0) if place.trained else AllocatedBytes()
    if not place.tied:  # by then it is among the gradients where these are there already
        early = AllocatedBytes(0, choose(place.repeated, 0, early.mapped))
    return found + early


def _one_layer(place: HostCase, kind: LayerKind) -> AllocatedBytes:
    found = AllocatedBytes()
    if place.layout.recompute != "none":
        found = _tensors(place, kind, "none", 1)
    inner = kind.mlp_width + kind.top_k * kind.expert_width
    pairs = kind.query_width + kind.key_width + kind.value_width
    widest = larger(inner, pairs) / place.layout.tensor
    element = place.formats.product if place.formats.narrow else FP32
    found += place.blocks(2, place.tokens * widest * element)
    found += place.blocks(2, place.tokens * place.model.hidden * element)
    if kind.experts:  # their gradient, before it is laid out as they are
        stack = kind.expert_params / kind.matrices / place.layout.tensor / place.layout.expert
        found += place.blocks(1, stack * FP32)
    elements = sum(count * size for count, size in _matrices(place, kind))
    if place.formats.narrow:  # the fp32 gradient of one matrix before it is rounded, and its copy
        largest: Number = 0
        for _, size in _matrices(place, kind):
            largest = larger(largest, size)
        found += place.blocks(2, largest * FP32)
    # gathered weights, their gradients, the same cut in parts, and in one fp32 buffer
    exchanged = 3 * place.formats.stream + FP32 + FP32 / place.layout.fsdp
    return found + place.blocks(1, elements * exchanged).where(place.layout.fsdp > 1)


def end(place: HostCase) -> AllocatedBytes:
    """The first layer at work, or gradients of the embedding that are not yet in their place."""
    first = place.model.layers[0]
    own = AllocatedBytes()
    if place.layout.recompute == "none":
        own = _tensors(place, first, "none", 1)
    return most(_one_layer(place, first) + own, _embedding(place))


def _embedding(place: HostCase) -> AllocatedBytes:
    if not place.trained:
        return AllocatedBytes()
    one = place.blocks(1, place.vocabulary * FP32)
    again = one.where(place.repeated)
    found = again + one if place.tied else again
    parts = place.blocks(2, place.vocabulary * FP32).where(place.layout.fsdp > 1)
    return (found + parts).where(place.stage.embedding > 0)


def update(place: HostCase) -> AllocatedBytes:
    """Temporaries of the optimizer, or gradients on their way to other processes."""
    layout = place.layout
    largest = place.vocabulary * FP32
    buckets = smaller(larger(BUCKET, largest), gradients(place).total)
    others = layout.data * layout.context * layout.expert * layout.fsdp
    sent = place.blocks(1, buckets).where(others > 1)
    if not place.trained:
        return sent
    return most(sent, _optimizer(place))


def _optimizer(place: HostCase) -> AllocatedBytes:
    name = place.workload.recipe.name
    if name == "lion":
        return place.blocks(1, smaller(LION_GROUP, _elements(place) * FP32))
    sizes = [size * FP32 for kind in place.model.layers for _, size in _matrices(place, kind)]
    if name == "adafactor":
        sizes.append(place.vocabulary * FP32)
    found = AllocatedBytes()
    for size in sizes if name in COPIES else ():
        found = most(found, place.blocks(COPIES[name], size))
    return found
