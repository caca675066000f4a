"""The options of `sabia plan-cluster` by the panels of its help, each declared once.

Names are those of `core.plan.settings.Settings`; nothing has a default here, so that the planner
can tell what was said from what it assumed.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sabia.cli.grammar import count, duration, fraction, length, money, option, size


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
        convention=_text("Operations that MFU refers to: 6nd (default), palm or causal.", "NAME"),
        lora=_flag("Train adapters on frozen weights (4ND, 2 bytes a parameter).", "--lora"),
        lora_rank=_number("The same, counting adapters of this rank.", "R"),
    ),
    **_panel(
        "Run",
        stage=_text("pretrain (default), sft, grpo, serve or eval.", "NAME"),
        tokens=_count("Training tokens (default 500B)."),
        seq=(int | None, length("Sequence length, binary: 8k is 8192 (default 8k).")),
        batch_tokens=_count("Tokens of a global batch, live at once (default 4M)."),
        deadline=_text("Deadlines, by commas (default 30d,14d,7d).", "DURATION,…"),
        state_recipe=_text("What is held per parameter (default adamw16).", "NAME"),
    ),
    **_panel(
        "Chips",
        chip=_text("b200, h100, v5p … (default b200).", "NAME"),
        compare=_text("Plan on each of these chips, in one table.", "CHIP,…"),
        chips=_number("Plan for this many chips instead of finding the number."),
        nodes=_number("The same in whole hosts."),
        hbm=(int | None, size("Memory of a chip, every byte usable (default: as sold).")),
        utilisation=_share("Share of a chip's memory to plan with (default: all; layouts 90%)."),
        mfu=_share("Share of the peak that training reaches (default 40%; usual: sparse 20-40%, "
                   "dense 50-60%)."),
    ),
    **_panel(
        "Layout",
        search=_flag("Find the layout, and predict its speed instead of --mfu.", "--search"),
        fixed_layout=_text("Predict this one: tensor=8,fsdp=16; kept by --search.", "AXIS=N,…"),
        objective=_text("What --search makes least: time (default) or cost.", "NAME"),
        stack=_text("Training software: sabia (default), megatron, fsdp, maxtext …", "NAME"),
        precision=_text("Of products: bf16 (default), fp32, fp8, mxfp8, nvfp4, int8.", "NAME"),
        recompute=_text("none, selective or full (default: searched).", "NAME"),
        micro_batch=_number("Rows at a time on a device (default: searched).", "ROWS"),
        explain=_flag("Show every term of memory and every part of a step.", "--explain"),
    ),
    **_panel(
        "Stops",
        failure_rate=_share("Failures per chip and day (default 0.1%); any of these adds a view."),
        preempt=_duration("Mean time between preemptions (default never)."),
        capacity_wait=_duration("Mean wait for machines after a preemption (default none)."),
        restart=_duration("Time to start again after a stop (default 15m)."),
        repair=_duration("Mean time until a failed node is back (default at once)."),
        spare_nodes=_number("Nodes that stand in meanwhile, paid for (default 0)."),
        bucket_gbps=(float | None, option("Gigabytes a second that storage takes (default 8).",
                                          metavar="GB/S", min=1e-6)),
        checkpoint_copies=_number("Saves that may be on their way to storage (default 1)."),
        peer_copies=_flag("Mirror saves in peers' memory: one node's failure loses no lag.",
                          "--peer-copies"),
        synchronous=_flag("Stand still until a save is in storage.", "--synchronous"),
        job_limit=_duration("Longest job; another follows (default none)."),
        queue=_duration("Mean wait for the next job (default none)."),
        simulate=_number("Draw so many courses of the run: mean, median, 95%.", "N"),
    ),
    **_panel(
        "Money",
        price=_text("Dollars a chip-hour, by commas (default: prices on file).", "USD,…"),
        provider=_text("Prices on file of this provider.", "NAME"),
        region=_text("Prices on file for this region.", "NAME"),
        commitment=_text("Prices on file for those who commit: '1 year'.", "TERM"),
        spot=_flag("Preemptible prices; with --preempt against on-demand ones.", "--spot"),
        spot_share=_share("Preemptible price as a share of on-demand (default 50%)."),
        offers=_flag("The bill at every price on file.", "--offers"),
        max_cost=(float | None, money("Refuse a dearer run, and say what would fit.")),
        carbon=_flag("Energy and emissions.", "--carbon"),
        pue=(float | None, option("Energy of the building over the chips' (default 1.1).",
                                  metavar="RATIO")),
        carbon_intensity=(float | None, option("Of electricity (default 0.385).",
                                               metavar="KG/KWH")),
        serve_tokens=_count("Is the size right, if so many tokens are served after?"),
        budget=_text("Sum up a pyramid of runs instead of planning one.", "FILE.toml"),
    ),
    **_panel(
        "Generation",
        weights=_text("Format of weights: bf16 (default), fp8, int8, nvfp4 …", "NAME"),
        cache=_text("Format of the key-value cache: bf16 (default), fp8 or int8.", "NAME"),
        prompt_tokens=_count("Of a request, an item, an example (default 1000)."),
        output_tokens=_count("Of an answer, on average (default 1000)."),
        output_limit=_count("grpo: longest answer (default none)."),
        replica_chips=_number("Chips that share a copy of the model (default: searched)."),
        batch=_number("serve, grpo: sequences at once in a replica (default: all that fit)."),
        items=_count("eval: items; sft: examples (default 10000)."),
        repeats=_number("eval: answers to each; sft: passes (default 1)."),
        prompts=_number("grpo: prompts of a step (default 64)."),
        group=_number("grpo: answers to each (default 16)."),
        steps=_number("grpo: steps (default 1000)."),
        generation_chips=_number("grpo: chips apart that generate (default: the same chips)."),
        off_policy=(int | None, option("grpo: steps that generation apart may lead by (default 1).",
                                       metavar="N", min=0)),
        no_reference=_flag("grpo: no KL term, so no reference model.", "--no-reference"),
        reward_time=_duration("grpo: time of the rewards of a step (default none)."),
        judge_calls=_count("Calls of a judge for each answer (default 0)."),
        judge_prompt_tokens=_count("Of a call (default 3000)."),
        judge_output_tokens=_count("Of a verdict (default 200)."),
        judge_params=_count("A judge on own chips: its parameters."),
        judge_active=_count("Those that a token visits."),
        judge_price=_text("A judge by API: dollars a million tokens read and written.", "USD,USD"),
        api_price=_text("eval: answers by API, likewise.", "USD,USD"),
    ),
    **_panel(
        "Output",
        plot=_text("Charts of the plan: FILE.svg or FILE.html.", "FILE"),
        emit=_text("The script that starts it: slurm, xpk or skypilot.", "NAME"),
        pretrain_args=_text("Of its command (default: tokens/ and the model).", "WORDS"),
    ),
}  # fmt: skip
