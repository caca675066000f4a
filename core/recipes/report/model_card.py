"""A model card in Markdown with the YAML front matter of the Hugging Face hub, from records.

https://huggingface.co/docs/hub/model-cards lists the keys of the front matter.
"""

import json
import os
from collections.abc import Iterator

from sabia.core import units
from sabia.core.plan.chips import chip_of_device
from sabia.core.recipes.report.card_content import Content
from sabia.core.recipes.report.card_facts import Facts, Trained
from sabia.core.recipes.report.card_text import (
    FILL_IN,
    UNKNOWN,
    flops,
    plain,
    shares_table,
    short_path,
    table,
)
from sabia.core.recipes.report.evaluation_results import Results
from sabia.core.recipes.report.evaluation_results import section as results_section

SYSTEMIC_RISK_FLOPS = 1e25  # Article 51(2) of Regulation (EU) 2024/1689
SHOWN_DOMAINS, SHOWN_SOURCES, SHOWN_REASONS = 20, 50, 5
TASKS = {"pretrain": "next-token prediction", "sft": "conversations or preferences",
         "grpo": "reinforcement learning"}  # fmt: skip


def front_matter(facts: Facts, content: Content) -> Iterator[str]:
    """The YAML block; what only a person knows is a comment."""
    languages = sorted(name for name in content.languages if name)
    tags = ["sabia", *dict.fromkeys(run.command for run in facts.runs)]
    yield "---"
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    if languages:
        yield "language:"
        yield from (f"- {json.dumps(name)}" for name in languages)
    else:
        yield "# language: not recorded"
    yield "# license: to be filled in by the provider"
    for model in facts.models:
        yield f"# base_model: to be filled in; the training began with {json.dumps(model)}"
    yield "tags:"
    yield from (f"- {json.dumps(tag)}" for tag in tags)
    yield "---"


def card(
    facts: Facts, content: Content, tokens: int | None, results: Results | None = None
) -> Iterator[str]:
    """The sections of the card; tokens: of the token rows, None if there are none."""
    name = os.path.basename(facts.run.path)
    yield from (f"# Model card: {plain(name)}", "", f"Summary: {FILL_IN}", "")
    yield from _model(facts)
    yield from _data(facts, content, tokens)
    yield from _processing(facts, content)
    yield from _training(facts)
    yield from _compute(facts)
    yield from ("## Intended use", "", FILL_IN, "")
    yield from results_section(results)
    for title in ("Limitations and risks", "Licence of the model"):
        yield from (f"## {title}", "", FILL_IN, "")


def _model(facts: Facts) -> Iterator[str]:
    run, config = facts.run, facts.run.config
    rows = [
        ("parameters", run.parameters),
        ("parameters that a token uses", run.active),
        ("architecture", f"{config.get('model_type')}, {config.get('num_hidden_layers')} layers, "
                         f"hidden size {config.get('hidden_size')}"),
        ("vocabulary", config.get("vocab_size")),
        ("context (positions)", config.get("max_position_embeddings")),
        ("began with", ", ".join(facts.models) or "random parameters"),
        ("state", "finished" if run.finished else f"not finished: step {run.steps:,}"),
    ]  # fmt: skip
    yield from ("## Model", "", *table(["", ""], rows), "")


def _data(facts: Facts, content: Content, tokens: int | None) -> Iterator[str]:
    yield from ("## Training data", "")
    if facts.documents:
        where = ", ".join(map(plain, map(short_path, facts.documents)))
        yield (f"{content.total.documents:,} documents, {units.format_bytes(content.total.size)} "
               f"of text, in {where}.")  # fmt: skip
    else:
        yield f"Documents: {UNKNOWN}."
    if facts.missing:
        yield f"Not there any more: {', '.join(map(plain, map(short_path, facts.missing)))}."
    if facts.piped and facts.documents:
        yield (
            "Later stages were joined by pipes and kept no output: of these documents, those count "
            "whose tokens are in the token rows, with the texts that they had before those stages."
        )
    yield f"Tokens of documents in the token rows: {UNKNOWN if tokens is None else f'{tokens:,}'}."
    yield f"Fetched: {period(content)}."
    yield ""
    yield from ("### Inputs", "")
    given = [(short_path(one.path), ", ".join(one.read_by)) for one in facts.given]
    yield from (*(table(["file or directory", "read by"], given) if given else [UNKNOWN]), "")
    for title, shares, most in (
        ("Sources", content.sources, SHOWN_SOURCES),
        ("Domains", content.domains, SHOWN_DOMAINS),
        ("Languages", content.languages, None),
        ("Licences", content.licences, None),
    ):
        lines = shares_table(title.lower().removesuffix("s"), shares, most) if shares else [UNKNOWN]
        yield from (f"### {title}", "", *lines, "")


