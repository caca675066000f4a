"""Search for a mix of sources with small proxy runs, before the large run.

The sources are those of the token rows. `regression` trains one proxy for each of many random
mixes and fits a law to their held-out losses; `doremi` trains a reference, then a proxy whose
sources are reweighted during training (both: sabia.core.train.mixture_law). At the end two proxies
are trained, on the best mix and on the proportions of the rows, so that the improvement is measured
and not predicted.

Proxies are small models that are trained on a mix and evaluated on held-out rows. Every HELD_OUT-th
row of each source is held out and never trained on. All proxies start from the same weights and see
each source's rows in the same order, so that only the mix differs.

The run directory stores the losses of the proxies, so that an interrupted search continues with the
next one: a finished proxy is a line of `proxies.jsonl` and is not trained again. `mixture.json`
contains the result.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.notes import progress
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.options.training import Training
from sabia.core.recipes import training_run
from sabia.core.recipes.run_call import open_run, show_plan
from sabia.core.recipes.training_run import Plan, Task, fresh_stepper
from sabia.core.shards.arrow_arrays import type_of
from sabia.core.shards.atomic import sealed, unsealed, write_atomic
from sabia.core.shards.job import Job
from sabia.core.shards.order import DataOrder, parse_weights
from sabia.core.shards.outputs import open_output
from sabia.core.train.mixture_law import Reweighting, best_mix, draw_mixes, fit, row_weights
from sabia.core.train.optimizer.config import learning_rate
from sabia.core.train.stepper import Evaluation, Stepper
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
            stepper.step(batch, learning_rate(step, self.plan.schedule), number=step)
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


ANSWER = "mixture.json"


def run(job: Job, task: Task, options: PretrainOptions, identity: dict[str, Any]) -> None:
    """Search; writes the result and the proxies into -o, the last two as rows to stdout."""
    directory, world = open_run(job)
    if world.size > 1:
        raise UsageError("--search-mix trains small models in one process (expected one process)")
    if len(task.rows.source_names) < 2:
        raise UsageError("--search-mix: the rows are of one source (expected two or more)")
    target = _target(options, task.rows.source_names)
    plan = training_run.make_plan(task, options, job.seed)
    if job.dry_run:
        count = options.proxies + 2 if options.search_mix == "regression" else 4
        figures = {"proxies": count, "sources": ", ".join(task.rows.source_names)}
        figures |= training_run.describe_plan(task, plan, job.mesh, options)
        flops = count * plan.tokens * plan.flops_per_token
        show_plan(job, options, flops, training_run.state_of(task, options), 0, figures)
        return
    directory.path.mkdir(parents=True, exist_ok=True)
    if job.force:
        (directory.path / FILE).unlink(missing_ok=True)
    run_identity = json.dumps(identity, sort_keys=True, default=str)
    proxies = Proxies(job, task, options, plan, directory.path, run_identity)
    limits = _limits(options, proxies)
    if options.search_mix == "regression":
        best = _regression(proxies, options, target, limits)
    else:
        best = {"weights": _within_limits(_reweighted(proxies), limits)}
    _publish(proxies, options, target, best)


def _target(options: PretrainOptions, names: tuple[str, ...]) -> np.ndarray:
    """The weight of each source's loss, float64[S] with sum 1."""
    weights = np.array(parse_weights(options.target, names, "--target") or (1.0,) * len(names))
    if weights.min() < 0 or weights.sum() <= 0:
        raise UsageError(f"--target: {options.target!r} (expected weights of 0 or more, not all 0)")
    return weights / weights.sum()


def _limits(options: PretrainOptions, proxies: Proxies) -> np.ndarray:
    """The largest share of each source in the large run, float64[S]."""
    if not (options.for_tokens and options.max_repeat):
        return np.ones(len(proxies.names))
    available = proxies.sizes * proxies.plan.row_length
    limits = np.minimum(1.0, options.max_repeat * available / options.for_tokens)
    if limits.sum() < 1:
        most = int(available.sum() * options.max_repeat)
        raise UsageError(
            f"--max-repeat: {options.max_repeat:g} passes over all rows give only {most:,} tokens "
            f"(expected {options.for_tokens:,})"
        )
    return limits


