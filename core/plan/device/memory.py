"""Bytes on the fullest device of a layout, term by term.

A device's memory has permanent terms (weights, optimizer, the runtime) and terms of one instant of
a step. Only terms that exist at the same instant are added, and the instant with the largest sum
counts:

  loss      activations, the logits of a micro-batch and their gradient
  backward  activations, and what the last layer's backward pass needs: whole weights under ZeRO-3,
            a whole gradient, recomputed tensors
  end       of a backward pass: all gradients, the embedding's before it is reduced, and the
            activations of the other micro-batches in flight
  update    gradients and the optimizer's temporary tensors

Stages of a pipeline differ too: the first has the embedding and most micro-batches, the last the
head and the logits, and where the depth is not divisible a middle one has one more layer. The
result names stage and instant of the fullest device. Every formula takes a number or a NumPy array
of candidates (elementwise.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sabia.core.plan.device import memory_state as state
from sabia.core.plan.device.layout import Layout, Setting, Stack, Workload, stages_of
from sabia.core.plan.device.memory_state import StageCase, Term
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
    """Memory of a device of one stage (only, first, second or last) at one instant."""

    stage: Number
    instant: str
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest device. states: all candidates for it; best: index of the fullest.

    In a search best and total are arrays.
    """

    states: tuple[State, ...]
    best: Number
    total: Number

    @property
    def fullest(self) -> State:
        """The fullest state, for one layout."""
        return self.states[self.best]

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the fullest state: always the same names in the same order, perhaps 0 bytes."""
        return self.fullest.terms

    def __getitem__(self, name: str) -> Number:
        """Bytes of the term `name`. Raises KeyError."""
        return {term.name: term.bytes for term in self.terms}[name]


def device_memory(workload: Workload, layout: Layout, stack: Stack) -> Memory:
    """Memory of the fullest device; with arrays in `layout`, of each candidate's."""
    layers = state.layer_figures(Setting(workload, layout, stack))
    states: list[State] = []
    for stage in stages_of(workload, layout):
        case = StageCase(workload, layout, stack, stage, layers)
        if stack.host:
            from sabia.core.plan.device.host_memory import host_terms

            states.append(State(stage.name, "step", tuple(host_terms(case))))
            continue
        states += [State(stage.name, instant, terms) for instant, terms in _instants(case)]
    best: Number = 0
    most = sum(term.bytes for term in states[0].terms)
    for index, one in enumerate(states[1:], start=1):
        total = sum(term.bytes for term in one.terms)
        best = choose(total > most, index, best)
        most = larger(total, most)
    return Memory(tuple(states), best, most)


def _instants(case: StageCase) -> Iterator[tuple[str, tuple[Term, ...]]]:
    """The terms of a stage at each instant; each term is computed once."""
    permanent = tuple(make(case) for make in PERMANENT)
    gradients = state.gradients(case)
    early = replace(gradients, bytes=gradients.bytes * case.keeps_gradients)
    temporary = [(make(case), when) for make, when in TEMPORARY.items()]
    for instant in INSTANTS:
        reduced = gradients if instant in ("end", "update") else early
        now = [term if instant in when else Term(term.name, 0) for term, when in temporary]
        units = state.gathered(case, instant), state.unreduced(case, instant)
        yield instant, (*permanent, reduced, *now, *units)


PERMANENT = (state.weights, state.weight_copies, state.optimizer, state.adapters, state.runtime)
TEMPORARY = {
    state.kept: ("backward", "loss"),
    state.kept_of_others: ("end",),
    state.recomputed: ("backward", "end"),
    state.head_input: ("loss",),
    state.logits: ("loss",),
    state.exchange: ("backward", "end"),
    state.update: ("update",),
}


def explain(memory: Memory) -> str:
    """Terms of one layout, largest first: name, GiB, share of the total, formula."""
    shown = sorted((term for term in memory.terms if term.bytes), key=lambda term: -term.bytes)
    width = max(len(term.name) for term in shown)
    lines = [
        f"{term.name:<{width}} {term.bytes / GIB:9.3f} GiB {term.bytes / memory.total:6.1%}  "
        f"{term.how()}"
        for term in shown
    ]
    at = memory.fullest
    where = "" if at.stage == "only" else f" on the {at.stage} stage"
    last = f"{'total':<{width}} {memory.total / GIB:9.3f} GiB 100.0%  "
    return "\n".join([*lines, f"{last}fullest {INSTANTS.get(at.instant, 'in a step')}{where}"])
