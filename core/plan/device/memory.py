"""Bytes on the fullest device of a layout, term by term.

A device's memory is what it always holds (weights, optimizer, the runtime) and what it holds at
one instant of a step. Only terms that are alive at the same instant are added up, and the fullest
instant counts:

  loss      activations, the logits of a micro-batch and their gradient
  backward  activations, and what the last layer's backward pass needs: whole weights under zero 3,
            a whole gradient, tensors made again under recomputation
  end       of a backward pass: all gradients, the embedding's before it is reduced, and the
            activations of the other micro-batches in flight
  update    gradients and the optimizer's temporary tensors

Nor are stages of a pipeline alike: the first holds the embedding and most micro-batches, the last
the head and the logits, and where the depth does not divide a middle one holds a layer more. Stage
and instant of the fullest device are named. Every formula takes a number or a NumPy array of
candidates (elementwise.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sabia.core.plan.device import memory_activations as activations
from sabia.core.plan.device import memory_buffers as buffers
from sabia.core.plan.device import memory_state as state
from sabia.core.plan.device.host_memory import host_terms
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.memory_stage import stages_of
from sabia.core.plan.device.memory_term import Case, Term
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.elementwise import Number, choose

GIB = 2**30
INSTANTS = {
    "backward": "in the backward pass",
    "loss": "at the loss",
    "end": "at the end of the backward pass",
    "update": "in the update",
}


@dataclass(frozen=True)
class Memory:
    """What the fullest device holds. stage, instant: where and when (arrays of names in a search).

    terms have the same names in the same order for every layout; 0 bytes where one is absent.
    """

    terms: tuple[Term, ...]
    stage: Number
    instant: Number

    @property
    def total(self) -> Number:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    def __getitem__(self, name: str) -> Number:
        """Bytes of the term `name`. Raises KeyError."""
        return {term.name: term.bytes for term in self.terms}[name]


def device_memory(workload: Workload, layout: Layout, stack: Stack) -> Memory:
    """Memory of the fullest device; with arrays in `layout`, of each candidate's."""
    found: Memory | None = None
    terms_of = host_terms if stack.host else _terms
    for stage in stages_of(workload, layout):
        case = Case(workload, layout, stack, stage)
        for instant in INSTANTS:
            here = Memory(tuple(terms_of(case, instant)), stage.name, instant)
            found = here if found is None else _fuller(found, here)
    assert found is not None
    return found


def _terms(case: Case, instant: str) -> Iterator[Term]:
    """What is alive on a stage at one instant."""
    alive = {
        state.gradients: 1 if instant in ("end", "update") else case.keeps_gradients,
        activations.kept: instant in ("loss", "backward"),
        activations.left: instant == "end",
        activations.made_again: instant in ("backward", "end"),
        buffers.head_input: instant == "loss",
        buffers.logits: instant == "loss",
        buffers.exchange: instant in ("backward", "end"),
        buffers.update: instant == "update",
    }
    yield state.weights(case)
    yield state.weight_copies(case)
    yield state.optimizer(case)
    yield state.adapters(case)
    for make, present in alive.items():
        term = make(case)
        yield Term(term.name, term.bytes * present, term.formula)
    yield buffers.gathered(case, instant)
    yield buffers.unreduced(case, instant)
    yield buffers.runtime(case)


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
    shown = sorted((term for term in memory.terms if term.bytes), key=lambda term: -term.bytes)
    width = max(len(term.name) for term in shown)
    lines = [
        f"{term.name:<{width}} {term.bytes / GIB:9.3f} GiB {term.bytes / memory.total:6.1%}  "
        f"{term.how}"
        for term in shown
    ]
    where = "" if memory.stage == "only" else f" on the {memory.stage} stage"
    last = f"{'total':<{width}} {memory.total / GIB:9.3f} GiB 100.0%  "
    return "\n".join([*lines, f"{last}fullest {INSTANTS[memory.instant]}{where}"])
