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

from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.elementwise import Number
from sabia.core.spec.model import Convention, attention_share

TRAINING = 3.0  # forward and backward over forward alone


@dataclass(frozen=True)
class Operations:
    """Forward FLOPs of a token.

    linear: products with weights without the head: mixers, MLPs with routers, active experts, and
    input projections of MTP layers. mixing: products between activations, of attention and with
    recurrent states. head: all passes through the projection to the vocabulary.
    """

    linear: float
    mixing: Number
    head: float

    @property
    def total(self) -> Number:
        """The forward pass."""
        return self.linear + self.mixing + self.head


def operations(model: Architecture, sequence: Number, convention: Convention) -> Operations:
    """FLOPs of a forward pass, per token of rows of `sequence` tokens; MTP layers are included.

    Raises UsageError for another convention.
    """
    share, sides = attention_share(convention, model.causal)
    linear, scores, states = 0.0, 0.0, 0.0
    for kind in (*model.layers, *model.extra):
        always = kind.count * (2.0 * (kind.mixer_params + kind.mlp_params))
        linear += always + kind.count * (2.0 * kind.active_expert_params)
        scores += kind.count * (2.0 * share * kind.score_products(sequence, sides))
        states += kind.count * (2.0 * kind.state_products if share else 0.0)
    passes = 1 + sum(kind.count for kind in model.extra)
    return Operations(
        linear=linear + 2.0 * model.extra_params,
        mixing=scores + states,
        head=2.0 * passes * model.vocab * model.hidden,
    )


def training_flops_per_token(
    model: Architecture, sequence: Number, convention: Convention = "6nd",
    rank: int | None = None,
) -> Number:  # fmt: skip
    """The model's FLOPs, forward and backward, which MFU is measured against.

    rank: of LoRA adapters, where only these are trained, without the gradients of frozen weights.
    """
    forward = operations(model, sequence, convention)
    if rank is None:
        return TRAINING * forward.total
    weights, added = forward.linear + forward.head, 2.0 * adapter_params(model, rank)
    return 2.0 * weights + TRAINING * (forward.mixing + added)


def adapter_params(model: Architecture, rank: int) -> int:
    """Elements of LoRA adapters of `rank` on every matrix of the layers that can have one."""
    return rank * sum(kind.count * kind.adapter_edges for kind in model.layers)
