"""MoE layers as data: a router that selects experts for each token, and the experts.

Kinds of router: `softmax` over all experts (Switch, arXiv 2101.03961; Mixtral, Qwen3),
`softmax_top_k` over the selected ones only (GPT-OSS), `sigmoid` (DeepSeek-V3, arXiv 2412.19437
section 2.1.2). Experts are stacked in one tensor per projection, [experts, out, in], so that the
sharding rules have an expert axis; the files have one name per expert or a fused tensor.
"""

from dataclasses import dataclass, replace
from typing import Literal

from sabia.core.errors import UsageError
from sabia.core.spec.layers import Activation, GatedMlp
from sabia.core.spec.tensors import TableRow

Scores = Literal["softmax", "softmax_top_k", "sigmoid"]


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1)·gate·sigmoid(alpha·gate), gate ≤ `limit`, |up| ≤ `limit` by clamping (GPT-OSS)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Router:
    """Selects `top_k` of `experts` for each token and computes their gate weights.

    normalised: the selected scores are divided by their sum. scale: multiplies them afterwards.
    groups: experts form groups, and only the `top_k_groups` best (by the sum of their two best
    scores) are eligible. expert_bias: a bias per expert that changes the selection, not the gate
    weights (e_score_correction_bias); it has no gradient (core.train.balancing). bias: added to the
    linear scores.
    """

    experts: int
    top_k: int
    scores: Scores = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_k_groups: int = 1
    expert_bias: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        size = self.experts // self.groups
        even = size * self.groups == self.experts and self.top_k_groups <= self.groups
        if not even or self.top_k > size * self.top_k_groups:
            raise UsageError(
                f"config.json: {self.top_k} of {self.experts} experts in {self.top_k_groups} of "
                f"{self.groups} groups (expected groups that divide the experts, and no more "
                "selected experts than those groups have)"
            )

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`; each rank of a mesh needs all scores."""
        count = ((self.experts,), ("choice",))
        rows = [TableRow("mlp.router", (self.experts, width), ("choice", "embed"), "router")]
        if self.bias:
            rows.append(TableRow("mlp.router_bias", *count, "router", "zeros"))
        if self.expert_bias:
            rows.append(TableRow("mlp.correction", *count, "router", "zeros", trained=False))
        return tuple(rows)


@dataclass(frozen=True)
class Experts:
    """Routed experts, gated MLPs of inner `width`, and a shared expert for all tokens.

    shared: inner width of the shared expert (0: none); several shared experts are one of their
    summed width. shared_gate: its output is multiplied by a sigmoid gate (Qwen3-Next).
    """

    router: Router
    width: int
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""
        return self.router.rows(width) + self._routed(width) + self._shared(width)

    def _routed(self, width: int) -> tuple[TableRow, ...]:
        """The tensors of a dense MLP with a leading axis of experts."""
        count, share = self.router.experts, (self.router.top_k, self.router.experts)
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

    def _shared(self, width: int) -> tuple[TableRow, ...]:
        if not self.shared:
            return ()
        rows = tuple(
            replace(row, name=row.name.replace("mlp.", "mlp.shared."))
            for row in GatedMlp(self.shared).rows(width)
        )
        gate = TableRow("mlp.shared_gate", (1, width), ("choice", "embed"), "router")
        return rows + (gate,) * self.shared_gate
