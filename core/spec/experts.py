"""Mixtures of experts as data: a router that chooses experts for each token, and the experts.

Kinds of router: `softmax` over all experts (Switch, arXiv 2101.03961; Mixtral, Qwen3),
`softmax_chosen` over the chosen ones only (GPT-OSS), `sigmoid` (DeepSeek-V3, arXiv 2412.19437
section 2.1.2). Experts are stacked in one tensor per projection, [experts, out, in], so that the
sharding rules see an expert axis; the files' names are one per expert or Parts of a fused tensor.
"""

from dataclasses import dataclass, replace
from typing import Literal

from sabia.core.errors import UsageError
from sabia.core.spec.layers import Activation, GatedMlp
from sabia.core.spec.tensors import Row

Scores = Literal["softmax", "softmax_chosen", "sigmoid"]


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1)·gate·sigmoid(alpha·gate), gate cut at `limit`, up at ±`limit` (GPT-OSS)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Router:
    """Chooses `chosen` of `experts` for each token and says how much each counts.

    normalised: the chosen scores are divided by their sum. scale: multiplies them afterwards.
    groups: experts form groups, and only the `chosen_groups` best (by the sum of their two best
    scores) take part. correction: a bias per expert that changes the choice, not the share; no
    gradient trains it (core.train.balancing). bias: added to the linear scores.
    """

    experts: int
    chosen: int
    scores: Scores = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    correction: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        size = self.experts // self.groups
        even = size * self.groups == self.experts and self.chosen_groups <= self.groups
        if not even or self.chosen > size * self.chosen_groups:
            raise UsageError(
                f"config.json: {self.chosen} of {self.experts} experts in {self.chosen_groups} of "
                f"{self.groups} groups (expected groups that divide the experts, and no more "
                "chosen experts than those groups have)"
            )

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`; every rank of a mesh needs all scores."""
        count = ((self.experts,), ("choice",))
        rows = [Row("mlp.router", (self.experts, width), ("choice", "embed"), "router")]
        if self.bias:
            rows.append(Row("mlp.router_bias", *count, "router", "zeros"))
        if self.correction:
            rows.append(Row("mlp.correction", *count, "router", "zeros", trained=False))
        return tuple(rows)


@dataclass(frozen=True)
class Experts:
    """Routed gated feed-forward parts of inner `width`, and one that every token visits.

    shared: inner width of the latter (0: there is none); several shared experts are one of their
    summed width. shared_gate: its output is weighted by a sigmoid of the token (Qwen3-Next).
    """

    router: Router
    width: int
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`."""
        return self.router.rows(width) + self._routed(width) + self._shared(width)

    def _routed(self, width: int) -> tuple[Row, ...]:
        """The dense part's tensors with an axis of experts in front."""
        count, share = self.router.experts, (self.router.chosen, self.router.experts)
        return tuple(
            replace(
                row,
                name=row.name.replace("mlp.", "mlp.experts."),
                shape=(count, *row.shape),
                axes=("expert", *row.axes),
                active_share=share,
            )
            for row in GatedMlp(self.width, bias=self.bias).rows(width)
        )

    def _shared(self, width: int) -> tuple[Row, ...]:
        if not self.shared:
            return ()
        rows = tuple(
            replace(row, name=row.name.replace("mlp.", "mlp.shared."))
            for row in GatedMlp(self.shared).rows(width)
        )
        gate = Row("mlp.shared_gate", (1, width), ("choice", "embed"), "router")
        return rows + (gate,) * self.shared_gate
