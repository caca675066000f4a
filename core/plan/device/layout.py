"""What is trained and its parallel layout: Workload, Layout, and Setting (both with the software).

The axes are those of the trainer (core.parallel.mesh): rows of a batch are split over data, fsdp
and expert; the tokens of a row over context; heads, widths and vocabulary over tensor; layers over
pipe. In a search the numbers are NumPy arrays, one entry per candidate. A Setting has the common
properties for the formulas of memory and of time.

Properties of the training software that change memory or time: presets in data/stacks.toml.

Two runs of one model on the same chips differ by their software: how much of the collectives
overlaps with computation, how much network bandwidth they reach, which logits are kept. A preset
states these facts; the constants of time are fitted by a script (data/calibration.toml).

Of the stages of a pipeline only those that can be the fullest are computed. Under 1F1B (arXiv
2006.09503) stage r of p has the activations of p - r micro-batches; with v virtual stages per
device (arXiv 2104.04473) of 2(p-1-r) + (v-1)p + 1 runs of its L/(pv) layers, that is of p + (p-1)/v
micro-batches on the first (arXiv 2205.05198, section 4.2.3); never of more than one step has. Where
the depth is not divisible, the first and the last stage, which have the embedding and the head,
have fewer layers (arXiv 2407.21783, section 3.3.2).
"""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from sabia.core.options.option import unknown
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.elementwise import Number, choose, larger, rounded_up, smaller
from sabia.core.plan.memory import StateRecipe

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
AXES = ("data", "fsdp", "expert", "context", "tensor", "pipe")


@dataclass(frozen=True)
class Abilities:
    """Abilities of a training software.

    axes: those that may be above 1. zero: ZeRO levels over fsdp. even_hidden: fsdp must divide the
    hidden size. copied_heads: tensor may be a multiple of the key-value heads. loose_stages: stages
    may differ by a layer; otherwise the layers and up to `outer` more (embedding, head) are split
    evenly. halves: context splits a row into twice as many pieces (causal balance). recipes: its
    state recipes, the usual one first (empty: any).
    """

    axes: tuple[str, ...] = AXES
    zero: tuple[int, ...] = (3,)
    interleaved: bool = False
    experts_over_tensor: tuple[bool, ...] = (False,)
    sequence_parallel: bool = True
    even_hidden: bool = False
    copied_heads: bool = False
    loose_stages: bool = False
    outer: int = 0
    halves: bool = False
    recipes: tuple[str, ...] = ()

    def choices(self, field: str) -> tuple[Any, ...]:
        """The values of a setting that is not a number of devices."""
        if field == "sequence_parallel":
            return (True, False) if self.sequence_parallel else (False,)
        return RECOMPUTE if field == "recompute" else tuple(getattr(self, field))