def period(content: Content) -> str:
    """The times of fetching, from the first to the last."""
    if content.first is None or content.last is None:
        return UNKNOWN
    text = f"{content.first.date()} to {content.last.date()}"
    return text + (f" ({content.undated:,} documents without a time)" if content.undated else "")


def _processing(facts: Facts, content: Content) -> Iterator[str]:
    names = ["stage", "rows in", "rows out", "removed", "rejected", "call"]
    rows = [
        (stage.command, *(stage.rows.get(name) if name in stage.rows else "" for name in
                          ("rows_in", "rows_out", "removed", "rejected")), stage.line)
        for stage in facts.stages
    ]  # fmt: skip
    yield from ("## Processing of the data", "")
    yield from (*(table(names, rows) if rows else [UNKNOWN]), "")
    for stage in facts.stages:
        if stage.reasons:
            reasons = list(stage.reasons.items())[:SHOWN_REASONS]
            listed = "; ".join(f"{plain(reason)}: {count:,}" for reason, count in reasons)
            more = len(stage.reasons) - len(reasons)
            others = f"; {more:,} more reasons" if more else ""
            yield f"Removed by {stage.command}: {listed}{others}."
            yield ""
    nothing = f"{UNKNOWN}: no stage was asked to remove items of benchmarks."
    done = decontamination(facts, content) or [nothing]
    yield from ("### Decontamination", "", *done, "")


def decontamination(facts: Facts, content: Content) -> list[str]:
    """What was done against items of benchmarks in the data; empty if nothing."""
    lines = []
    for stage in facts.stages:
        if tasks := stage.options.get("decontaminate"):
            removed = stage.rows.get("removed")
            count = f"{removed:,} documents removed" if removed is not None else UNKNOWN
            listed = plain(", ".join(map(str, tasks)))
            lines.append(f"{plain(stage.command)} against {listed}: {count}.")
    if lines and facts.documents:
        lines.append(
            f"Documents of the training in which such items were found, and cut or marked: "
            f"{content.contaminated:,}."
        )
    return lines


def _training(facts: Facts) -> Iterator[str]:
    names = ["run", "training", "steps", "tokens", "optimizer", "learning rate", "precision",
             "backend", "started"]  # fmt: skip
    yield from ("## Training", "", *table(names, [_row(run) for run in facts.runs]), "")


def _row(run: Trained) -> tuple[object, ...]:
    optimizer = run.options.get("optimizer")
    optimizer = optimizer.get("name") if isinstance(optimizer, dict) else optimizer
    adapters = ", adapters" if run.options.get("lora_rank") else ""
    training = f"{run.command}: {TASKS[run.command]}{adapters}"
    return (short_path(run.path), training, run.steps, run.tokens, optimizer, run.options.get("lr"),
            run.options["precision"], run.options["backend"], run.started[:10])  # fmt: skip


def _compute(facts: Facts) -> Iterator[str]:
    total = compute(facts)
    names = ["run", "training", "sampling", "device hours", "device", "energy"]
    rows = [
        (short_path(run.path), flops(run.flops),
         flops(run.generation_flops) if run.sampled else "none",
         _hours(run), run.device, _energy(run))
        for run in facts.runs
    ]  # fmt: skip
    yield from ("## Compute and energy", "", *table(names, rows), "")
    yield (
        f"All runs: {flops(total)}, which is {total / SYSTEMIC_RISK_FLOPS:.2g} times 10²⁵ FLOP, "
        "the threshold of Article 51 of the AI Act. Training is counted as 6 FLOP for each token "
        "and each parameter that it uses (4 with adapters), sampling as 2. Attention, discarded "
        "steps and other experiments are not counted."
    )
    if facts.models:
        yield f"The compute of {', '.join(map(plain, facts.models))} is {UNKNOWN}."
    yield (
        "Energy is the power of the chips in their data sheet times the hours of the run, with the "
        "devices of its last start; hosts, network and cooling are not counted."
    )
    yield ""


def compute(facts: Facts) -> float:
    """FLOPs of all runs, with sampling."""
    return sum(run.flops + run.generation_flops for run in facts.runs)


def _hours(run: Trained) -> str:
    if not run.devices:
        return f"{run.seconds / 3600:.3g} hours, devices {UNKNOWN}"
    return f"{run.seconds / 3600 * run.devices:.3g}"


def _energy(run: Trained) -> str:
    energy, chip = run.energy_kwh, chip_of_device(run.device)
    if energy is None or chip is None:
        what = f"no power of {plain(run.device)} on file" if run.device else UNKNOWN
        return f"unknown ({what})"
    return f"{energy:.3g} kWh ({chip.power_w:,.0f} W a chip)"
