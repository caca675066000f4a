"""What the training software does, where it changes memory or time: presets in data/stacks.toml.

Two runs of one model on the same chips differ by their software: how well collectives hide behind
computation, how much of the network they reach, what is kept of the logits. A preset states these;
its constants for time are fitted by a script (data/calibration.toml), never by hand.
"""

import datetime
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from sabia.core.options.option import unknown
from sabia.core.plan.catalogue import check_entry, read_data
from sabia.core.plan.chips import Chip


@dataclass(frozen=True)
class Stack:
    """Assumptions about the software.

    logit_bytes: bytes a device keeps per logit at the peak (10: bf16 logits, fp32 softmax, fp32
    gradient); split_logit_bytes: where tensor ranks split the vocabulary, if not the same.
    loss_chunk_bytes: most that the logits of a chunked loss take (0: no chunks).
    final_norm_bytes: what the norm before the head keeps of an element (0: that element).
    gathered_layers: layers whose whole weights are held at once under zero 3; whole_ends: embedding
    and head are held whole all step. context_bytes: what the runtime takes on each device.
    pipe_keeps_whole: in a pipeline zero splits neither weights nor gradients during a step.
    stream_pools: memory once used by communication is not given to computation.
    expert_imbalance: tokens of the fullest device over the mean, in mixtures.
    folded_experts, folded_context: dense weights' state is also split over the expert axis, all
    state over the context axis. whole_context: across context ranks attention computes the scores
    that are masked, too, and keeps the keys of the whole row. sequence_parallel: norms and residual
    can be split over tensor; keeps_gathered: what is gathered of them is kept so.
    keeps_gradients: their room is kept through the forward pass even without accumulation.
    casts_weights: all weights are cast at once where they are kept wider than they are computed
    with. update_bytes: temporary bytes of an element whose update is computed.
    attention_matrix: the attention kernel keeps its s x s matrix. dropout: masks are kept.
    keeps_narrow: what FP8 and FP4 products read is kept in that format. drops: tensors of a layer
    (names of memory_kept.py) that fused kernels never keep.
    selective_keeps: those that selective recomputation keeps; empty: all but the attention matrix
    (arXiv 2205.05198).

    hides_data, hides_tensor, hides_pipe: its collectives along data and fsdp, along tensor, and its
    sends between stages run beside computation. expert_overlap: share of the exchange of tokens
    between experts that does; sends_once: a token travels once to each node where it has experts,
    not once to each expert. reruns_all: recomputation runs a layer to its end, not to the last
    tensor that is needed. bare_network: a collective across nodes gets one chip's network share,
    not that of all its ranks in the node. reduce_bytes: bytes of a gradient element on the wire
    under zero 2 and 3; below that they are summed in the recipe's format. attention_slowdown: time
    of its attention kernel over that of FlashAttention-2 and later ones.

    host: this project's trainer on CPUs, whose memory is told by host_memory.py, without the
    interpreter. widened: its processor multiplies BF16 in fp32.
    """

    name: str
    logit_bytes: float = 10
    gathered_layers: int = 2
    context_bytes: float = 3.5e9
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
    update_bytes: float = 0
    attention_matrix: bool = False
    dropout: bool = False
    keeps_narrow: bool = False
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
    host: bool = False
    widened: bool = False
    source: str = ""
    date: datetime.date | None = None


@cache
def load_stacks() -> dict[str, Stack]:
    """All presets by name. Raises BadData on a faulty entry."""
    return {name: _stack(name, entry) for name, entry in read_data("stacks.toml").items()}


def _stack(name: str, entry: dict[str, Any]) -> Stack:
    known = {field.name for field in fields(Stack)} - {"name"}
    check_entry("stacks.toml", name, entry, {"source", "date"}, known)
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return Stack(name, **(entry | lists))


def find_stack(name: str) -> Stack:
    """The preset called `name`. Raises UsageError."""
    stacks = load_stacks()
    if name not in stacks:
        raise unknown("--stack", name, stacks)
    return stacks[name]


def stack_on(name: str, chip: Chip) -> Stack:
    """The preset called `name`; of this project's trainer that of the chip's kind."""
    return find_stack("sabia-cpu" if name == "sabia" and chip.family == "CPU" else name)
