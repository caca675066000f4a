"""Options of the trainers, in groups: how long, optimizer, precision, adapters, checkpoints,
guards, logging. `pretrain` and `sft` take all of them, `grpo` and `classify train` some."""

from sabia.core.options.option import choice, integer, needs, number, quantity, switch, text
from sabia.core.options.table import Options


class Duration(Options, group="Data"):
    """How long a run is, and how large its steps are."""

    steps: int = integer(
        "Steps to train", 0, least=0, excludes=("tokens", "epochs"), unset="one epoch"
    )
    tokens: int = quantity(
        "whole", "Tokens to train on", 0, excludes=("epochs",), unset="one epoch"
    )
    epochs: float = number("Passes over the rows", 0.0, least=0, unset="1")
    batch: int = integer(
        "Rows in a step, over all devices", 0, least=0, excludes=("batch_tokens",), unset="32"
    )
    batch_tokens: int = quantity("whole", "Tokens in a step", 0, unset="32 rows")
    micro_batch: int = integer(
        "Rows at a time on a device", 0, least=0, unset="all", recorded=False, group="Parallelism"
    )


class Schedule(Options, group="Optimizer"):
    """The learning rate over the steps."""

    lr: float = number("Peak learning rate", 6e-4, least=0, common=True)
    schedule: str = choice("Learning-rate schedule", "wsd", "cosine", "constant")
    warmup: str = text("Warm-up, in steps or as a share: 100 or 2%", "STEPS", default="2%")
    decay: str = text(
        "Decay phase of wsd: 200 or 20%", "STEPS", default="20%", only=needs(schedule="wsd")
    )
    decay_shape: str = choice(
        "Shape of the decay phase", "linear", "exponential", "cosine", "1-sqrt",
        only=needs(schedule="wsd"),
    )  # fmt: skip
    final_lr: float = number(
        "Learning rate at the end, as a share of --lr", 0.0, least=0, most=1,
        only=needs(schedule=("wsd", "cosine")),
    )  # fmt: skip


class Optimizer(Options, group="Optimizer"):
    """The optimizer and what it trains."""

    optimizer: str = choice("Optimizer", "adamw", "muon", "lion", "adafactor", "soap")
    weight_decay: float = number("Weight decay of matrices", 0.1, least=0)
    betas: str = text("The optimizer's betas", "B1,B2", unset="by optimizer")
    clip_norm: float = number("Maximum gradient norm; 0: no clipping", 1.0, least=0)
    mup_base: int = integer("μP: the width at which --lr was tuned", 0, least=0, unset="off")
    freeze: str = text("Freeze tensors whose names match", "REGEX")
    z_loss: float = number("Coefficient of the z-loss, logsumexp² of the logits", 0.0, least=0)
    balance: float = number("Coefficient of the experts' load-balancing loss", 0.0, least=0)
    router_z: float = number("Coefficient of the router z-loss", 0.0, least=0)
    bias_rate: float = number("Update rate of expert biases", 0.001, least=0)


class Adapters(Options, group="Adapters"):
    """Low-rank adapters (LoRA)."""

    lora_rank: int = integer(
        "Train adapters of this rank only", 0, least=0, unset="the model itself"
    )
    lora_alpha: float = number(
        "Scale of adapters, times 1/rank", 0.0, least=0, unset="2 × rank", only=needs("lora_rank")
    )
    lora_targets: str = text(
        "Adapt matrices whose names match", "REGEX", unset="all matrices", only=needs("lora_rank")
    )


class Precision(Options, group="Precision"):
    """Number formats of the step, and what is recomputed in it."""

    precision: str = choice(
        "Precision of products", "fp32", "bf16", "fp8", "fp8-block", "nvfp4", "qat-int8",
        "qat-int4", "qat-nvfp4",
    )  # fmt: skip
    bf16_tail: bool = switch("Switch to BF16 for the learning-rate decay phase")
    compile: bool = switch("Use torch.compile for the step", recorded=False)
    remat: str = choice(
        "Activations to recompute (rematerialize)", "none", "matmuls", "full", recorded=False
    )


class Checkpoints(Options, group="Checkpoints"):
    """When checkpoints are saved, how many are kept, and what is exported."""

    save_every: str = text(
        "Steps, a duration, or auto: 500, 10m", "INTERVAL", default="10m", recorded=False
    )
    keep_checkpoints: int = integer("Checkpoints to keep", 2, least=1, recorded=False)
    export_dtype: str = choice("Number format of final/", "float32", "bfloat16", recorded=False)


class Storage(Options, group="Checkpoints"):
    """Checkpoints of long runs."""

    mtbf: float | None = quantity(
        "duration", "Mean time between failures of one device", only=needs(save_every="auto"),
        recorded=False,
    )  # fmt: skip
    keep_every: int = integer(
        "Keep the checkpoints of every N-th step for good", 0, least=0, recorded=False
    )
    checkpoint_url: str = text(
        "Upload checkpoints to, and resume from: s3://…", "URL", recorded=False
    )
    grace: float | None = quantity(
        "duration", "Time from SIGTERM to the end; warns when saves take longer", recorded=False
    )


class Guards(Options, group="Guards"):
    """What is done about loss spikes and hanging processes."""

    on_spike: str = choice("Action at a loss spike", "rewind", "stop", "off")
    spike_sigmas: float = number(
        "Spike threshold, in robust standard deviations above the median", 8.0, least=0,
        only=needs(on_spike=("rewind", "stop")),
    )  # fmt: skip
    hang_timeout: float = quantity(
        "duration", "Treat a rank as hung after this long without progress", "30m", recorded=False
    )


class Logging(Options, group="Logging"):
    """Validation, metrics and profiles."""

    eval_every: int = integer(
        "Steps between validations", 0, least=0, unset="at start and end", recorded=False
    )
    log_every: int = integer("Steps between rows of metrics", 1, least=1, recorded=False)
    profile: str = text("Trace steps A to B into the run directory", "A:B", recorded=False)
    track: str = text("Also log to wandb or tensorboard", "NAME,…", recorded=False)
    peak_flops: float = quantity(
        "count", "Peak FLOP/s of a device for MFU", 0.0, unset="measured", recorded=False
    )


class Training(
    Duration, Schedule, Optimizer, Adapters, Precision, Checkpoints, Storage, Guards, Logging
):
    """The options of pretrain and sft."""
