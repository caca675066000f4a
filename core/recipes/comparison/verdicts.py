"""The report of a comparison: verdicts, figures, cost, and charts of the looks."""

import datetime
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes, page, svg, units
from sabia.core.bench.report import aligned
from sabia.core.bench.seed_noise import EQUAL, FARTHEST, OPEN, Look
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.plan.chips import chip_of_device
from sabia.core.plan.money.prices import cheapest, cost_usd, short_money
from sabia.core.recipes.comparison.candidates import Runs
from sabia.core.recipes.comparison.measures import Measure
from sabia.core.recipes.machine.peaks import device_name
from sabia.core.shards.atomic import write_atomic, write_json
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import open_stdout

FIXED_RUNS = 5  # of each corpus: what the number of tokens is compared with
COLUMNS = ("candidate", "by", "unit", "score", "of the first", "difference", "noise", "runs",
           "verdict")  # fmt: skip
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("candidate", "baseline", "measure", "unit", "verdict")]
    + [("runs", pa.int64())]
    + [(name, pa.float64()) for name in (
        "score", "baseline_score", "difference", "low", "high", "noise", "pair_noise",
        "item_noise")]
    + [("more_runs", pa.int64()), ("more_items", pa.float64())]
)  # fmt: skip


@dataclass
class Comparison:
    """A candidate against the first one by a measure. scores: of the runs of both."""

    candidate: str
    measure: Measure
    looks: list[Look] = field(default_factory=list)
    scores: tuple[np.ndarray, ...] = ()

    @property
    def last(self) -> Look:
        """The look that counts."""
        return self.looks[-1]

    def interval(self) -> str:
        """The relative difference of loss and its interval."""
        low, high = percent(self.last.low, "+"), percent(self.last.high, "+")
        return f"{percent(self.last.difference, '+')} [{low}, {high}]"


@dataclass(frozen=True)
class Report:
    """What is reported; tokens: of a run."""

    job: Job
    options: PretrainOptions
    runs: Runs
    tokens: int
    comparisons: list[Comparison]

    @property
    def first(self) -> str:
        """The candidate that the others are compared with."""
        return self.runs.candidates[0].name

    @cached_property
    def trained(self) -> dict[str, int]:
        """Runs that the verdicts are of, by candidate."""
        most: dict[str, int] = {}
        for one in self.comparisons:
            for name in (self.first, one.candidate):
                most[name] = max(most.get(name, 0), one.last.pairs)
        return most

    @cached_property
    def seconds(self) -> float:
        """Mean time of a run."""
        seconds = [
            self.runs.seconds(candidate, self.job.seed + number)
            for candidate in self.runs.candidates
            for number in range(self.trained[candidate.name])
        ]
        return float(np.mean(seconds))

    @cached_property
    def price(self) -> float | None:
        """US dollars for one hour of the device, None where it is not known."""
        if self.options.price:
            return self.options.price
        chip = chip_of_device(device_name(self.job.backend))
        offer = chip and cheapest(chip.name, datetime.datetime.now(datetime.UTC).date())
        return offer.usd_per_chip_hour / chip.devices if chip and offer else None

    def cost(self, more: int) -> tuple[float, float | None]:
        """(hours, US dollars or None) of so many more runs of each of two corpora."""
        seconds = 2 * more * self.seconds
        return seconds / 3600, None if self.price is None else cost_usd(seconds, self.price)

    def sentence(self, one: Comparison) -> str:
        """A verdict in words."""
        look, by = one.last, f"by {one.measure.name}"
        delta = f"{self.options.delta * 100:g}%"
        level = f"{self.options.confidence * 100:g}%"
        if look.verdict != OPEN:
            what = f"equal to {self.first} within {delta}"
            if look.verdict != EQUAL:
                what = f"{look.verdict} than {self.first}"
            return (
                f"{one.candidate} is {what} {by}: loss {one.interval()}, {look.pairs} runs of each "
                f"({level} for all verdicts)"
            )
        start = f"cannot tell {one.candidate} from {self.first} {by} ({one.interval()})"
        if look.more is None:
            return f"{start}: more than {FARTHEST:,} runs of each are needed"
        hours, usd = self.cost(look.more)
        items = "" if look.more_items == 1 else f" with {look.more_items:.1f} × the held-out items"
        priced = "" if usd is None else f", {short_money(usd)}"
        return (
            f"{start}: {2 * look.more} more runs{items}, "
            f"{units.format_duration(hours * 3600)}{priced}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; differences are relative."""
        used = sum(self.trained.values()) * self.tokens
        fixed = FIXED_RUNS * len(self.runs.candidates) * self.tokens
        return {
            "baseline": self.first,
            "delta": self.options.delta,
            "confidence": self.options.confidence,
            "seed": self.job.seed,
            "runs": self.trained,
            "tokens": used,
            "share_of_five_seeds": used / fixed,
            "hours": sum(self.trained.values()) * self.seconds / 3600,
            "usd_per_hour": self.price,
            "comparisons": [self._object(one) for one in self.comparisons],
        }

    def _object(self, one: Comparison) -> dict[str, object]:
        look = one.last
        hours, usd = (None, None) if not look.more else self.cost(look.more)
        return {
            "candidate": one.candidate,
            "measure": one.measure.name,
            "unit": one.measure.unit,
            "items": len(one.measure.sizes),
            "verdict": look.verdict,
            "runs": look.pairs,
            "score": float(one.scores[1].mean()),
            "baseline_score": float(one.scores[0].mean()),
            **_figures(look),
            "more_hours": hours,
            "more_usd": usd,
            "scores": one.scores[1].tolist(),
            "baseline_scores": one.scores[0].tolist(),
            "looks": [{"runs": x.pairs, "verdict": x.verdict, **_figures(x)} for x in one.looks],
            "sentence": self.sentence(one),
        }


def percent(logarithm: float, sign: str = "") -> str:
    """A difference of logarithms as a relative one: '+1.3%'."""
    if logarithm > math.log(100):
        return "+∞" if sign else "∞"
    return f"{math.expm1(logarithm) * 100:{sign}.2f}%"


def _figures(look: Look) -> dict[str, object]:
    """Relative figures of a look; an upper end that no number has is left out."""
    relative = {
        name: math.expm1(value) if value < 100 else None
        for name, value in (("difference", look.difference), ("low", look.low),
                            ("high", look.high), ("noise", look.noise),
                            ("pair_noise", look.pair_noise), ("item_noise", look.item_noise))
    }  # fmt: skip
    more = None if look.more is None else 2 * look.more
    return {**relative, "more_runs": more, "more_items": look.more_items}


def publish(report: Report) -> None:
    """Write comparison.json and comparison.html, the table to stderr, rows or JSON to stdout."""
    plain, out = report.to_json(), Path(str(report.job.out))
    lines = [_line(report, one) for one in report.comparisons]
    for line in aligned([COLUMNS, *lines]):
        notes.note(line)
    for one in report.comparisons:
        notes.note(report.sentence(one))
    notes.note(_used(plain))
    write_json(out / "comparison.json", plain)
    write_atomic(out / "comparison.html", _page(report, lines, plain))
    notes.note(f"report: {out / 'comparison.html'}")
    if report.job.json:
        print(json.dumps(plain, indent=1))
        return
    rows = [
        {"baseline": report.first} | {n: made.get(n) for n in SCHEMA.names if n != "baseline"}
        for made in plain["comparisons"]
    ]
    with open_stdout(report.job, SCHEMA, {"comparison": plain}) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, SCHEMA))


