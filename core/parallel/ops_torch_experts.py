"""Experts on several processes: copies of tokens travel to their experts and back.

Copies leave sorted by expert, so those for one process are one run of rows; how many go where is
exchanged first (the one moment when a process waits for numbers). What arrives is sorted by source,
then expert; `base.dispatch` groups it by expert, and the way back is the same in reverse. Every row
is computed once, so the expert's gradient holds the tokens of all processes along `expert`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from sabia.core.parallel.collectives_torch import send_rows

Tensor = torch.Tensor


@dataclass(frozen=True)
class Travel:
    """sent: the base's plan of the copies that left; leaving, coming: rows to and from each.

    grouped: the base's plan of the copies that came; experts: theirs, in that order.
    """

    sent: Any
    leaving: list[int]
    coming: list[int]
    grouped: Any
    experts: Tensor


class Exchange:
    """Dispatch, products and combination over the `size` processes of `group`."""

    def __init__(self, base: Any, group: Any, size: int) -> None:
        self.base, self.group, self.size = base, group, size

    def dispatch(self, y: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Any]:
        """See Ops.dispatch."""
        rows, plan = self.base.dispatch(y, chosen, experts)
        if self.size == 1:
            return rows, plan
        counts = torch.bincount(chosen.reshape(-1), minlength=experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        both = torch.stack((counts, arriving)).view(2, self.size, -1)
        leaving, coming = both.sum(2).tolist()
        rows = send_rows(rows, leaving, coming, self.group)
        mine = torch.arange(experts // self.size, device=rows.device).repeat(self.size)
        numbers = torch.repeat_interleave(mine, both[1].reshape(-1))
        rows, grouped = self.base.dispatch(
            rows[None], numbers[None, :, None], len(mine) // self.size
        )
        return rows, Travel(plan, leaving, coming, grouped, numbers.sort().values)

    def grouped_matmul(self, rows: Tensor, weight: Tensor, plan: Any, *, name: str = "") -> Tensor:
        """The products alone; see Ops.grouped_matmul."""
        if self.size == 1:
            return self.base.grouped_matmul(rows, weight, plan, name=name)
        if not len(rows):  # nobody chose this process's experts: the gradients are still wanted
            return F.linear(rows, weight[0].to(rows.dtype))
        return self.base.grouped_matmul(rows, weight, plan.grouped, name=name)

    def combine(self, rows: Tensor, plan: Any, shares: Tensor) -> Tensor:
        """See Ops.combine."""
        if self.size == 1:
            return self.base.combine(rows, plan, shares)
        ones = rows.new_ones((1, len(rows), 1))
        rows = self.base.combine(rows, plan.grouped, ones)[0]
        rows = send_rows(rows, plan.coming, plan.leaving, self.group)
        return self.base.combine(rows, plan.sent, shares)
