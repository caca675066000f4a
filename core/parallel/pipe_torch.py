"""A pipeline of layers over torch processes: stages, what crosses between them, the 1F1B schedule.

Each stage runs the same loss function as far as its layers go: `StageOps` gives it what came from
the stage before in place of the embeddings, and ends it where the next stage takes over. What
crosses is the residual stream and what layers reported of themselves (balance losses have
gradients, too), so any loss that makes one pass over the model can be trained. Micro-batches go
one forward, one backward (PipeDream-flush, arXiv 2006.09503): a stage holds the activations of at
most as many as there are stages from it to the end. Forward and backward messages have a group
each, so that on one a send never waits behind the other's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sabia.core.model.ops import WrappedOps
from sabia.core.parallel.mesh import Mesh
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec

Tensor = torch.Tensor
Stats = dict[str, dict[int, Tensor]]
Sums = dict[str, Tensor]
MICRO_BATCHES_PER_STAGE = 4  # by default: leaves a bubble of about a fifth


def stage_layers(spec: ModelSpec, stages: int) -> list[range]:
    """Runs of layers whose largest number of parameters, embedding and head counted, is least."""
    sizes = [0] * len(spec.layers)
    for tensor in spec.tensors():
        place = tensor.layer
        if place is None:
            place = 0 if tensor.component == "embedding" or tensor.name == "embed_norm" else -1
        sizes[place] += tensor.size
    if spec.tied and stages > 1:
        sizes[-1] += spec.tensors()[0].size
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    ends = _even_cuts(sums, stages)
    return [range(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _even_cuts(sums: list[int], parts: int) -> list[int]:
    """Ends of `parts` runs (none empty) of the items with these running sums, the most even."""
    count = len(sums) - 1
    best = [(sums[n], [n]) for n in range(count + 1)]  # of the first n items, in one part
    for part in range(2, parts + 1):
        found: list[Any] = [None] * (count + 1)
        for n in range(part, count + 1):
            tries = ((max(best[m][0], sums[n] - sums[m]), m) for m in range(part - 1, n))
            largest, cut = min(tries)
            found[n] = (largest, [*best[cut][1], n])
        best = found
    return best[count][1]


def stages_of(
    spec: ModelSpec, table: Mapping[str, TensorSpec], layers: Sequence[range]
) -> dict[str, tuple[int, ...]]:
    """Tensor → the stages that hold it: one, or the first and the last for a tied embedding."""
    last = len(layers) - 1
    by_layer = {layer: number for number, run in enumerate(layers) for layer in run}
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in table.items():
        if tensor.layer is not None:
            found[name] = (by_layer[tensor.layer],)
        elif name == "embed":
            found[name] = (0, last) if spec.tied and last else (0,)
        elif name == "embed_norm":
            found[name] = (0,)
        else:
            found[name] = (last,)
    return found


class HandedOn(Exception):
    """Ends the loss function in a stage before the last: the stream and the stats so far."""

    def __init__(self, x: Tensor, stats: Stats) -> None:
        super().__init__("a stage of the pipeline has run its layers")
        self.x, self.stats = x, stats


class StageOps(WrappedOps):
    """`base` in one stage of a pipeline; `came`: what came from the stage before."""

    def __init__(self, base: Any, layers: range, last: bool) -> None:
        super().__init__(base)
        self.layers, self.last = layers, last
        self.came: tuple[Tensor, Stats] | None = None

    def stage(self, embed: Callable[[], Tensor], layers: int) -> tuple[Tensor, range]:
        """See Ops.stage."""
        return (embed() if self.came is None else self.came[0]), self.layers

    def staged(self, x: Tensor, stats: Stats) -> tuple[Tensor, Stats]:
        """See Ops.staged."""
        for name, by_layer in (self.came[1] if self.came else {}).items():
            stats[name] = by_layer | stats.get(name, {})
        if not self.last:
            raise HandedOn(x, stats)
        return x, stats


@dataclass(frozen=True)
class Form:
    """What one message holds: the stream, then figures by (name, layer)."""

    labels: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    trained: tuple[bool, ...]  # which have a gradient to be sent back

    def picked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those with a gradient."""
        return [x for x, trained in zip(tensors, self.trained, strict=True) if trained]


class _Wire:
    """Messages to one neighbour and from the other; their forms are told once for each shape."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.forms: dict[Any, Form] = {}
        self.sent: list[tuple[Any, Tensor]] = []

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Without waiting."""
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            self.sent.append((dist.isend(tensor, to, group=self.group), tensor))

    def receive(self, shapes: Any, dtypes: Any, source: int) -> list[Tensor]:
        """Tensors of these shapes."""
        found = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(tensor, source, group=self.group)
            found.append(tensor)
        return found

    def tell(self, key: Any, form: Form, to: int) -> None:
        """Say what messages of this kind hold."""
        if key not in self.forms:
            dist.send_object_list([form], to, group=self.group, device=self.device)
            self.forms[key] = form

    def ask(self, key: Any, source: int) -> Form:
        """What messages of this kind hold."""
        if key not in self.forms:
            told: list[Any] = [None]
            dist.recv_object_list(told, source, group=self.group, device=self.device)
            self.forms[key] = told[0]
        return self.forms[key]

    def flush(self) -> None:
        """Wait until all has been sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward pass."""

    came: list[Tensor]
    came_form: Form | None
    went: list[Tensor]
    went_form: Form | None
    loss: Tensor | None = None