def _line(report: Report, one: Comparison) -> list[str]:
    first, second = (scores.mean() for scores in one.scores)
    return [one.candidate, one.measure.name, one.measure.unit, f"{second:.4f}", f"{first:.4f}",
            one.interval(), percent(one.last.noise), str(one.last.pairs),
            one.last.verdict]  # fmt: skip


def _used(plain: dict[str, Any]) -> str:
    runs = sum(plain["runs"].values())
    return (
        f"{runs} runs, {plain['tokens']:,} tokens: {plain['share_of_five_seeds']:.0%} of those of "
        f"{FIXED_RUNS} runs of each corpus"
    )


def _page(report: Report, lines: list[list[str]], plain: dict[str, Any]) -> str:
    verdicts = [page.paragraph(report.sentence(one)) for one in report.comparisons]
    parts = [page.section("Verdicts", [*verdicts, page.table(COLUMNS, lines, _used(plain))])]
    for one in report.comparisons:
        series = [
            svg.Series(name, [(look.pairs, 100 * math.expm1(min(getattr(look, key), 3.0)))
                              for look in one.looks])
            for name, key in (("difference", "difference"), ("lower end", "low"),
                              ("upper end", "high"))
        ]  # fmt: skip
        title = f"{one.candidate} against {report.first} by {one.measure.name}"
        chart = svg.line_chart(series, title, "runs of each", "difference of loss, %")
        seeds = [
            [
                report.job.seed + number,
                f"{first:.5g}",
                f"{second:.5g}",
                f"{second / first - 1:+.2%}",
            ]
            for number, (first, second) in enumerate(zip(*one.scores, strict=True))
        ]
        columns = ("seed", report.first, one.candidate, "difference")
        table = page.table(columns, seeds, f"{one.measure.unit} of each run")
        parts.append(page.section(title, [page.figure(chart), table]))
    return page.page("Comparison of corpora", parts)
