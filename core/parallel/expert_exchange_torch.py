"""Expert parallelism: rows of tokens are sent to the processes of their experts and back.

A row is one token-expert assignment. Rows are sorted by expert before they are sent, so those for
one process are contiguous; the counts are exchanged first (the only moment when a process waits for
numbers). What arrives is sorted by source, then expert; a second dispatch groups it by expert, and
the way back is the same in reverse. Every row is computed once, so an expert's gradient contains
the tokens of all processes along `expert`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sabia.core.ops.experts_torch import DispatchPlan, combine, dispatch
from sabia.core.parallel.collectives_torch import Group, send_rows

Tensor = torch.Tensor


@dataclass(frozen=True)
class DispatchState:
    """sent: the plan of the rows before sending; send_counts, recv_counts: rows to and from
    each process; grouped: the plan of the rows received."""

    sent: DispatchPlan
    send_counts: list[int]
    recv_counts: list[int]
    grouped: DispatchPlan


class ExpertExchange:
    """Dispatch and combination over the `size` processes of `group`."""

    def __init__(self, group: Group, size: int) -> None:
        self.group, self.size = group, size

    def dispatch(self, y: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Any]:
        """See Ops.dispatch."""
        rows, plan = dispatch(y, chosen, experts)  # rows[M, D], sorted by expert
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
        rows, grouped = dispatch(rows[None], numbers[None, :, None], experts // self.size)
        return rows, DispatchState(plan, send_counts, recv_counts, grouped)

    def combine(self, rows: Tensor, plan: Any, shares: Tensor) -> Tensor:
        """See Ops.combine."""
        # back to the order of arrival, unweighted: the gate weights are those of the senders
        ones = rows.new_ones((1, len(rows), 1))
        rows = combine(rows, plan.grouped, ones)[0]  # [sum(recv_counts), D]
        rows = send_rows(rows, plan.recv_counts, plan.send_counts, self.group)  # [M, D]
        return combine(rows, plan.sent, shares)