@dataclass(frozen=True)
class Stack:
    """Properties of a training software, and the layouts that it `can` run.

    logit_bytes: peak bytes of a device per logit (10: bf16 logits, fp32 softmax, fp32 gradient);
    split_logit_bytes: where tensor ranks split the vocabulary, if different. loss_chunk_bytes:
    largest size of the logits of a chunked loss (0: no chunks). final_norm_bytes: bytes that the
    norm before the head keeps per element (0: that of the element). gathered_layers: layers with
    gathered weights at the same time under ZeRO-3; whole_ends: embedding and head stay gathered all
    step. context_bytes: memory of the runtime on each device; utilisation: share of the device's
    memory that a layout may take (the published layouts of a software that was measured fit all of
    it, with context_bytes). keeps_whole_gradients: under ZeRO-2 and 3 gradients are not split
    between the micro-batches of a step, but whole on each device (no_sync, or
    set_requires_gradient_sync(False)). pipe_keeps_whole: in a pipeline ZeRO splits neither weights
    nor gradients during a step. stream_pools: memory of communication is not reused by computation.
    expert_imbalance: tokens of the fullest device over the mean, in MoE models. folded_experts,
    folded_context: state of dense weights is also split over the expert axis, all state over the
    context axis. whole_context: across context ranks attention also computes masked scores, and
    keeps the keys of the whole row. sequence_parallel: norms and residual can be split over tensor;
    keeps_gathered: the gathered form of them is kept. keeps_gradients: gradients stay allocated in
    the forward pass even without accumulation. casts_weights: all weights are cast at once where
    the computation has a narrower dtype. wide_embedding: the table stays in FP32, and is gathered
    so, since rows are rounded after they are read; a tied head casts it. update_bytes: temporary
    bytes of the optimizer per updated element. attention_matrix: the attention kernel keeps its
    s x s matrix. dropout: masks are kept.
    keeps_narrow: inputs of FP8 and FP4 products are kept in that format. narrow_input_bytes: with
    such products and full recomputation, bytes kept per element of a layer's input besides it.
    drops: tensors of a layer (names of memory_kept.py) that fused kernels never keep.
    selective_keeps: those that selective recomputation keeps; empty: all but the attention matrix
    (arXiv 2205.05198).

    hides_data, hides_tensor, hides_pipe: collectives along data and fsdp, along tensor, and sends
    between stages overlap with computation. expert_overlap: share of the all-to-all of experts that
    overlaps; sends_once: a token is sent once to each node with experts of it, not once per expert.
    reruns_all: recomputation runs a layer to its end, not to the last needed tensor. bare_network:
    a collective across nodes has the network bandwidth of one chip, not that of all its ranks in
    the node. reduce_bytes: bytes per gradient element in communication under ZeRO-2 and 3; below
    that it is in the recipe's format. attention_slowdown: time of the attention kernel over that of
    FlashAttention-2 and later. narrow_attention: attention has the rate of the format of the other
    products. fused_sinks: it is as fast with learned scores in the softmax as without.
    launched: share of an MoE layer's kernels that the host launches one by one and waits
    for, as it must where it has to know the tokens of each expert (0: graphs of whole steps).

    host: this project's trainer on CPUs, whose memory host_memory.py computes, without the
    interpreter. widened: the CPU multiplies BF16 in fp32.
    """

    name: str
    can: Abilities = field(default_factory=Abilities)
    logit_bytes: float = 10
    gathered_layers: int = 2
    context_bytes: float = 3.5e9
    utilisation: float = 1.0
    keeps_whole_gradients: bool = False
    expert_imbalance: float = 1.2
    folded_experts: bool = False
    folded_context: bool = False
    whole_context: bool = False
    loss_chunk_bytes: float = 0
    split_logit_bytes: float = 0
    final_norm_bytes: float = 0
    pipe_keeps_whole: bool = False
    whole_ends: bool = False
    stream_pools: bool = False
    sequence_parallel: bool = True
    keeps_gathered: bool = False
    keeps_gradients: bool = True
    casts_weights: bool = False
    wide_embedding: bool = False
    update_bytes: float = 0
    attention_matrix: bool = False
    dropout: bool = False
    keeps_narrow: bool = False
    narrow_input_bytes: float = 0
    drops: tuple[str, ...] = ()
    selective_keeps: tuple[str, ...] = ()
    hides_data: bool = True
    hides_tensor: bool = False
    hides_pipe: bool = True
    expert_overlap: float = 0
    sends_once: bool = False
    reruns_all: bool = False
    bare_network: bool = False
    reduce_bytes: float = 4
    attention_slowdown: float = 1
    narrow_attention: bool = False
    fused_sinks: bool = False
    launched: float = 1
    host: bool = False
    widened: bool = False
    source: str = ""
    date: datetime.date | None = None


@cache
def load_stacks() -> dict[str, Stack]:
    """All presets by name."""
    data = read_data("stacks.toml")
    return {name: _stack(name, data.get(own.get("like"), {}) | own) for name, own in data.items()}


def _stack(name: str, entry: dict[str, Any]) -> Stack:
    given = _tuples(entry) | {"can": Abilities(**_tuples(entry.get("can", {})))}
    given.pop("like", None)
    return Stack(name, **given)


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(x) if isinstance(x, list) else x for key, x in entry.items()}


def find_stack(name: str) -> Stack:
    """The preset `name`. Raises UsageError."""
    stacks = load_stacks()
    if name not in stacks:
        raise unknown("--stack", name, stacks)
    return stacks[name]


def stack_on(name: str, chip: Chip) -> Stack:
    """The preset `name`; for this project's trainer the one for the kind of chip."""
    return find_stack("sabia-cpu" if name == "sabia" and chip.family == "CPU" else name)


