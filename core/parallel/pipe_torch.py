"""A pipeline of layers over torch processes: stages, messages between them, the 1F1B schedule.

Each stage runs the same loss function as far as its layers: `PipelineStage` replaces the embeddings
by the activations received from the stage before, and ends the function where the next stage
continues. A message holds the residual stream and the statistics of the layers (balance losses
have gradients, too), so any loss that makes one pass over the model can be trained. The schedule
alternates one forward and one backward pass (1F1B, PipeDream-flush, arXiv 2006.09503): a stage
holds the activations of at most as many micro-batches as there are stages from it to the end.
Forward and backward messages have a process group each, so that a send of one kind never waits for
one of the other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sabia.core.ops.base import Stage
from sabia.core.parallel.collectives_torch import Group, own_group
from sabia.core.parallel.mesh import Mesh

Tensor = torch.Tensor
Stats = dict[str, dict[int, Tensor]]
Sums = dict[str, Tensor]


class StageOutput(Exception):
    """Ends the loss function in a stage before the last: the residual stream and the statistics."""

    def __init__(self, x: Tensor, stats: Stats) -> None:
        super().__init__("a stage of the pipeline has run its layers")
        self.x, self.stats = x, stats


class PipelineStage(Stage):
    """The layers of one stage of a pipeline; `received`: activations of the stage before."""

    def __init__(self, layers: range, last: bool) -> None:
        self.layers, self.last = layers, last
        self.received: tuple[Tensor, Stats] | None = None

    def begin(self, embed: Callable[[], Tensor], layers: int) -> tuple[Tensor, range]:
        """See Ops.stage_input."""
        return (embed() if self.received is None else self.received[0]), self.layers

    def end(self, x: Tensor, stats: Stats) -> tuple[Tensor, Stats]:
        """See Ops.stage_output."""
        for name, by_layer in (self.received[1] if self.received else {}).items():
            stats[name] = by_layer | stats.get(name, {})
        if not self.last:
            raise StageOutput(x, stats)
        return x, stats


@dataclass(frozen=True)
class MessageSpec:
    """The tensors of one message: the residual stream, then statistics by (name, layer)."""

    labels: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    requires_grad: tuple[bool, ...]  # those have a gradient that is sent back

    def with_gradient(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that have a gradient."""
        return [x for x, has in zip(tensors, self.requires_grad, strict=True) if has]


class _P2PChannel:
    """Messages to one neighbour and from the other; their specs are sent once for each shape."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.specs: dict[Any, MessageSpec] = {}
        self.sending: list[tuple[Any, Tensor]] = []

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Start to send tensors, without waiting."""
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            # the tensor is kept so that its memory is not reused before it has been sent
            self.sending.append((dist.isend(tensor, to, group=self.group), tensor))

    def receive(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], source: int
    ) -> list[Tensor]:
        """Wait for tensors of these shapes."""
        tensors = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(tensor, source, group=self.group)
            tensors.append(tensor)
        return tensors

    def send_spec(self, key: object, spec: MessageSpec, to: int) -> None:
        """Send the spec of messages of this kind, the first time."""
        if key not in self.specs:
            dist.send_object_list([spec], to, group=self.group, device=self.device)
            self.specs[key] = spec

    def receive_spec(self, key: object, source: int) -> MessageSpec:
        """The spec of messages of this kind, received the first time."""
        if key not in self.specs:
            objects: list[Any] = [None]
            dist.recv_object_list(objects, source, group=self.group, device=self.device)
            self.specs[key] = objects[0]
        return self.specs[key]

    def flush(self) -> None:
        """Wait until all has been sent."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward pass."""

    received: list[Tensor]
    received_spec: MessageSpec | None
    sent: list[Tensor]
    sent_spec: MessageSpec | None
    loss: Tensor | None = None


