"""Search for a mix of sources with small proxy runs, before the large run.

The sources are those of the token rows. `regression` trains one proxy for each of many random
mixes and fits a law to their held-out losses; `doremi` trains a reference, then a proxy whose
sources are reweighted as it goes (both: sabia.core.train.mixture_law). At the end two proxies are
trained on the mix found and on the mix as the rows are, so that what was gained is measured and
not predicted.

The run directory keeps the proxies, so that a search that was stopped goes on with the next;
`mixture.json` holds the answer.
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.progress import progress
from sabia.core.recipes import training_run
from sabia.core.recipes.mixture.proxy_runs import FILE, Proxies
from sabia.core.recipes.training_run import Task
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.job import Job
from sabia.core.shards.named_numbers import type_of
from sabia.core.shards.order import parse_weights
from sabia.core.shards.outputs import open_output
from sabia.core.spec import parameter_count
from sabia.core.train.mixture_law import Reweighting, best_mix, draw_mixes, fit, row_weights
from sabia.core.train.stepper import Stepper

ANSWER = "mixture.json"


def run(job: Job, task: Task, options: PretrainOptions, identity: dict[str, Any]) -> None:
    """Search; writes the answer and the proxies into -o, the last two as rows to stdout."""
    directory, world = training_run.open_run(job)
    if world.size > 1:
        raise UsageError("--search-mix trains small models in one process (run it in one)")
    if len(task.rows.source_names) < 2:
        raise UsageError("--search-mix: the rows are of one source (expected two or more)")
    target = _target(options, task.rows.source_names)
    plan = training_run.make_plan(task, options, job.seed)
    if job.dry_run:
        count = options.proxies + 2 if options.search_mix == "regression" else 4
        figures = {"proxies": count, "sources": ", ".join(task.rows.source_names)}
        figures |= training_run.describe_plan(task, plan, job.mesh)
        flops, n = count * plan.tokens * plan.flops_per_token, parameter_count(task.spec)
        training_run.show_plan(job, options, flops, n, 0, figures)
        return
    directory.path.mkdir(parents=True, exist_ok=True)
    if job.force:
        (directory.path / FILE).unlink(missing_ok=True)
    said = json.dumps(identity, sort_keys=True, default=str)
    proxies = Proxies(job, task, options, plan, directory.path, said)
    limits = _limits(options, proxies)
    if options.search_mix == "regression":
        found = _regression(proxies, options, target, limits)
    else:
        found = {"weights": _cut(_reweighted(proxies), limits)}
    _publish(proxies, options, target, found)


def _target(options: PretrainOptions, names: tuple[str, ...]) -> np.ndarray:
    """What each source's loss counts, float64[S] with sum 1."""
    given = np.array(parse_weights(options.target, names, "--target") or (1.0,) * len(names))
    if given.min() < 0 or given.sum() <= 0:
        raise UsageError(f"--target: {options.target!r} (expected weights of 0 or more, not all 0)")
    return given / given.sum()


def _limits(options: PretrainOptions, proxies: Proxies) -> np.ndarray:
    """The largest share of each source in the large run, float64[S]."""
    if not (options.for_tokens and options.max_repeat):
        return np.ones(len(proxies.names))
    available = proxies.sizes * proxies.plan.row_length
    limits = np.minimum(1.0, options.max_repeat * available / options.for_tokens)
    if limits.sum() < 1:
        most = int(available.sum() * options.max_repeat)
        raise UsageError(
            f"--max-repeat: {options.max_repeat:g} passes over all rows give {most:,} tokens "
            f"(expected {options.for_tokens:,})"
        )
    return limits


def _regression(
    proxies: Proxies, options: PretrainOptions, target: np.ndarray, limits: np.ndarray
) -> dict[str, Any]:
    seed = proxies.job.seed
    mixes = draw_mixes(proxies.base, options.proxies, seed)
    losses = []
    with progress(len(mixes), "proxies", "runs") as bar:
        for number, mix in enumerate(mixes):
            losses.append(proxies.losses(f"proxy-{number}", mix))
            bar.advance(1)
    law = fit(mixes, np.array(losses))
    for name, rank, error in zip(proxies.names, law.rank, law.error, strict=True):
        notes.note(f"law of {name}: rank correlation {rank:.2f}, error {error:.4f} (left out)")
    mix, predicted = best_mix(law, proxies.base, target, limits, seed)
    ranks = dict(zip(proxies.names, law.rank.tolist(), strict=True))
    return {"weights": mix, "predicted_loss": predicted, "rank_correlation": ranks}


