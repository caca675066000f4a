"""Token rows of preferences: the side of each document, and what a step's loss needs besides.

The documents of a row follow a pattern, which the name of the row's source tells: pairs of a chosen
and a rejected answer, or, for KTO, answers that a mismatched one follows: the prompt with an
answer to another prompt. The reference's log-probabilities are added where a loss needs them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sabia.core.parallel.process_group import gather_objects
from sabia.core.parallel.world import World
from sabia.core.train.losses.preference import PreferenceLoss
from sabia.core.train.stepper import Stepper
from sabia.core.train.token_rows import BatchArrays, TokenRows

# source → the sides of a unit's documents; MISMATCHED: an answer to another prompt
MISMATCHED = 2
PATTERNS = {
    "": (1, -1),
    "pairs": (1, -1, MISMATCHED),
    "chosen": (1, MISMATCHED),
    "rejected": (-1, MISMATCHED),
}
MULTIPLE = 8
BY_TOKEN = ("input_ids", "targets", "loss_mask", "segments", "positions")


@dataclass(frozen=True)
class PreferenceRows(TokenRows):
    """most: documents of the longest row, D. scored: the last token of a document is what counts,
    as in reward models. reference: log-probabilities float32[rows, D] of all documents."""

    most: int
    scored: bool = False
    reference: np.ndarray | None = None

    @cached_property
    def row_length(self) -> int:
        """Length of the longest row, filled up so that a mesh can divide it."""
        return -(-super().row_length // MULTIPLE) * MULTIPLE

    @property
    def unpacked(self) -> bool:
        """False: a row holds the documents of a pair."""
        return False

    def batch(self, rows: np.ndarray, length: int | None = None) -> BatchArrays:
        """As TokenRows.batch, with sides int8[B, D] (see PATTERNS; 0: no document), and reference
        float32[B, D]."""
        batch = super().batch(rows, length)
        patterns = [self._pattern(name) for name in self.source_names]
        column, documents = np.arange(self.most), batch["segments"].max(1, keepdims=True)
        sides = np.array(patterns, np.int8)[self.source_of(rows)]
        batch["sides"] = np.where(column < documents, sides, 0).astype(np.int8)
        held = np.zeros((len(self), self.most)) if self.reference is None else self.reference
        batch["reference"] = held[rows].astype(np.float32)
        if self.scored:
            following = np.pad(batch["segments"], ((0, 0), (0, 1)))[:, 1:]
            is_last = (batch["segments"] > 0) & (batch["segments"] != following)
            batch["loss_mask"] = is_last.astype(np.float32)
        return batch

    def _pattern(self, source: str) -> list[int]:
        unit = PATTERNS[source]
        return [unit[d % len(unit)] for d in range(self.most)]


@dataclass(frozen=True)
class PreferenceBatches:
    """`complete` adds the constants of a step to a batch of this process's rows."""

    options: PreferenceLoss
    stepper: Stepper
    world: World

    def complete(self, batch: BatchArrays) -> BatchArrays:
        """The batch with sides float32, z and per_token float32[B, 1]: see `preference_loss`."""
        counted = batch["loss_mask"].max(1, keepdims=True) > 0  # rows that a guard has not left out
        sides = np.where(counted, batch["sides"], 0)
        batch = batch | _constants(len(sides))
        if self.options.kind != "kto":
            batch["sides"] = sides.astype(np.float32)
            return batch | {"per_token": self._per_token(batch)}
        mismatched = self._documents(batch, (sides == MISMATCHED).astype(np.float32))
        batch["z"] = batch["z"] + self._mean_log_ratio(mismatched)
        answers = np.where(sides == MISMATCHED, 0, sides).astype(np.float32)
        return self._documents(batch, answers)

    def with_slots(self, batch: BatchArrays, rows: int, part: tuple[int, int]) -> BatchArrays:
        """The batch to compute the log-probabilities of all its documents, by number of the row."""
        own = np.eye(rows, dtype=np.float32)[part[0] :: part[1]]
        sides = np.zeros(batch["sides"].shape, np.float32)
        return batch | _constants(len(sides)) | {"sides": sides, "slot": own}

    def _documents(self, batch: BatchArrays, sides: np.ndarray) -> BatchArrays:
        """The batch of the documents with a side alone, moved to the starts of their rows."""
        segments = batch["segments"]
        # [B, T]: whether the token's document has a side; 0 is padding
        kept: np.ndarray = np.take_along_axis(np.pad(sides, ((0, 0), (1, 0))), segments, 1) != 0
        order = np.argsort(~kept, 1, kind="stable")
        width = segments.shape[1]
        if not self.stepper.fixed_shapes:
            width = max(1, int(kept.sum(1).max()))
        order = order[:, :width]
        inside = np.take_along_axis(kept, order, 1)
        moved = {name: np.take_along_axis(batch[name], order, 1) * inside for name in BY_TOKEN}
        moved = {name: moved[name].astype(batch[name].dtype) for name in BY_TOKEN}
        return batch | moved | {"sides": sides}

    def _per_token(self, batch: BatchArrays) -> np.ndarray:
        """Pairs / tokens of chosen answers, over all rows of the step, float32[B, 1]."""
        sides, segments = batch["sides"], batch["segments"]
        of_token = np.take_along_axis(np.pad(sides, ((0, 0), (1, 0))), segments, 1)
        counts = [np.array([(sides > 0).sum(), (batch["loss_mask"] * (of_token > 0)).sum()])]
        if self.stepper.row_part[1] > 1:
            # processes with the same rows count them equally often, so that the ratio is right
            counts = gather_objects(self.world, counts[0])
        pairs, tokens = np.sum(counts, 0)
        return np.full((len(sides), 1), pairs / max(tokens, 1), np.float32)

    def _mean_log_ratio(self, batch: BatchArrays) -> float:
        """z: the mean log-ratio of the mismatched answers of the step, at least 0."""
        extras: Any = self.stepper.evaluate(batch).extras
        mean = extras["reward_chosen"] / max(extras["count_chosen"], 1) / self.options.beta
        return max(0.0, float(mean))


def _constants(rows: int) -> BatchArrays:
    return {name: np.zeros((rows, 1), np.float32) for name in ("z", "per_token")}
