"""FLOPs per token: by part, by convention, and those of training LoRA adapters.

A linear product of an [out, in] matrix takes 2·out·in forward, 4·out·in backward. Attention takes
2·score_width for each key, forward, and twice that backward. c·min(s, window) keys count; c depends
on the convention (as in core.spec.model, whose counts these functions equal for its families):

  6nd     c = 0, without recurrent states: 6·N without the input lookup
  palm    c = 1 (PaLM, arXiv 2204.02311 appendix B)
  causal  c = ½: the half of the score matrix that is masked is not computed

An encoder has no mask and attends in both directions. LoRA (arXiv 2106.09685) needs no gradients of
frozen weights: 4 FLOPs instead of 6, and all 6 for the adapters.
"""

from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.elementwise import Number
from sabia.core.spec.model import Convention, attention_share

TRAINING = 3.0  # forward and backward over forward alone


@dataclass(frozen=True)
class LayerOperations:
    """Forward FLOPs of a token in all layers of a kind.

    mixer, mlp: matrix products (mlp: with shared experts and router); experts: of the active routed
    experts; scores: both products of attention; state: of a recurrent state.
    """

    mixer: float
    mlp: float
    experts: float
    scores: Number
    state: float

    @property
    def linear(self) -> float:
        """Products with weights."""
        return self.mixer + self.mlp + self.experts


@dataclass(frozen=True)
class Operations:
    """Forward FLOPs of a token: one entry per kind of layer, for all its layers.

    MTP layers are included; joining: their input projections. head: all passes through the
    projection to the vocabulary.
    """

    layers: tuple[LayerOperations, ...]
    joining: float
    head: float

    @property
    def linear(self) -> float:
        """Products with weights, without the head."""
        return sum(part.linear for part in self.layers) + self.joining

    @property
    def scores(self) -> Number:
        """Products of attention between activations."""
        return sum(part.scores for part in self.layers)

    @property
    def mixing(self) -> Number:
        """Products between activations: of attention and with recurrent states."""
        return self.scores + sum(part.state for part in self.layers)

    @property
    def layer_total(self) -> Number:
        """All layers."""
        return self.linear + self.mixing

    @property
    def total(self) -> Number:
        """The forward pass."""
        return self.layer_total + self.head


def layer_operations(
    kind: LayerKind, sequence: Number, convention: Convention = "causal", causal: bool = True
) -> LayerOperations:
    """All layers of `kind` in rows of `sequence` tokens; UsageError for another convention."""
    share, sides = attention_share(convention, causal)
    return LayerOperations(
        mixer=kind.count * (2.0 * kind.mixer_params),
        mlp=kind.count * (2.0 * kind.mlp_params),
        experts=kind.count * (2.0 * kind.active_expert_params),
        scores=kind.count * (2.0 * share * kind.score_products(sequence, sides)),
        state=kind.count * (2.0 * kind.state_products if share else 0.0),
    )


def operations(
    architecture: Architecture, sequence: Number, convention: Convention = "causal"
) -> Operations:
    """FLOPs of the parts of a forward pass, per token of rows of `sequence` tokens."""
    kinds, causal = (*architecture.layers, *architecture.extra), architecture.causal
    passes = 1 + sum(kind.count for kind in architecture.extra)
    return Operations(
        layers=tuple(layer_operations(kind, sequence, convention, causal) for kind in kinds),
        joining=2.0 * architecture.extra_params,
        head=2.0 * passes * architecture.vocab * architecture.hidden,
    )


def training_flops_per_token(
    architecture: Architecture, sequence: Number, convention: Convention = "6nd"
) -> Number:
    """The model's FLOPs, forward and backward, which MFU is measured against."""
    return TRAINING * operations(architecture, sequence, convention).total


def lora_flops_per_token(
    architecture: Architecture, sequence: Number, rank: int, convention: Convention
) -> Number:
    """FLOPs of training adapters of `rank`, without the gradients of frozen weights."""
    forward = operations(architecture, sequence, convention)
    weights, added = forward.linear + forward.head, 2.0 * adapter_params(architecture, rank)
    return 2.0 * weights + TRAINING * (forward.mixing + added)


def adapter_params(architecture: Architecture, rank: int) -> int:
    """Elements of LoRA adapters of `rank` on every matrix of the layers that can have one."""
    if rank < 1:
        raise UsageError(f"--lora-rank: {rank} (expected 1 or more)")
    return rank * sum(kind.count * kind.adapter_edges for kind in architecture.layers)