def _cut(weights: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """The weights with what is over a limit given to the others, in proportion."""
    if (weights > limits).any():
        notes.note("--max-repeat cuts the share of a source")
    for _ in weights:
        over = weights >= limits
        rest = weights[~over].sum()
        if not over.any() or rest <= 0:
            break
        weights = np.where(over, limits, weights * (1 - limits[over].sum()) / rest)
    return weights / weights.sum()


def _reweighted(proxies: Proxies) -> np.ndarray:
    """DoReMi's weights [S], from a proxy that samples all sources alike."""
    reference, count = proxies.trained(proxies.base), len(proxies.names)
    stepper, order = proxies.stepper(), proxies.order(np.full(count, 1 / count))
    weights = Reweighting(count)
    with progress(proxies.plan.steps, "doremi", "steps") as bar:
        for step in range(proxies.plan.steps):
            stop.check()
            numbers = proxies.numbers(order, step)
            excess = _reweighted_step(proxies, reference, stepper, numbers, step, weights.weights)
            weights.update(excess)
            bar.advance(1)
    return weights.mean


def _reweighted_step(
    proxies: Proxies, reference: Stepper, stepper: Stepper, numbers: np.ndarray, step: int,
    weights: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Train on rows by the weights of their sources; the excess loss of each source [S]."""
    batch = proxies.batch(stepper, numbers)
    batch["source"] = np.eye(len(numbers), dtype=np.float32)  # tells every row apart
    source, tokens = proxies.task.rows.source_of(numbers), batch["loss_mask"].sum(1)
    expected = _row_losses(reference.evaluate(batch))
    batch["loss_mask"] = batch["loss_mask"] * row_weights(weights, source, tokens)[:, None]
    found = stepper.step(batch, proxies.rate(step), number=step)
    excess = np.maximum(_row_losses(found) - expected, 0.0)
    total = np.bincount(source, excess * tokens, minlength=len(weights))
    seen = np.bincount(source, tokens, minlength=len(weights))
    return np.divide(total, seen, out=np.full(len(weights), np.nan), where=seen > 0)


def _row_losses(found: dict[str, Any]) -> np.ndarray:
    """Mean loss of each row, float64[B], of a step that told every row apart."""
    weight = np.asarray(found["source_weight"], np.float64)
    loss = np.asarray(found["source_loss"], np.float64)
    return np.divide(loss, weight, out=np.zeros_like(loss), where=weight > 0)


def _publish(
    proxies: Proxies, options: PretrainOptions, target: np.ndarray, found: dict[str, Any]
) -> None:
    """Compare the mix with the rows as they are; write and print the answer."""
    mixes = {"found": found.pop("weights"), "as-the-rows-are": proxies.base}
    losses = {name: np.array(proxies.losses(name, mix)) for name, mix in mixes.items()}
    before, after = (float(target @ losses[name]) for name in ("as-the-rows-are", "found"))
    answer = {
        "method": options.search_mix,
        "target": _named(proxies, target),
        "weights": _named(proxies, mixes["found"].round(6)),
        "loss": after,
        "loss_as_the_rows_are": before,
        **found,
    }
    place = proxies.directory / ANSWER
    write_atomic(place, json.dumps(answer, indent=1) + "\n")
    told = ",".join(f"{name}={weight:.4g}" for name, weight in answer["weights"].items())
    notes.note(f"held-out loss {after:.4f}; on the rows as they are {before:.4f}")
    notes.note(f"{place}: use it by --mix {told}")
    rows = [
        {
            "run": name,
            "weights": _named(proxies, mix),
            "loss_by_source": _named(proxies, losses[name]),
            "loss": float(target @ losses[name]),
        }
        for name, mix in mixes.items()
    ]
    by_source = type_of(proxies.names)
    schema = pa.schema([("run", pa.string()), ("weights", by_source),
                        ("loss_by_source", by_source), ("loss", pa.float64())])  # fmt: skip
    with open_output(replace(proxies.job, out=None), schema, {"mixture": answer}) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, schema))


def _named(proxies: Proxies, figures: np.ndarray) -> dict[str, float]:
    return dict(zip(proxies.names, figures.tolist(), strict=True))
