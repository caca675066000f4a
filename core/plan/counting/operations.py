"""Floating-point operations of a token: by part, by convention, and those of training adapters.

A linear product of an [out, in] matrix takes 2·out·in forward, 4·out·in backward. Attention takes
2·score_width for each key, forward, and twice that backward; c·min(s, window) keys count, c by the
convention (that of core.spec.count, which these functions equal for its families):

  6nd     c = 0, and recurrent states count nothing either: 6·N without the input lookup
  palm    c = 1 (PaLM, arXiv 2204.02311 appendix B)
  causal  c = ½: the half of the score matrix that is masked is not computed

An encoder has no masked half and looks to both sides. LoRA (arXiv 2106.09685) leaves out the
gradients of frozen weights: 4 of 6, and all 6 for the adapters.
"""

from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.elementwise import Number
from sabia.core.spec.count import Convention, attention_share

TRAINING = 3.0  # forward and backward over forward alone


@dataclass(frozen=True)
class LayerOperations:
    """Operations of a token in the forward pass of all layers of a kind.

    mixer, mlp: linear products (mlp: with shared experts and router); experts: of the routed
    experts that it meets; scores: both products of attention; state: of a recurrent state.
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
    """Operations of a token in a forward pass: one entry a kind of layer, for all its layers.

    Those of multi-token prediction count, with their joining projections. head: all passes through
    the projection to the vocabulary.
    """

    layers: tuple[LayerOperations, ...]
    joining: float
    head: float

    @property
    def linear(self) -> float:
        """Products with weights, but the head's."""
        return sum(part.linear for part in self.layers) + self.joining

    @property
    def scores(self) -> Number:
        """Attention's products between activations."""
        return sum(part.scores for part in self.layers)

    @property
    def mixing(self) -> Number:
        """Products between activations: attention's and those with recurrent states."""
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
    """The parts of a forward pass, per token of rows of `sequence`."""
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
    """The model's operations, forward and backward: what MFU is measured against."""
    return TRAINING * operations(architecture, sequence, convention).total


def lora_flops_per_token(
    architecture: Architecture, sequence: Number, rank: int, convention: Convention
) -> Number:
    """Operations of training adapters of `rank`: without the gradients of frozen weights."""
    found = operations(architecture, sequence, convention)
    weights, added = found.linear + found.head, 2.0 * adapter_params(architecture, rank)
    return 2.0 * weights + TRAINING * (found.mixing + added)


def adapter_params(architecture: Architecture, rank: int) -> int:
    """Elements of LoRA's adapters of `rank` on every matrix of the layers that can take one."""
    if rank < 1:
        raise UsageError(f"--lora-rank: {rank} (expected 1 or more)")
    return rank * sum(kind.count * kind.adapter_edges for kind in architecture.layers)