class Pipeline:
    """This process's stage; collective among the processes that differ along `pipe` alone."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, tied: bool) -> None:
        peers = next(ranks for ranks in mesh.peers(("pipe",)) if rank in ranks)
        self.number, self.last = peers.index(rank), peers[-1] == rank
        self.before = peers[self.number - 1] if self.number else -1
        self.after = -1 if self.last else peers[self.number + 1]
        self.count, self.device, self.end = len(peers), device, peers[-1]
        self.group, *both = (_own_group(mesh.peers(("pipe",)), rank) for _ in range(3))
        self.forth, self.back = (_Wire(group, device) for group in both)
        ends = [[ranks[0], ranks[-1]] for ranks in mesh.peers(("pipe",))]
        self.ends = _own_group(ends, rank) if tied else None
        self._sums: dict[Any, dict[str, tuple[int, ...]]] = {}

    def run(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        ops: StageOps,
        forward: Callable[[int], tuple[Tensor, Tensor, dict[str, Tensor]]],
        train: bool,
    ) -> Iterator[Sums]:
        """Take all micro-batches through; yields the sums of each (of zeros before the end).

        forward(i) is the loss function on micro-batch i; with `train` gradients are added up.
        """
        passes: dict[int, _Pass] = {}
        for forwards, number in self._schedule(len(micro_batches), train):
            if not forwards:
                self._backward(passes.pop(number))
                continue
            key = (train, *((k, tuple(v.shape)) for k, v in micro_batches[number].items()))
            passes[number], sums = self._forward(key, ops, forward, number)
            yield self._same_sums(key, sums)
            if not train:
                del passes[number]
        self.forth.flush()
        self.back.flush()

    def _schedule(self, count: int, train: bool) -> Iterator[tuple[bool, int]]:
        """(whether forward, micro-batch) in the order of this stage."""
        ahead = min(self.count - self.number - 1, count) if train else count
        for number in range(count):
            yield True, number
            if number >= ahead:
                yield False, number - ahead
        for number in range(count - ahead, count) if train else ():
            yield False, number

    def _forward(
        self, key: Any, ops: StageOps, forward: Callable[[int], Any], number: int
    ) -> tuple[_Pass, Sums]:
        current = _Pass([], None, [], None)
        ops.came = self._receive(key, current)
        try:
            loss, weight, extras = forward(number)
        except HandedOn as handed:
            self._send(key, handed.x, handed.stats, current)
            return current, {}
        finally:
            ops.came = None
        current.loss = loss
        return current, {"loss": loss, "weight": weight, **extras}

    def _receive(self, key: Any, current: _Pass) -> tuple[Tensor, Stats] | None:
        if self.before < 0:
            return None
        form = current.came_form = self.forth.ask(key, self.before)
        current.came = self.forth.receive(form.shapes, form.dtypes, self.before)
        for tensor in form.picked(current.came):
            tensor.requires_grad_()
        stats: Stats = {}
        for (name, layer), figure in zip(form.labels, current.came[1:], strict=True):
            stats.setdefault(name, {})[layer] = figure
        return current.came[0], stats

    def _send(self, key: Any, x: Tensor, stats: Stats, current: _Pass) -> None:
        labels = tuple((name, layer) for name in sorted(stats) for layer in sorted(stats[name]))
        went = current.went = [x, *(stats[name][layer] for name, layer in labels)]
        current.went_form = Form(
            labels,
            tuple(tuple(t.shape) for t in went),
            tuple(t.dtype for t in went),
            tuple(t.requires_grad for t in went),
        )
        self.forth.tell(key, current.went_form, self.after)
        self.forth.send(went, self.after)

    def _backward(self, current: _Pass) -> None:
        if current.loss is not None:
            current.loss.backward()
        else:
            form: Any = current.went_form
            outputs = form.picked(current.went)
            shapes, dtypes = [o.shape for o in outputs], [o.dtype for o in outputs]
            grads = self.back.receive(shapes, dtypes, self.after)
            if outputs:  # none where all parameters so far are frozen
                torch.autograd.backward(outputs, grads)
        if current.came_form is not None:
            inputs = current.came_form.picked(current.came)
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
            self.back.send(grads, self.before)

    def _same_sums(self, key: Any, sums: Sums) -> Sums:
        """The sums, or as many zeros in the same shapes where they are another stage's."""
        if key not in self._sums:
            told = [{name: tuple(torch.as_tensor(x).shape) for name, x in sums.items()}]
            dist.broadcast_object_list(told, self.end, group=self.group, device=self.device)
            self._sums[key] = told[0]
        if self.last:
            return sums
        return {k: torch.zeros(s, device=self.device) for k, s in self._sums[key].items()}

    def joined(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What all stages have found, by name."""
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, dict(found), group=self.group)
        return {name: value for part in told for name, value in part.items()}

    def sum_tied(self, gradient: Tensor) -> None:
        """Add up, in place, the gradients of an embedding that the last stage multiplies by."""
        if self.number == 0 or self.last:
            dist.all_reduce(gradient, group=self.ends)


def _own_group(peers: list[list[int]], rank: int) -> Any:
    """A new group of each list; this process's, None where it is in none."""
    made = [(ranks, dist.new_group(ranks)) for ranks in peers]
    return next((group for ranks, group in made if rank in ranks), None)
