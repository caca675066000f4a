"""Bytes on the fullest device of a layout, term by term.

A device's memory is what it always holds (weights, gradients, optimizer, the runtime) and what it
holds at one instant of a step. Three instants can be the fullest, and only terms that are alive at
the same one are added up:

  loss      all activations are there, and the logits of a micro-batch with their gradient
  backward  all activations, and what the last layer's backward pass needs besides: whole weights
            under zero 3, a whole gradient, tensors made again under recomputation
  update    no activations: gradients, and the optimizer's temporary tensors

Nor are stages of a pipeline alike: the first holds the embedding and most micro-batches, the last
the head and the logits, and where the depth does not divide a middle one holds a layer more. The
figure is that of the fullest stage at its fullest instant, in bytes; both are named. Every formula
takes a number or a NumPy array of candidates (elementwise.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

from sabia.core.plan.device import memory_activations as activations
from sabia.core.plan.device import memory_buffers as buffers
from sabia.core.plan.device import memory_state as state
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.memory_stage import Stage, stages_of
from sabia.core.plan.device.memory_term import Term
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.elementwise import Number, choose

GIB = 2**30
Terms = tuple[Term, ...]
Moment = Callable[[Workload, Layout, Stack, Stage], Terms]


@dataclass(frozen=True)
class Memory:
    """What the fullest device holds. stage, instant: where and when (arrays of names in a search).

    terms with the same names in the same order for every layout; 0 bytes where one is absent.
    """

    terms: Terms
    stage: Number
    instant: Number

    @property
    def total(self) -> Number:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    def __getitem__(self, name: str) -> Number:
        """Bytes of the term `name`. Raises KeyError."""
        found = {term.name: term.bytes for term in self.terms}
        return found[name]


def device_memory(workload: Workload, layout: Layout, stack: Stack) -> Memory:
    """Memory of the fullest device; with arrays in `layout`, of each candidate's."""
    found: Memory | None = None
    for stage in stages_of(workload, layout):
        held = _held(workload, layout, stack, stage)
        for instant, moment in MOMENTS.items():
            here = Memory((*held, *moment(workload, layout, stack, stage)), stage.name, instant)
            found = here if found is None else _fuller(found, here)
    assert found is not None
    return found


def _held(workload: Workload, layout: Layout, stack: Stack, stage: Stage) -> Terms:
    """What is there all the time."""
    return (
        *state.state_terms(workload, layout, stack, stage),
        buffers.context(stack),
    )


def _at_loss(workload: Workload, layout: Layout, stack: Stack, stage: Stage) -> Terms:
    return (
        activations.kept(workload, layout, stack, stage),
        Term.none(activations.AGAIN),
        buffers.logits(workload, layout, stack, stage),
        buffers.gathered_head(workload, layout, stack, stage),
        buffers.head_gradient(workload, layout, stack, stage),
        Term.none(buffers.EXCHANGE),
    )


def _in_backward(workload: Workload, layout: Layout, stack: Stack, stage: Stage) -> Terms:
    return (
        activations.kept(workload, layout, stack, stage),
        activations.made_again(workload, layout, stack),
        Term.none(buffers.LOGITS),
        buffers.gathered_layers(workload, layout, stack),
        buffers.layer_gradient(workload, layout, stack),
        buffers.exchange(workload, layout, stack),
    )


def _in_update(workload: Workload, layout: Layout, stack: Stack, stage: Stage) -> Terms:
    del workload, layout, stack, stage
    none = (activations.NAME, activations.AGAIN, buffers.LOGITS, buffers.GATHERED)
    return tuple(Term.none(name) for name in (*none, buffers.GRADIENT, buffers.EXCHANGE))


MOMENTS: dict[str, Moment] = {"loss": _at_loss, "backward": _in_backward, "update": _in_update}


def _fuller(a: Memory, b: Memory) -> Memory:
    """Of two states of the device the one with more bytes, candidate by candidate."""
    first = a.total >= b.total
    if not hasattr(first, "shape"):
        return a if first else b
    pairs = zip(a.terms, b.terms, strict=True)
    terms = tuple(Term(x.name, choose(first, x.bytes, y.bytes)) for x, y in pairs)
    return Memory(terms, choose(first, a.stage, b.stage), choose(first, a.instant, b.instant))


def explain(memory: Memory) -> str:
    """Terms of one layout, largest first: name, GiB, share of the total, how it is worked out."""
    shown = sorted((t for t in memory.terms if t.bytes), key=lambda term: -term.bytes)
    width = max(len(term.name) for term in shown)
    lines = [
        f"{term.name:<{width}} {term.bytes / GIB:9.3f} GiB {term.bytes / memory.total:6.1%}  "
        f"{term.how}"
        for term in shown
    ]
    where = "" if memory.stage == "only" else f" on the {memory.stage} stage"
    moment = {"loss": "at the loss", "backward": "in the backward pass", "update": "in the update"}
    last = (
        f"{'total':<{width}} {memory.total / GIB:9.3f} GiB 100.0%  fullest {moment[memory.instant]}"
    )
    return "\n".join([*lines, last + where])