@dataclass(frozen=True)
class Layout:
    """A parallel layout.

    zero: ZeRO level over fsdp: 0 none, 1 optimizer state, 2 also gradients, 3 also weights
    (arXiv 1910.02054). micro_batch: rows per forward pass of one device group. virtual: virtual
    pipeline stages per device (arXiv 2104.04473). recompute: activation recomputation in the
    backward pass. experts_over_tensor: tensor ranks hold different whole experts, not slices of
    each. sequence_parallel: norms and residual are split by tokens over the tensor ranks
    (arXiv 2205.05198).
    """

    data: Number = 1
    fsdp: Number = 1
    expert: Number = 1
    context: Number = 1
    tensor: Number = 1
    pipe: Number = 1
    micro_batch: Number = 1
    virtual: Number = 1
    recompute: Recompute = "full"
    zero: int = 3
    experts_over_tensor: bool = False
    sequence_parallel: bool = True

    @property
    def chips(self) -> Number:
        """Number of devices."""
        return self.rows * self.context * self.tensor * self.pipe

    @property
    def rows(self) -> Number:
        """Number of parts into which the rows of a batch are split."""
        return self.data * self.fsdp * self.expert

    @property
    def expert_ranks(self) -> Number:
        """Number of parts into which the set of experts is split."""
        return self.expert * (self.tensor if self.experts_over_tensor else 1)

    @property
    def axes_words(self) -> str:
        """The axes above 1, such as 'fsdp=8,tensor=2'."""
        axes = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ",".join(axes) or "data=1"

    @property
    def described(self) -> str:
        """The value for --fixed-layout: 'fsdp=8,tensor=2,micro-batch=1,recompute=full,zero=3'."""
        words = f"{self.axes_words},micro-batch={self.micro_batch},recompute={self.recompute}"
        words += f",zero={self.zero}" + f",virtual={self.virtual}" * (self.virtual > 1)
        return words + ",experts-over-tensor=yes" * self.experts_over_tensor

    def accumulation(self, batch_rows: Number) -> Number:
        """Micro-batches of a step of `batch_rows` sequences; a whole number in a valid layout."""
        return batch_rows / (self.rows * self.micro_batch)


Precision = Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4", "int8"]


@dataclass(frozen=True)
class Workload:
    """One training step.

    sequence: tokens of a row. batch_rows: sequences of an optimizer step, over all chips.
    precision: of the layers' matrix products. recipe: bytes of state per parameter. adapter_params:
    trained elements of LoRA adapters; None where all parameters are trained. packed: rows contain
    several documents without attention between them.
    """

    architecture: Architecture
    sequence: int
    batch_rows: int
    recipe: StateRecipe
    precision: Precision = "bf16"
    adapter_params: int | None = None
    packed: bool = False

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.sequence * self.batch_rows


PRODUCT_BYTES = {"fp8": 1, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "int8": 1}


@dataclass(frozen=True)
class Setting:
    """A workload, its layout and the training software."""

    workload: Workload
    layout: Layout
    stack: Stack

    @property
    def model(self) -> Architecture:
        """The model."""
        return self.workload.architecture

    @property
    def trained(self) -> bool:
        """Whether all weights are trained, and so have gradients, not only adapters."""
        return self.workload.adapter_params is None

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on one device, before tensor ranks split them."""
        return self.layout.micro_batch * self.workload.sequence / self.layout.context

    @property
    def element(self) -> int:
        """Bytes per element of the residual stream and of weights in computation."""
        return 4 if self.workload.precision == "fp32" else 2

    @property
    def input_element(self) -> float | None:
        """Bytes per element of kept inputs of products, where these are kept in the low format."""
        return PRODUCT_BYTES.get(self.workload.precision) if self.stack.keeps_narrow else None

    @property
    def token_split(self) -> Number:
        """Ranks over which sequence parallelism splits norms and residual."""
        split = self.layout.sequence_parallel and self.stack.sequence_parallel
        return self.layout.tensor if split else 1

    @property
    def sharding(self) -> Number:
        """Ranks over which ZeRO splits dense weights and their state."""
        return self.expert_sharding * (self.layout.expert if self.stack.folded_experts else 1)

    @property
    def expert_sharding(self) -> Number:
        """The same for routed experts, which the expert axis always splits."""
        return self.layout.fsdp * (self.layout.context if self.stack.folded_context else 1)

    @property
    def keeps_gradients(self) -> Number:
        """1 where gradients are allocated before a backward pass begins, else 0."""
        several = self.layout.accumulation(self.workload.batch_rows) > 1
        return choose(several, 1, 1 if self.stack.keeps_gradients else 0)


FEW = 1 / 8  # largest share of leading dense layers


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
    ends = choose((pipe - 2) * longest + 2 * shortest >= depth, shortest, longest)
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


def _in_flight(layout: Layout, stage: Number, passes: Number) -> Number:
    pipe, virtual = layout.pipe, layout.virtual
    runs = 2 * (pipe - 1 - stage) + (virtual - 1) * pipe + 1
    return smaller(passes, larger(1, choose(virtual > 1, runs / virtual, pipe - stage)))
