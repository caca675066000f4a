"""The chip-hours of whole published runs, and what the planner says of them."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.answer import answer
from sabia.core.plan.device.layout import AXES

FILE = Path(__file__).parent.parent / "core/plan/published_runs.toml"
FAILURES = 0.0005  # a chip and day, about those of Llama 3 (arXiv 2407.21783, section 3.3.4)
DAY = date(2026, 11, 21)


@dataclass(frozen=True)
class Forecast:
    """work: chip-hours of the steps alone; wall: with failures and restarts."""

    work: float
    wall: float
    mfu: float
    layout: str


def runs() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each run with its table's settings, and the config.json of its model."""
    data = tomllib.loads(FILE.read_text())
    for table in data["table"]:
        shared = {key: value for key, value in table.items() if key != "runs"}
        for run in table["runs"]:
            yield shared | run, {"model_type": "llama"} | data["model"][run["model"]]


def forecast(run: dict[str, Any], config: dict[str, Any], folder: Path) -> Forecast:
    """What a search for the fastest layout on as many chips says."""
    path = folder / f"{run['model']}.json"
    path.write_text(json.dumps(config))
    names = ("chip", "chips", "stack", "seq", "tokens", "batch_tokens", "precision")
    row = {name: run[name] for name in names if name in run}
    row |= {"search": True, "deadline": "9000w", "price": "2", "failure_rate": FAILURES}
    found = answer(PlanOptions.read(row | {"model": str(path)}), DAY).report
    best, stops = found["rows"][0], found["stops"]
    hours = best["chips"] * best["work_s"] / 3600
    return Forecast(
        work=hours,
        wall=hours * stops["wall_over_work"],
        mfu=best["mfu"],
        layout=_words(found["layout"]["best"]),
    )


def _words(best: dict[str, Any]) -> str:
    sizes = {axis: best[axis] for axis in (*AXES, "virtual", "micro_batch")}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