def _regression(
    proxies: Proxies, options: PretrainOptions, target: np.ndarray, limits: np.ndarray
) -> dict[str, object]:
    seed = proxies.job.seed
    mixes = draw_mixes(proxies.base, options.proxies, seed)
    losses = []
    with progress(len(mixes), "proxies", "runs") as bar:
        for number, mix in enumerate(mixes):
            losses.append(proxies.losses(f"proxy-{number}", mix))
            bar.advance(1)
    law = fit(mixes, np.array(losses))
    for name, rank, error in zip(proxies.names, law.rank, law.error, strict=True):
        notes.note(f"law of {name}: rank correlation {rank:.2f}, error {error:.4f} (leave-one-out)")
    mix, predicted = best_mix(law, proxies.base, target, limits, seed)
    ranks = dict(zip(proxies.names, law.rank.tolist(), strict=True))
    return {"weights": mix, "predicted_loss": predicted, "rank_correlation": ranks}


def _within_limits(weights: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """The weights cut to the limits; the excess is distributed to the others in proportion."""
    if (weights > limits).any():
        notes.note("--max-repeat cuts the share of a source")
    for _ in weights:  # each pass may bring another source over its limit
        over = weights >= limits
        rest = weights[~over].sum()
        if not over.any() or rest <= 0:
            break
        weights = np.where(over, limits, weights * (1 - limits[over].sum()) / rest)
    return weights / weights.sum()


def _reweighted(proxies: Proxies) -> np.ndarray:
    """DoReMi's weights [S], from a proxy that samples all sources uniformly (arXiv 2305.10429)."""
    reference, count = proxies.trained(proxies.base), len(proxies.names)
    stepper, order = proxies.stepper(), proxies.order(np.full(count, 1 / count))
    weights = Reweighting(count)
    with progress(proxies.plan.steps, "doremi", "steps") as bar:
        for step in range(proxies.plan.steps):
            stop.check()
            numbers = proxies.numbers(order, step)
            batch = proxies.batch(stepper, numbers)
            # one source per row: losses come by row
            batch["source"] = np.eye(len(numbers), dtype=np.float32)
            source, tokens = proxies.task.rows.source_of(numbers), batch["loss_mask"].sum(1)
            expected = _row_losses(reference.evaluate(batch))
            row_weight = row_weights(weights.weights, source, tokens)
            batch["loss_mask"] = batch["loss_mask"] * row_weight[:, None]
            rate = learning_rate(step, proxies.plan.schedule)
            result = stepper.step(batch, rate, number=step)
            # excess of a source = Σ over its rows of tokens · max(loss - reference loss, 0) / its
            # tokens
            excess = np.maximum(_row_losses(result) - expected, 0.0)
            total = np.bincount(source, excess * tokens, minlength=count)
            seen = np.bincount(source, tokens, minlength=count)
            weights.update(np.divide(total, seen, out=np.full(count, np.nan), where=seen > 0))
            bar.advance(1)
    return weights.mean


def _row_losses(result: Evaluation) -> np.ndarray:
    """Mean loss of each row, float64[B], of a step with one source per row."""
    weight = np.asarray(result.extras["source_weight"], np.float64)
    loss = np.asarray(result.extras["source_loss"], np.float64)
    return np.divide(loss, weight, out=np.zeros_like(loss), where=weight > 0)


def _publish(
    proxies: Proxies, options: PretrainOptions, target: np.ndarray, best: dict[str, Any]
) -> None:
    """Compare the best mix with the proportions of the rows; write and print the result."""
    mixes = {"found": best.pop("weights"), "as-the-rows-are": proxies.base}
    losses = {name: np.array(proxies.losses(name, mix)) for name, mix in mixes.items()}
    before, after = (float(target @ losses[name]) for name in ("as-the-rows-are", "found"))
    answer = {
        "method": options.search_mix,
        "target": _named(proxies, target),
        "weights": _named(proxies, mixes["found"].round(6)),
        "loss": after,
        "loss_as_the_rows_are": before,
        **best,
    }
    path = proxies.directory / ANSWER
    write_atomic(path, json.dumps(answer, indent=1) + "\n")
    mix = ",".join(f"{name}={weight:.4g}" for name, weight in answer["weights"].items())
    notes.note(f"held-out loss {after:.4f}; with the proportions of the rows {before:.4f}")
    notes.note(f"{path}: to use it, give --mix {mix}")
    rows = [
        {
            "run": name,
            "weights": _named(proxies, weights),
            "loss_by_source": _named(proxies, losses[name]),
            "loss": float(target @ losses[name]),
        }
        for name, weights in mixes.items()
    ]
    by_source = type_of(proxies.names)
    schema = pa.schema([("run", pa.string()), ("weights", by_source),
                        ("loss_by_source", by_source), ("loss", pa.float64())])  # fmt: skip
    with open_output(replace(proxies.job, out=None), schema, {"mixture": answer}) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, schema))


def _named(proxies: Proxies, figures: np.ndarray) -> dict[str, float]:
    return dict(zip(proxies.names, figures.tolist(), strict=True))
