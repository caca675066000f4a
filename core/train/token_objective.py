"""The figures of a run over token rows: losses by source, loads of experts, validation."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.parallel.health import watchdog
from sabia.core.train import telemetry
from sabia.core.train.loop import Results
from sabia.core.train.stepper import Evaluation
from sabia.core.train.token_rows import RowSource, TokenRows


@dataclass(frozen=True)
class TokenObjective:
    """See core.train.loop.Objective; `validation`: held-out rows."""

    source: RowSource
    validation: TokenRows | None = None

    def display(self, total: int, done: int) -> AbstractContextManager[telemetry.ProgressLine]:
        """See Objective: a progress line."""
        return telemetry.progress_line(total, done, "training")

    def tokens(self, results: Results, sums: np.ndarray) -> tuple[int, int]:
        """See Objective."""
        (result,) = results
        count = int(result.extras.get("tokens", result.weight))
        return count, count

    def figures(self, results: Results, sums: np.ndarray, lr: float) -> telemetry.Row:
        """See Objective."""
        (result,) = results
        return {"loss": _cross_entropy(result), "lr": lr, "grad_norm": result.grad_norm}

    def details(self, results: Results, sums: np.ndarray) -> telemetry.Row:
        """See Objective."""
        (result,) = results
        row: telemetry.Row = {}
        if "expert_load" in result.extras:
            row |= telemetry.expert_metrics(result.extras["expert_load"])
        if "nll" in result.extras:
            row["objective"] = result.loss
        if "kl" in result.extras:
            row["kl"] = float(result.extras["kl"] / result.weight)
        return row | _by_source("loss_by_source", result.extras, self.source.rows)

    def summary(self, row: telemetry.Row) -> dict[str, object]:
        """See Objective."""
        return {name: row[name] for name in ("loss", "validation_loss") if name in row}

    def validate(self, step: int) -> telemetry.Row:
        """See Objective."""
        if self.validation is None:
            return {}
        stepper, loss_sum, weight = self.source.stepper, 0.0, 0.0
        divergence, has_teacher = 0.0, False
        by_source: dict[str, Any] = {"source_loss": 0.0, "source_weight": 0.0}
        for batch in self.source.validation(self.validation):
            watchdog.enter_phase(step, "validating")
            sums = stepper.evaluate(batch)
            weight += sums.weight
            if "kl" in sums.extras:
                divergence, has_teacher = divergence + float(sums.extras["kl"]), True
            loss_sum += _cross_entropy(sums) * sums.weight if sums.weight else 0.0
            # in float64, because the sums are over many batches
            by_source = {k: v + sums.extras[k].astype(np.float64) for k, v in by_source.items()}
        loss = loss_sum / max(weight, 1.0)
        notes.note(f"step {step:,}: validation loss {loss:.4f}")
        row = {"validation_loss": loss, "validation_tokens": int(weight)}
        row |= {"validation_kl": divergence / max(weight, 1.0)} if has_teacher else {}
        return row | _by_source("validation_by_source", by_source, self.validation)


def _cross_entropy(result: Evaluation) -> float:
    """The mean cross-entropy, without auxiliary losses and a teacher."""
    extras = result.extras
    return float(extras["nll"] / result.weight) if "nll" in extras else float(result.loss)


def _by_source(label: str, sums: Mapping[str, Any], rows: TokenRows) -> dict[str, object]:
    """{label: {source: mean loss}} if there are several sources."""
    if len(rows.reported_sources) < 2:
        return {}
    named = zip(rows.reported_sources, sums["source_loss"], sums["source_weight"], strict=True)
    return {label: {name: float(loss / weight) for name, loss, weight in named if weight > 0}}
