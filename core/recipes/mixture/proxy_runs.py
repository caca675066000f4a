"""Proxy runs of a mixture search: small models trained on a mix, evaluated on held-out rows.

Every HELD_OUT-th row of each source is held out and never trained on. All proxies start from the
same weights and see each source's rows in the same order, so that only the mix differs. A finished
proxy is a line of `proxies.jsonl` and is not trained again.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sabia.core import stop
from sabia.core.errors import UsageError
from sabia.core.options.training import Training
from sabia.core.recipes.training_run import Plan, Task, fresh_stepper
from sabia.core.shards.atomic import sealed, unsealed
from sabia.core.shards.job import Job
from sabia.core.shards.order import DataOrder
from sabia.core.train.optimizer.config import learning_rate
from sabia.core.train.stepper import Stepper
from sabia.core.train.token_rows import check_ids

HELD_OUT = 20
EVAL_ROWS = 256  # at most so many held-out rows of a source
FILE = "proxies.jsonl"


@dataclass
class Proxies:
    """What all proxies share. identity: of the run; stored lines of another one are ignored."""

    job: Job
    task: Task
    options: Training
    plan: Plan
    directory: Path
    identity: str

    @property
    def names(self) -> tuple[str, ...]:
        """The sources."""
        return self.task.rows.source_names

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each source, float64[S]."""
        return np.array(self.task.rows.source_sizes, np.float64)

    @property
    def base(self) -> np.ndarray:
        """The proportions of the rows, float64[S]."""
        return self.sizes / self.sizes.sum()

    @cached_property
    def begins(self) -> np.ndarray:
        """The number of each source's first row, and the number of all rows, int64[S + 1]."""
        return np.concatenate(([0], np.cumsum(self.task.rows.source_sizes)))

    def losses(self, name: str, mix: np.ndarray) -> list[float]:
        """Mean held-out loss per token of each source after training on a mix [S]."""
        weights = [round(float(weight), 9) for weight in mix]
        path = self.directory / FILE
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                stored = unsealed(json.loads(line))
            except ValueError:
                continue  # cut short or damaged: run it again
            if (stored["run"], stored["weights"], stored["of"]) == (name, weights, self.identity):
                return stored["losses"]
        stepper = self.trained(mix)
        losses = [
            self._loss(stepper, first + np.arange(0, size, HELD_OUT)[:EVAL_ROWS])
            for first, size in zip(self.begins, self.task.rows.source_sizes, strict=False)
        ]
        row = {"run": name, "weights": weights, "losses": losses, "of": self.identity}
        with path.open("a") as file:
            file.write(json.dumps(sealed(row)) + "\n")
        return losses

    def trained(self, mix: np.ndarray) -> Stepper:
        """A proxy after its steps on a mix."""
        stepper, order = self.stepper(), self.order(mix)
        for step in range(self.plan.steps):
            stop.check()
            batch = self.batch(stepper, self.numbers(order, step))
            stepper.step(batch, self.rate(step), number=step)
        return stepper

    def stepper(self) -> Stepper:
        """A fresh model and its optimizer."""
        return fresh_stepper(self.job, self.task, self.options, self.plan)

    def order(self, mix: np.ndarray) -> DataOrder:
        """The order of rows that are not held out; see `numbers`."""
        sizes = tuple(size - len(range(0, size, HELD_OUT)) for size in self.task.rows.source_sizes)
        if not min(sizes):
            name = self.names[sizes.index(0)]
            raise UsageError(f"--search-mix: source {name!r} has one row (expected two or more)")
        return DataOrder(sizes, self.job.seed, tuple(map(float, mix)))

    def numbers(self, order: DataOrder, step: int) -> np.ndarray:
        """The numbers of a step's rows among all rows, int64[B]."""
        trained = order.rows(step * self.plan.batch_rows, self.plan.batch_rows)
        first = np.concatenate(([0], np.cumsum(order.sizes)))
        source = np.searchsorted(first[1:], trained, side="right")
        within = trained - first[source]
        # rows 0, HELD_OUT, 2 · HELD_OUT, … of a source are held out: skip them
        return self.begins[source] + within + within // (HELD_OUT - 1) + 1

    def batch(self, stepper: Stepper, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Rows as a batch for a stepper."""
        rows = self.task.rows
        batch = rows.batch(numbers, rows.row_length if stepper.fixed_shapes else None)
        check_ids(batch["input_ids"], self.task.spec.vocab_size)
        return batch

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return learning_rate(step, self.plan.schedule)

    def _loss(self, stepper: Stepper, numbers: np.ndarray) -> float:
        size, total, weight = self.plan.batch_rows, 0.0, 0.0
        for start in range(0, len(numbers), size):
            # the last batch is padded with copies of the last row, which are masked
            index = np.arange(start, start + size)
            batch = self.batch(stepper, numbers[np.minimum(index, len(numbers) - 1)])
            batch["loss_mask"] = batch["loss_mask"] * (index < len(numbers))[:, None]
            measured = stepper.evaluate(batch)
            if measured.weight > 0:
                total += measured.loss * measured.weight
                weight += measured.weight
        return total / weight if weight else float("nan")
