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

from sabia.core.plan.device import memory_buffers as buffers
from sabia.core.plan.device import memory_state as state
from sabia.core.plan.device.layout import Layout, Setting, Workload
from sabia.core.plan.device.memory_state import StageCase, Term, stages_of
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.elementwise import Number, choose, larger

GIB = 2**30
INSTANTS = {
    "backward": "in the backward pass",
    "loss": "at the loss",
    "end": "at the end of the backward pass",
    "update": "in the update",
}


@dataclass(frozen=True)
class State:
    """What a device of one stage (only, first, second or last) holds at one instant."""

    stage: Number
    instant: str
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Memory:
    """What the fullest device holds. states: all that may be the fullest; best: which is.

    In a search best and total are arrays.
    """

    states: tuple[State, ...]
    best: Number
    total: Number

    @property
    def fullest(self) -> State:
        """That of one layout."""
        return self.states[self.best]

    @property
    def terms(self) -> tuple[Term, ...]:
        """Of the fullest: the same names in the same order always, 0 bytes where one is absent."""
        return self.fullest.terms

    def __getitem__(self, name: str) -> Number:
        """Bytes of the term `name`. Raises KeyError."""
        return {term.name: term.bytes for term in self.terms}[name]


def device_memory(workload: Workload, layout: Layout, stack: Stack) -> Memory:
    """Memory of the fullest device; with arrays in `layout`, of each candidate's."""
    setting = Setting(workload, layout, stack)
    layers = buffers.layer_figures(setting)
    states: list[State] = []
    for stage in stages_of(workload, layout):
        case = StageCase(workload, layout, stack, stage, layers)
        found = _host_moments(case) if stack.host else _moments(case)
        states += [State(stage.name, instant, terms) for instant, terms in found]
    return _fullest(tuple(states))


def _host_moments(case: StageCase) -> Iterator[tuple[str, tuple[Term, ...]]]:
    from sabia.core.plan.device.host_memory import host_terms

    for instant in INSTANTS:
        yield instant, tuple(host_terms(case, instant))


def _moments(case: StageCase) -> Iterator[tuple[str, tuple[Term, ...]]]:
    """What is alive on a stage at each instant. A term is worked out once."""
    held = tuple(make(case) for make in HELD)
    gradients = state.gradients(case)
    early = Term(gradients.name, gradients.bytes * case.keeps_gradients, gradients.formula)
    passing = [(make(case), when) for make, when in PASSING.items()]
    for instant in INSTANTS:
        yield (
            instant,
            (
                *held,
                gradients if instant in ("end", "update") else early,
                *(term if instant in when else Term(term.name, 0) for term, when in passing),
                buffers.gathered(case, instant),
                buffers.unreduced(case, instant),
            ),
        )


HELD = (state.weights, state.weight_copies, state.optimizer, state.adapters, buffers.runtime)
PASSING = {
    buffers.kept: ("backward", "loss"),
    buffers.left: ("end",),
    buffers.made_again: ("backward", "end"),
    buffers.head_input: ("loss",),
    buffers.logits: ("loss",),
    buffers.exchange: ("backward", "end"),
    buffers.update: ("update",),
}


def _fullest(states: tuple[State, ...]) -> Memory:
    best: Number = 0
    most = sum(term.bytes for term in states[0].terms)
    for index, one in enumerate(states[1:], start=1):
        total = sum(term.bytes for term in one.terms)
        best = choose(total > most, index, best)
        most = larger(total, most)
    return Memory(states, best, most)


def explain(memory: Memory) -> str:
    """Terms of one layout, largest first: name, GiB, share of the total, how it is worked out."""
    shown = sorted((term for term in memory.terms if term.bytes), key=lambda term: -term.bytes)
    width = max(len(term.name) for term in shown)
    lines = [
        f"{term.name:<{width}} {term.bytes / GIB:9.3f} GiB {term.bytes / memory.total:6.1%}  "
        f"{term.how}"
        for term in shown
    ]
    at = memory.fullest
    where = "" if at.stage == "only" else f" on the {at.stage} stage"
    last = f"{'total':<{width}} {memory.total / GIB:9.3f} GiB 100.0%  "
    return "\n".join([*lines, f"{last}fullest {INSTANTS[at.instant]}{where}"])
