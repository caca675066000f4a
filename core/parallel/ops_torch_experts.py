"""Expert parallelism: rows of tokens are sent to the processes of their experts and back.

A row is one token-expert assignment. Rows are sorted by expert before they are sent, so those for
one process are contiguous; the counts are exchanged first (the only moment when a process waits for
numbers). What arrives is sorted by source, then expert; `base.dispatch` groups it by expert, and
the way back is the same in reverse. Every row is computed once, so an expert's gradient contains
the tokens of all processes along `expert`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from sabia.core.parallel.collectives_torch import send_rows

Tensor = torch.Tensor


@dataclass(frozen=True)
class DispatchState:
    """sent: the base's plan of the rows before sending; send_counts, recv_counts: rows to and from
    each process; grouped: the base's plan of the rows received; experts: theirs, in that order."""

    sent: Any
    send_counts: list[int]
    recv_counts: list[int]
    grouped: Any
    experts: Tensor


class ExpertParallelDispatcher:
    """Dispatch, products and combination over the `size` processes of `group`."""

    def __init__(self, base: Any, group: Any, size: int) -> None:
        self.base, self.group, self.size = base, group, size

    def dispatch(self, y: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Any]:
        """See Ops.dispatch."""
        rows, plan = self.base.dispatch(y, chosen, experts)  # rows[M, D], sorted by expert
        if self.size == 1:
            return rows, plan
        # counts[E]: my rows for each expert; arriving[size · E/size]: rows for my experts by source
        counts = torch.bincount(chosen.reshape(-1), minlength=experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        both = torch.stack((counts, arriving)).view(2, self.size, -1)  # [2, size, E/size]
        # the host needs the counts: the one synchronisation with the device
        send_counts, recv_counts = both.sum(2).tolist()
        rows = send_rows(rows, send_counts, recv_counts, self.group)  # [sum(recv_counts), D]
        own_experts = torch.arange(experts // self.size, device=rows.device).repeat(self.size)
        # the expert of each received row: sorted by source, then expert
        numbers = torch.repeat_interleave(own_experts, both[1].reshape(-1))
        rows, grouped = self.base.dispatch(rows[None], numbers[None, :, None], experts // self.size)
        return rows, DispatchState(plan, send_counts, recv_counts, grouped, numbers.sort().values)

    def grouped_matmul(self, rows: Tensor, weight: Tensor, plan: Any, *, name: str = "") -> Tensor:
        """The products alone; see Ops.grouped_matmul."""
        if self.size == 1:
            return self.base.grouped_matmul(rows, weight, plan, name=name)
        if not len(rows):  # no token has one of these experts, but autograd needs their gradients
            return F.linear(rows, weight[0].to(rows.dtype))
        return self.base.grouped_matmul(rows, weight, plan.grouped, name=name)

    def combine(self, rows: Tensor, plan: Any, shares: Tensor) -> Tensor:
        """See Ops.combine."""
        if self.size == 1:
            return self.base.combine(rows, plan, shares)
        # back to the order of arrival, unweighted: the gate weights are those of the senders
        ones = rows.new_ones((1, len(rows), 1))
        rows = self.base.combine(rows, plan.grouped, ones)[0]  # [sum(recv_counts), D]
        rows = send_rows(rows, plan.recv_counts, plan.send_counts, self.group)  # [M, D]
        return self.base.combine(rows, plan.sent, shares)
