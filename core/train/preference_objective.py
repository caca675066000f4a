"""The figures of a run on preferences: rewards and log-probabilities by side, pairs in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.parallel.health import watchdog
from sabia.core.train import telemetry
from sabia.core.train.loop import Results
from sabia.core.train.token_objective import TokenObjective

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceObjective(TokenObjective):
    """See core.train.loop.Objective."""

    def figures(self, results: Results, sums: np.ndarray, lr: float) -> telemetry.Row:
        """See Objective."""
        (result,) = results
        row = {"loss": result.loss, "lr": lr, "grad_norm": result.grad_norm}
        return row | _means(result.extras)

    def details(self, results: Results, sums: np.ndarray) -> telemetry.Row:
        """See Objective: nothing more."""
        return {}

    def summary(self, row: telemetry.Row) -> dict[str, object]:
        """See Objective."""
        names = ("loss", "accuracy", "validation_loss", "validation_accuracy")
        return {name: row[name] for name in names if name in row}

    def validate(self, step: int) -> telemetry.Row:
        """See Objective: the same figures of the held-out rows."""
        if self.validation is None:
            return {}
        totals: dict[str, float] = {"loss": 0.0, "weight": 0.0}
        for batch in self.source.validation(self.validation):
            watchdog.enter_phase(step, "validating")
            sums = self.source.stepper.evaluate(batch)
            numbers = {k: float(v) for k, v in sums.extras.items() if np.ndim(v) == 0}
            numbers |= {"loss": sums.loss * sums.weight, "weight": sums.weight}
            for name, value in numbers.items():
                totals[name] = totals.get(name, 0.0) + value
        row = {"loss": totals["loss"] / max(totals["weight"], 1.0), **_means(totals)}
        pairs = int(totals["pairs"])
        right = f", {row['accuracy']:.1%} of {pairs:,} pairs in order" if pairs else ""
        notes.note(f"step {step:,}: validation loss {row['loss']:.4f}{right}")
        return {f"validation_{k}": v for k, v in row.items()} | {"validation_pairs": pairs}


def _means(sums: Mapping[str, Any]) -> telemetry.Row:
    """Means over answers and pairs; of what there is none of, no figure."""
    row: telemetry.Row = {}
    if pairs := float(sums["pairs"]):
        row |= {"accuracy": float(sums["right"]) / pairs, "margin": float(sums["margin"]) / pairs}
    for side in SIDES:
        if count := float(sums[f"count_{side}"]):
            row |= {
                f"{what}_{side}": float(sums[f"{what}_{side}"]) / count
                for what in ("reward", "logp")
            }
    return row