class Pipeline:
    """This process's stage; collective among the processes that differ along `pipe` alone."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, tied: bool) -> None:
        peers = next(ranks for ranks in mesh.peers(("pipe",)) if rank in ranks)
        self.number, self.last = peers.index(rank), peers[-1] == rank
        self.before = peers[self.number - 1] if self.number else -1
        self.after = -1 if self.last else peers[self.number + 1]
        self.count, self.device, self.end = len(peers), device, peers[-1]
        self.group, *both = (own_group(mesh.peers(("pipe",)), rank) for _ in range(3))
        self.forward_channel, self.backward_channel = (_P2PChannel(group, device) for group in both)
        # the first and the last stage, which share a tied embedding
        ends = [[ranks[0], ranks[-1]] for ranks in mesh.peers(("pipe",))]
        self.ends = own_group(ends, rank) if tied else None
        self._sums: dict[Any, dict[str, tuple[int, ...]]] = {}

    def run(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        stage: PipelineStage,
        forward: Callable[[int], tuple[Tensor, Tensor, dict[str, Tensor]]],
        train: bool,
    ) -> Iterator[Sums]:
        """Run all micro-batches; yields the sums of each (zeros in stages before the last).

        forward(i) is the loss function on micro-batch i; with `train` gradients are accumulated.
        """
        passes: dict[int, _Pass] = {}
        for is_forward, number in self._schedule(len(micro_batches), train):
            if not is_forward:
                self._backward(passes.pop(number))
                continue
            key = (train, *((k, tuple(v.shape)) for k, v in micro_batches[number].items()))
            passes[number], sums = self._forward(key, stage, forward, number)
            yield self._same_sums(key, sums)
            if not train:
                del passes[number]
        self.forward_channel.flush()
        self.backward_channel.flush()

    def _schedule(self, count: int, train: bool) -> Iterator[tuple[bool, int]]:
        """(whether forward, micro-batch) in the order of this stage: 1F1B."""
        # warm-up: as many forward passes first as there are stages behind this one
        ahead = min(self.count - self.number - 1, count) if train else count
        for number in range(count):
            yield True, number
            if number >= ahead:  # steady state: one backward pass after each forward pass
                yield False, number - ahead
        # cool-down: the backward passes that are left
        for number in range(count - ahead, count) if train else ():
            yield False, number

    def _forward(
        self, key: object, stage: PipelineStage, forward: Callable[[int], Any], number: int
    ) -> tuple[_Pass, Sums]:
        current = _Pass([], None, [], None)
        stage.received = self._receive(key, current)
        try:
            loss, weight, extras = forward(number)
        except StageOutput as output:
            self._send(key, output.x, output.stats, current)
            return current, {}
        finally:
            stage.received = None
        current.loss = loss
        return current, {"loss": loss, "weight": weight, **extras}

    def _receive(self, key: object, current: _Pass) -> tuple[Tensor, Stats] | None:
        if self.before < 0:
            return None
        spec = current.received_spec = self.forward_channel.receive_spec(key, self.before)
        current.received = self.forward_channel.receive(spec.shapes, spec.dtypes, self.before)
        for tensor in spec.with_gradient(current.received):
            tensor.requires_grad_()  # leaves of this stage's graph: their .grad is sent back
        stats: Stats = {}
        for (name, layer), figure in zip(spec.labels, current.received[1:], strict=True):
            stats.setdefault(name, {})[layer] = figure
        return current.received[0], stats

    def _send(self, key: object, x: Tensor, stats: Stats, current: _Pass) -> None:
        labels = tuple((name, layer) for name in sorted(stats) for layer in sorted(stats[name]))
        sent = current.sent = [x, *(stats[name][layer] for name, layer in labels)]
        current.sent_spec = MessageSpec(
            labels,
            tuple(tuple(t.shape) for t in sent),
            tuple(t.dtype for t in sent),
            tuple(t.requires_grad for t in sent),
        )
        self.forward_channel.send_spec(key, current.sent_spec, self.after)
        self.forward_channel.send(sent, self.after)

    def _backward(self, current: _Pass) -> None:
        if current.loss is not None:
            current.loss.backward()
        else:
            spec: Any = current.sent_spec
            outputs = spec.with_gradient(current.sent)
            shapes, dtypes = [o.shape for o in outputs], [o.dtype for o in outputs]
            grads = self.backward_channel.receive(shapes, dtypes, self.after)
            if outputs:  # none where all parameters so far are frozen
                torch.autograd.backward(outputs, grads)
        if current.received_spec is not None:
            inputs = current.received_spec.with_gradient(current.received)
            # the stage before expects a gradient for each, also for what this stage did not use
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
            self.backward_channel.send(grads, self.before)

    def _same_sums(self, key: object, sums: Sums) -> Sums:
        """The sums; in stages before the last zeros of the same names and shapes."""
        if key not in self._sums:
            # the last stage broadcasts the shapes, the first time
            shapes = [{name: tuple(torch.as_tensor(x).shape) for name, x in sums.items()}]
            dist.broadcast_object_list(shapes, self.end, group=self.group, device=self.device)
            self._sums[key] = shapes[0]
        if self.last:
            return sums
        return {k: torch.zeros(s, device=self.device) for k, s in self._sums[key].items()}

    def joined(self, figures: Mapping[str, Any]) -> dict[str, Tensor]:
        """The figures of all stages, by name."""
        by_stage: list[Any] = [None] * self.count
        dist.all_gather_object(by_stage, dict(figures), group=self.group)
        return {name: figure for stage in by_stage for name, figure in stage.items()}

    def sum_tied(self, gradient: Tensor) -> None:
        """Add up, in place, the gradients of an embedding that the last stage multiplies by."""
        if self.number == 0 or self.last:
            dist.all_reduce(gradient, group=self.ends)
