"""The options of `sabia plan-cluster` by the panels of its help, each declared once.

Names are those of `core.plan.settings.Settings`; nothing has a default here, so that the planner
can tell what was said from what it assumed.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sabia.cli.grammar import count, duration, fraction, length, option, size


def _panel(title: str, **options: Any) -> dict[str, tuple[Any, Any]]:
    """Declare a panel: option → what it is, or (type, what it is) where the value is not a str."""
    declared = {}
    for name, (kind, info) in options.items():
        info.rich_help_panel = title
        declared[name] = (Annotated[kind, info], False if kind is bool else None)
    return declared


def _count(help: str) -> Any:
    return float | None, count(help)


def _share(help: str) -> Any:
    return float | None, fraction(help)


def _duration(help: str) -> Any:
    return float | None, duration(help)


def _text(help: str, metavar: str) -> Any:
    return str | None, option(help, metavar=metavar)


def _number(help: str, metavar: str = "N") -> Any:
    return int | None, option(help, metavar=metavar, min=1)


def _flag(help: str, name: str) -> Any:
    return bool, option(help, name)


RUNS = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[INPUT]...",
        help="A config.json, or runs as JSON lines (- for stdin) or Parquet.",
        show_default=False,
    ),
]
OPTIONS: Mapping[str, tuple[Any, Any]] = {
    **_panel(
        "Model",
        params=_count("Parameters of the model, all experts."),
        active=_count("Parameters that a token visits (default: all of them)."),
        model=_text("Count a config.json or its directory instead.", "PATH"),
        layers=_number("Layers (default: those of the nearest published model)."),
        hidden=_number("Hidden size (default: likewise)."),
        lora=_flag("Train adapters on frozen weights (4ND, 2 bytes a parameter).", "--lora"),
    ),
    **_panel(
        "Run",
        tokens=_count("Training tokens (default 500B)."),
        seq=(int | None, length("Sequence length, binary: 8k is 8192 (default 8k).")),
        batch_tokens=_count("Tokens of a global batch, live at once (default 4M)."),
        deadline=_text("Deadlines, by commas (default 30d,14d,7d).", "DURATION,…"),
        state_recipe=_text("What is held per parameter (default adamw16).", "NAME"),
    ),
    **_panel(
        "Chips",
        chip=_text("b200, h100, v5p … (default b200).", "NAME"),
        chips=_number("Plan for this many chips instead of finding the number."),
        nodes=_number("The same in whole hosts."),
        hbm=(int | None, size("Memory of a chip, every byte usable (default: as sold).")),
        utilisation=_share("Share of a chip's memory to plan with (default: all)."),
        compare=_text("Plan on each of these chips, in one table.", "CHIP,…"),
        mfu=_share("Share of the peak that training reaches (default 40%; usual: sparse 20-40%, "
                   "dense 50-60%)."),
    ),
    **_panel(
        "Stops",
        failure_rate=_share("Failures per chip and day (default 0.1%); shows the stops view."),
        preempt=_duration("Mean time between preemptions (default never); likewise."),
        restart=_duration("Time to start again after a stop (default 15m); likewise."),
        bucket_gbps=(float | None, option(
            "Gigabytes a second that storage takes (default 8); likewise.", metavar="GB/S",
            min=1e-6)),
        spot_share=_share("Preemptible price as a share of on-demand (default 50%)."),
    ),
    **_panel(
        "Money",
        price=_text("Dollars a chip-hour, by commas (default: prices on file).", "USD,…"),
        budget=_text("Sum up a pyramid of runs instead of planning one.", "FILE.toml"),
    ),
}  # fmt: skip
