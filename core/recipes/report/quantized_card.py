"""The model card of a quantized model (README.md of its directory), from its record."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sabia.core import units
from sabia.core.recipes.report.card_text import FILL_IN, plain, table

FILE = "README.md"
WORST = 5


def quantized_card(report: Mapping[str, Any], name: str) -> str:
    """The card in Markdown; report: as in quantization.json."""
    return "\n".join(_lines(report, name)) + "\n"


def _lines(report: Mapping[str, Any], name: str) -> Iterator[str]:
    model, recipe, sample = report["model"], report["recipe"], report["calibration"]
    yield from ("---", "pipeline_tag: text-generation", "base_model_relation: quantized")
    yield f"# base_model: to be filled in; quantized from {json.dumps(os.path.basename(model))}"
    yield from ("# license: to be filled in by the provider", "tags:", '- "sabia"')
    yield from (f"- {json.dumps(report['format'])}", "---")
    yield from (f"# Model card: {plain(name)}", "", f"Summary: {FILL_IN}", "", "## Formats", "")
    before, after = (units.format_bytes(report[f"size_{x}_bytes"]) for x in ("before", "after"))
    bits = report["bits_per_weight"]
    yield (
        f"Recipe {plain(recipe['name'])}, files as {report['format']}: {before} → {after}, "
        f"{bits:.2f} bits per weight. What is not listed is not quantized."
    )
    yield ""
    counts = Counter((x["component"], x["scheme"], x["method"]) for x in report["layers"])
    rows = [(*key, count) for key, count in counts.items()]
    yield from table(["component", "format", "rounding", "matrices"], rows)
    yield from ("", "## Calibration", "", *_calibration(sample))
    yield from ("", "## Results", "", *_results(report))
    if report["loaders"]:
        loaders = [(x["loader"], x["result"], x["why"] or "-") for x in report["loaders"]]
        yield from ("", "## Loaders", "", *table(["loader", "result", "reason"], loaders))


def _calibration(sample: Mapping[str, Any]) -> Iterator[str]:
    if not sample["rows"]:
        yield "None: no record was read."
        return
    yield (
        f"{sample['rows']:,} records ({sample['kind']}), {sample['tokens']:,} tokens; "
        f"{sample['held_out']:,} others were held out."
    )
    match: Mapping[str, Any] = sample.get("usage") or {}
    for trait in match.get("distance", {}):
        values = sorted(match["usage"][trait].keys() | match["chosen"][trait].keys())
        rows = [
            (value, *(f"{match[kind][trait].get(value, 0):.1%}" for kind in ("usage", "chosen")))
            for value in values
        ]
        yield from ("", *table([trait, "use", "calibration"], rows))
        yield from ("", f"Distance of the two: {match['distance'][trait]:.3f}.")


def _results(report: Mapping[str, Any]) -> Iterator[str]:
    measured = report.get("divergence")
    if measured:
        yield from table(
            ["on held-out tokens", "value"],
            [
                ("tokens", measured["tokens"]),
                ("KL to the original, mean, nats", f"{measured['kl_nats']:.4g}"),
                ("KL, 99th percentile", f"{measured['kl_99_nats']:.4g}"),
                ("another most probable token", f"{1 - measured['same_top_share']:.2%}"),
                ("perplexity of the original", f"{math.exp(measured['loss_before_nats']):.4g}"),
                ("perplexity", f"{math.exp(measured['loss_after_nats']):.4g}"),
            ],
        )
    else:
        yield "Not measured: no record was held out."
    for name, columns, rows in _evaluation(report.get("evaluation") or {}):
        yield from ("", name, "", *table(columns, rows))
    worst = sorted(report["layers"], key=lambda row: -row["relative_error"])[:WORST]
    rows = [(x["module"], x["scheme"], f"{x['relative_error']:.3f}") for x in worst]
    yield from ("", *table(["matrices with the largest error", "format", "|W' - W| / |W|"], rows))


def _evaluation(record: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[Any]]]:
    """Tables of an evaluation: their heading, columns and rows."""
    if not record:
        return
    rows = [
        (
            plain(f"{one['kind']} {one['name']}"), f"{one['before']:.4g}", f"{one['after']:.4g}",
            "-" if one["kept"] is None else f"{one['kept']:.1%}",
            "-" if one["noise"] is None else f"{one['noise']:.1%}",
        )
        for one in record["recovery"]
    ]  # fmt: skip
    columns = ["worst first", "original", "quantized", "kept", "noise of the original"]
    yield f"On benchmark tasks, seeds {', '.join(map(str, record['seeds']))}:", columns, rows
    if record["gate"]:
        checks = [
            (plain(f"{c['kind']} {c['name']}"), c["verdict"], f"{c['difference']:+.3g}")
            for c in record["gate"]
        ]
        yield "The gate:", ["check", "verdict", "difference"], checks
