"""Proposals that a smaller model draws.

Its cache may have tokens that were not kept: `_known` says how many positions of a row are those of
its tokens, and the next pass begins there. States of all tokens so far (delta nets) are only those
after tokens that are kept.
"""

from collections.abc import Sequence

import numpy as np

from sabia.core.generate.draft.proposal import Proposal
from sabia.core.generate.pages import Begun
from sabia.core.generate.runner.interface import Logits, Runner
from sabia.core.generate.sampling import DRAFT, purpose_keys, uniforms
from sabia.core.generate.slots import Slots, Waiting
from sabia.core.spec.layers import GatedDeltaNet
from sabia.core.spec.model import ModelSpec


class ModelDrafter:
    """See core.generate.draft.proposal.Drafter."""

    def __init__(self, runner: Runner, capacity: int, slack: int, spec: ModelSpec) -> None:
        """runner: of the smaller model of this `spec`, with as many rows as the session's, and this
        `slack`."""
        self._runner, self._known = runner, np.zeros(capacity, np.int64)
        self._most_at_once = slack + 1
        self._stateful = any(isinstance(layer.mixer, GatedDeltaNet) for layer in spec.layers)
        self._ends, self._steps = self._known[:0], 1

    def admit(self, group: Sequence[Waiting], which: np.ndarray, first: int) -> None:
        """See Drafter.admit."""
        prompts = [waiting.request.prompt for waiting in group]
        prefilled = self._runner.prefill(prompts, [Begun()] * len(prompts), [""] * len(prompts))
        self._runner.admit(prefilled, which, first)
        self._known[first : first + len(which)] = prefilled.lengths[which]

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See Drafter.move."""
        self._runner.move(source, target)
        self._known[target] = self._known[source]

    def propose(self, slots: Slots, most: np.ndarray) -> Proposal:
        """See Drafter.propose."""
        rows, steps = np.arange(slots.active), int(most.max())
        self._ends, self._steps = (slots.length + slots.drawn)[rows], steps
        keys, logits, which = purpose_keys(slots.key[rows], DRAFT), *self._catch_up(slots)
        tokens = np.zeros((slots.active, steps), np.int64)
        parts = list[tuple[Logits, np.ndarray]]()
        for step in range(steps):
            uniform = uniforms(keys, slots.drawn[rows] + step)
            tokens[:, step] = self._runner.draw(logits, which, slots.params, uniform, None).tokens
            parts.append((logits, which))
            if step + 1 < steps:
                at = self._ends[:, None] + step
                logits = self._runner.step(tokens[:, step, None], at, ahead=True)
                which = rows
        return Proposal(tokens, most, self._runner.stacked(parts))

    def _catch_up(self, slots: Slots) -> tuple[Logits, np.ndarray]:
        """Run the tokens that the rows have got; logits, and their number for each row."""
        rows = np.arange(slots.active)
        while True:
            known = self._known[rows, None]
            behind = self._ends - known[:, 0]
            width = self._runner.width(min(int(behind.max()), self._most_at_once))
            last = behind.max() <= width
            counts = behind if last else np.minimum(behind - 1, width)
            at = known + np.arange(width)
            new = np.minimum(at, self._ends[:, None] - 1) - slots.length[rows, None]
            ids = slots.tokens[rows[:, None], new].astype(np.int64)
            logits = self._runner.step(ids, at, counts if width > 1 else None)
            self._known[rows] += counts
            if last:
                return logits, rows * width + counts - 1

    def settle(self, kept: np.ndarray) -> None:
        """See Drafter.settle."""
        self._runner.settle(None)
        if not self._stateful:  # the keys of the last proposal were not computed
            self._known[: len(kept)] = self._ends + np.minimum(kept, self._steps - 1)
