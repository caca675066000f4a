"""Options of `sabia plan-cluster` for questions before a run: what size, on which terms."""

from sabia.core.options.option import needs
from sabia.core.options.planning.generation import TRAINED, count, duration, share, text_of
from sabia.core.options.planning.generation import choice_of as choice
from sabia.core.options.table import Options


class PlanSize(Options, group="Model"):
    """What model to train, where neither `--params` nor `--model` is given, and its loss."""

    tokens_per_param: float | None = count(
        "Without --params: training tokens per parameter", least=0.1, most=1e5,
        unset="those of least loss", excludes=("params", "model", "tokens"),
        only=needs("chips", "nodes"),
    )  # fmt: skip
    """With `--chips` and `--deadline`, and without a size, the answer is the model to train. 20 is
    the rule of Hoffmann et al. (2022); more tokens make a smaller model that is cheaper to
    serve."""
    data: float | None = count(
        "Without --params: unique tokens at hand; repeated ones count less",
        excludes=("params", "model"), only=needs("chips", "nodes"),
    )  # fmt: skip
    fit: str | None = text_of("Fit a scaling law on these runs and use it", "PATH")
    """A file (Parquet or JSON lines) with the columns `params`, `tokens` and `loss` or
    `validation_loss` in nats per token, and perhaps `run`, of which the last row counts; or a
    directory of runs of `sabia pretrain`. Without it the law is that of Besiroglu et al. (2024)."""
    base_format: str | None = choice(
        "Number format of the frozen weights of LoRA (QLoRA: nf4)", "bf16", "fp8", "int8", "nf4",
        "int4",
        unset="bf16", only=(TRAINED, needs("lora", "lora_rank")),
    )  # fmt: skip
    """`nf4` with double quantization takes 0.516 bytes per parameter (Dettmers et al. 2023), `int4`
    0.531; both are those of `--lora-base` in `sabia sft` and `sabia grpo`. Only memory changes; the
    products are computed in BF16."""


class PlanTerms(Options, group="Money"):
    """On which terms the chips are used. Each of these options adds a section to the plan."""

    reserved: float | None = share("Discount of reserved chips, such as 40%")
    """A reservation is paid for all of `--term`, used or not."""
    term: float | None = duration("Term of the reservation", unset="52w", only=needs("reserved"))
    production: float | None = duration(
        "Time per working day that production needs the chips, such as 10h"
    )
    """The run has the nights and weekends. It stops in each morning of five working days, which
    costs `--restart` and the blocking part of a save."""
    first_mfu: float | None = share("MFU before the layout is tuned: compare it with tuning first")
    """Without `--search` the tuned MFU is `--mfu`, else the predicted one."""
    tuning: float | None = duration(
        "Time that tuning the layout takes on the chips", unset="3d", only=needs("first_mfu")
    )
