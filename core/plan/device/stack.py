"""What the training software does, where it changes memory or time: presets in data/stacks.toml.

Two runs of one model on the same chips differ by their software: how well collectives hide behind
computation, how much of the network they reach, what is kept of the logits. A preset states these;
its constants for time are fitted by a script (data/calibration.toml), never by hand.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """Assumptions about the software.

    logit_bytes: bytes a device keeps per logit at the peak (10: bf16 logits, fp32 softmax, fp32
    gradient). loss_chunk: tokens whose logits exist at once (0: all of the micro-batch).
    gathered_layers: layers whose whole weights are held at once under zero 3. context_bytes: what
    the runtime takes on each device.
    expert_imbalance: tokens of the fullest device over the mean, in mixtures. folded_experts:
    dense weights' state is also split over the expert axis.
    attention_matrix: the attention kernel keeps its s x s matrix. dropout: masks are kept.
    fused_activation: a gated MLP keeps gate and up, and makes silu(gate) again. selective_keeps:
    tensors of a layer (names of memory_kept.py) that selective recomputation keeps; empty: all but
    the attention matrix (arXiv 2205.05198).
    """

    name: str
    logit_bytes: float = 10
    gathered_layers: int = 2
    context_bytes: float = 3.5e9
    expert_imbalance: float = 1.2
    folded_experts: bool = False
    loss_chunk: int = 0
    attention_matrix: bool = False
    dropout: bool = False
    fused_activation: bool = False
    selective_keeps: tuple[str, ...] = ()
