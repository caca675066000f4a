"""Original and quantized model on benchmark tasks: what is kept, against the noise of the original.

Both are evaluated as by `eval`, sampled answers with several seeds, which are numbered as samples
of an item. The original with as many other seeds gives the noise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes, page, units
from sabia.core.bench import gate_report, recovery
from sabia.core.bench.answers import sampling_of
from sabia.core.bench.gate import Scores, failed
from sabia.core.bench.gate_file import Gate, load_gate
from sabia.core.bench.harness.groups import Group, group_results
from sabia.core.bench.items import Item
from sabia.core.bench.metrics import NO_ANSWER
from sabia.core.bench.report import aligned, render, terminal_table
from sabia.core.bench.result_summary import summarise, tabulate
from sabia.core.bench.score_rows import Score, schema, to_batches
from sabia.core.bench.task import Task
from sabia.core.bench.task_files import items_of, load_groups
from sabia.core.errors import GateClosed, UsageError
from sabia.core.generate.budget import Budget
from sabia.core.generate.opened import open_budget
from sabia.core.generate.requests import Request
from sabia.core.options.eval import EvalOptions
from sabia.core.options.quantize import QuantizeOptions
from sabia.core.recipes.eval_judging import Judging
from sabia.core.recipes.evaluate import gate_checks, with_places
from sabia.core.recipes.evaluated_models import LocalModel
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import open_file

ORIGINAL, AGAIN, MADE = "original", "original, other seeds", "quantized"
PAGE, ROWS = "evaluation.html", "scores.parquet"
SPEED_PROMPT, SPEED_TOKENS = 256, 32


@dataclass(frozen=True)
class Suite:
    """Tasks and the gate of a call."""

    tasks: Sequence[Task]
    groups: Sequence[Group]
    gate: Gate | None


def load_suite(options: QuantizeOptions) -> Suite:
    """The tasks and the gate of the options. Raises UsageError."""
    tasks, groups = load_groups(options.task, options.data)
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise UsageError(f"--task: two have the same name: {', '.join(names)}")
    for task in tasks:
        if task.kind == "rubric":
            raise UsageError(
                f"--task: {task.name} needs a judge (expected another task, or sabia eval --task "
                f"{task.name} --model {ORIGINAL}=DIR --model {MADE}=DIR --judge-url URL)"
            )
    gate = load_gate(options.gate) if options.gate else None
    if gate and (gate.baseline != ORIGINAL or gate.repeats):
        raise UsageError(
            f"--gate: {options.gate}: baseline = {gate.baseline!r}, repeats = {[*gate.repeats]} "
            f"(expected {ORIGINAL!r}, and no repeats: they are other seeds of it)"
        )
    return Suite(tasks, groups, gate and replace(gate, repeats=(AGAIN,)))


def prove(
    job: Job, options: QuantizeOptions, suite: Suite, report: dict[str, Any], out: Path
) -> dict[str, object]:
    """Evaluate both models; writes the page and the scores into `out`, and gives the record.

    Raises UsageError for a gate that does not fit the tasks.
    """
    evaluated = EvalOptions.read(
        {
            "task": list(options.task),
            "model": [f"{ORIGINAL}={options.model}", f"{MADE}={out}"],
            "seed": job.seed,
            "force": job.force,
        }
    )
    budget, seeds = open_budget(evaluated, job), options.task_seeds
    first, other = range(job.seed, job.seed + seeds), range(job.seed + seeds, job.seed + 2 * seeds)
    scores: list[Score] = []
    speed: dict[str, dict[str, float]] = {}
    for name, directory, runs in (
        (ORIGINAL, options.model, {ORIGINAL: first, AGAIN: other}),
        (MADE, str(out), {MADE: first}),
    ):
        model = LocalModel(name, directory, evaluated)
        with model:
            for label, of_label in runs.items():
                for task in suite.tasks:
                    notes.note(f"{label}: {task.name}")
                    scores += _scored(model, label, task, evaluated, of_label, options, budget)
            speed[name] = _speed(model)
    compared = [row for row in scores if row.model != AGAIN]
    capabilities = {task.name: task.capability for task in suite.tasks if task.capability}
    headlines = {task.name: task.metric for task in suite.tasks if task.metric}
    summary = summarise(compared, headlines, capabilities)
    summary = replace(summary, groups=tuple(group_results(suite.groups, summary)))
    table = Scores(*tabulate(scores), summary.headlines, capabilities)
    shares = recovery.recoveries(summary, table, ORIGINAL, AGAIN, MADE)
    checks = gate_checks(suite.gate, summary, scores, [], capabilities)
    with open_file(str(out / ROWS), schema(), {"command": job.command}) as writer:
        for batch in to_batches(scores):
            writer.write(batch)
    lines = [*terminal_table(summary).splitlines(), ""]
    lines += aligned([recovery.COLUMNS, *recovery.rows(shares)])
    if suite.gate:
        lines += ["", *aligned([gate_report.COLUMNS, *gate_report.rows(checks)])]
    for line in filter(None, lines):
        notes.note(line)
    first_sections = [_figures(report, speed), recovery.section(shares, seeds)]
    if suite.gate:
        first_sections.insert(0, gate_report.section(suite.gate, checks))
    facts = [("recipe", report["recipe"]["name"]), ("seeds", ", ".join(map(str, first)))]
    title = f"Quantized model: {out.name}"
    write_atomic(out / PAGE, render(summary, compared, title, facts, first=first_sections))
    notes.note(f"page: {out / PAGE}")
    return {
        "seeds": [*first],
        "recovery": recovery.to_json(shares),
        "speed": speed,
        "gate": gate_report.to_json(checks),
        "closed": [f"{c.name} ({c.verdict})" for c in failed(suite.gate, checks)]
        if suite.gate
        else [],
    }


def check_gate(options: QuantizeOptions, record: dict[str, Any]) -> None:
    """Raise GateClosed if the gate of the evaluation is closed."""
    if closed := record["closed"]:
        more = f" and {len(closed) - 3} more" if len(closed) > 3 else ""
        raise GateClosed(f"--gate {options.gate}: {', '.join(closed[:3])}{more}")


def _scored(
    model: LocalModel, label: str, task: Task, evaluated: EvalOptions, seeds: Sequence[int],
    options: QuantizeOptions, budget: Budget,
) -> Iterator[Score]:  # fmt: skip
    """The scores of a task with each seed; without random numbers once, the same for all labels."""
    samples, temperature = sampling_of(task, evaluated)
    drawn = task.generates and temperature > 0
    if not drawn and not (task.shots and task.shots_sampler == "random"):
        seeds = [evaluated.seed]
    for number, seed in enumerate(seeds):
        own = evaluated.replace(seed=seed)
        items: list[Item] = items_of(task, options.limit, seed)
        with Judging(own, budget) as judging:
            made = [*model.scores(task, items, judging)]
        missing = sum(isinstance(row, Score) and row.metric == NO_ANSWER for row in made)
        if missing:
            notes.warn(f"{task.name}, {label}: {missing} answers are missing")
        for row in with_places(made, {task.name: items}, {}):
            if isinstance(row, Score):  # verdicts are of rubric tasks
                yield replace(row, model=label, sample=number * samples + row.sample)


def _speed(model: LocalModel) -> dict[str, float]:
    """Tokens a second of a prompt and of a greedy answer to it, alone, on this device."""
    length = max(1, min(SPEED_PROMPT, model.spec.max_positions - SPEED_TOKENS))
    rng, taken = np.random.default_rng(0), []
    for number, tokens in enumerate((1, 1, SPEED_TOKENS)):  # the first one warms up
        prompt = rng.integers(0, model.spec.vocab_size, length).tolist()
        request = Request(prompt, tokens, 0.0, stop_ids=(), id=f"speed {number}")
        started = time.perf_counter()
        model.engine.generate([request])
        taken.append(time.perf_counter() - started)
    later = max(taken[2] - taken[1], 1e-9)
    return {
        "prompt_tokens_per_second": length / taken[1],
        "answer_tokens_per_second": (SPEED_TOKENS - 1) / later,
    }


def _figures(report: dict[str, Any], speed: dict[str, dict[str, float]]) -> str:
    """The section of size, speed and divergence."""
    before, after = speed[ORIGINAL], speed[MADE]
    rows = [["size of the weights", units.format_bytes(report["size_before_bytes"]),
             units.format_bytes(report["size_after_bytes"])],
            ["bits per weight", "", f"{report['bits_per_weight']:.2f}"]]  # fmt: skip
    for name in before:
        rows.append([name.replace("_", " "), f"{before[name]:,.1f}", f"{after[name]:,.1f}"])
    if measured := report.get("divergence"):
        rows += [
            ["loss on held-out records, nats", f"{measured['loss_before_nats']:.4f}",
             f"{measured['loss_after_nats']:.4f}"],
            ["KL on held-out records, nats", "", f"{measured['kl_nats']:.3g}"],
            ["another top token", "", f"{1 - measured['same_top_share']:.2%}"],
        ]  # fmt: skip
    note = (
        f"Speed is that of the engine of this program on this device, for one prompt of up to "
        f"{SPEED_PROMPT} tokens and {SPEED_TOKENS} tokens of an answer; servers with kernels for "
        "these formats differ."
    )
    parts = [page.table(["what", ORIGINAL, MADE], rows), page.paragraph(note, True)]
    return page.section("Size, speed, divergence", parts)
