"""Options that pretrain and sft share, declared once; the commands give some of the defaults.

`training` adds them to a command's signature and hands them over as one dictionary, the arguments
of `core.recipes.training_options.TrainOptions`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from sabia.cli.grammar import count, option
from sabia.cli.shared_options import Declare, sharing
from sabia.core.shards.job import Job


def _none(kind: Any, text: str, **more: Any) -> Any:
    """An option whose default stands for nothing and is not shown."""
    return Annotated[kind, option(text, show_default=False, **more)]


def _text(text: str, metavar: str) -> Any:
    return Annotated[str, option(text, metavar=metavar)]


def _rate(text: str, metavar: str = "RATE") -> Any:
    return Annotated[float, option(text, metavar=metavar, min=0.0)]


# name → (annotation, default), in the order of the help
OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "steps": (_none(int, "Steps to train.", metavar="N", min=0), 0),
    "tokens": (Annotated[float, count("Tokens to train on, instead of --steps.",
                                      show_default=False)], "0"),
    "epochs": (_none(float, "Passes over the rows (default: 1).", metavar="N", min=0.0), 0.0),
    "batch": (_none(int, "Rows in a step, over all devices (default: 32).", metavar="ROWS", min=0),
              0),
    "batch_tokens": (Annotated[float, count("Tokens in a step, instead of --batch.",
                                            show_default=False)], "0"),
    "micro_batch": (_none(int, "Rows at a time on a device (default: all).", metavar="ROWS",
                          min=0), 0),
    "lr": (_rate("Peak learning rate."), 6e-4),
    "schedule": (_text("wsd, cosine or constant.", "NAME"), "wsd"),
    "warmup": (_text("Steps, or a share of them: 100 or 2%.", "STEPS"), "2%"),
    "decay": (_text("Length of wsd's tail: 200 or 20%.", "STEPS"), "20%"),
    "decay_shape": (_text("linear, exponential, cosine or 1-sqrt.", "NAME"), "linear"),
    "final_lr": (Annotated[float, option("Share of --lr left at the end.", min=0.0, max=1.0)], 0.0),
    "optimizer": (_text("adamw, muon, lion, adafactor or soap.", "NAME"), "adamw"),
    "weight_decay": (_rate("Decay of matrices."), 0.1),
    "betas": (_none(str, "The optimizer's betas (default: by optimizer).", metavar="B1,B2"), ""),
    "clip_norm": (_rate("Largest gradient norm; 0: any.", "NORM"), 1.0),
    "mup_base": (_none(int, "μP: the width that --lr was found at.", metavar="WIDTH", min=0), 0),
    "freeze": (_none(str, "Train all but tensors whose names this finds.", metavar="REGEX"), ""),
    "lora_rank": (_none(int, "Train adapters of this rank only.", metavar="R", min=0), 0),
    "lora_alpha": (_none(float, "Scale of adapters, times 1/rank (default: 2 R).", metavar="A",
                         min=0.0), 0.0),
    "lora_targets": (_none(str, "Adapters on matrices whose names this finds.", metavar="REGEX"),
                     ""),
    "precision": (_text("fp32, bf16, fp8, fp8-block, nvfp4, qat-int8, qat-int4 or qat-nvfp4.",
                        "NAME"), "fp32"),
    "bf16_tail": (Annotated[bool, option("In BF16 while the rate decays.", "--bf16-tail")], False),
    "compiled": (Annotated[bool, option("torch.compile the step.", "--compile")], False),
    "remat": (_text("What to recompute: none, matmuls or full.", "NAME"), "none"),
    "z_loss": (_rate("Coefficient of logsumexp² of the logits.", "C"), 0.0),
    "balance": (_rate("Coefficient of the experts' balance loss.", "C"), 0.0),
    "router_z": (_rate("Coefficient of the routers' z-loss.", "C"), 0.0),
    "bias_rate": (_rate("Step of balancing biases, where a model has them."), 0.001),
    "on_spike": (_text("rewind and leave rows out, stop, or off.", "ACTION"), "rewind"),
    "spike_sigmas": (_rate("What a spike is: spreads above the median.", "N"), 8.0),
    "save_every": (_text("Steps, a duration, or auto: 500, 10m.", "INTERVAL"), "10m"),
    "mtbf": (_none(str, "Time between failures, for --save-every auto.", metavar="DURATION"), ""),
    "keep_checkpoints": (Annotated[int, option("Checkpoints to keep.", metavar="N", min=1)], 2),
    "keep_every": (_none(int, "Keep those of every N-th step for good.", metavar="N", min=0), 0),
    "checkpoint_url": (_none(str, "Upload checkpoints to, and resume from: s3://…", metavar="URL"),
                       ""),
    "grace": (_none(str, "Time from SIGTERM to the end; warns of slow saves.",
                    metavar="DURATION"), ""),
    "hang_timeout": (_text("Without progress for so long, a process hangs.", "DURATION"), "30m"),
    "eval_every": (_none(int, "Steps between validations (default: at start and end).",
                         metavar="N", min=0), 0),
    "log_every": (Annotated[int, option("Steps between rows of metrics.", metavar="N", min=1)], 1),
    "profile": (_none(str, "Trace steps A to B into -o (see profile/).", metavar="A:B"), ""),
    "track": (_none(str, "Also to wandb or tensorboard.", metavar="NAME,…"), ""),
    "peak_flops": (Annotated[float, count("Peak FLOP/s of a device for MFU (default: measured).",
                                          show_default=False)], "0"),
    "export_dtype": (_text("float32 or bfloat16 in final/.", "NAME"), "float32"),
}  # fmt: skip
WHOLE = ("tokens", "batch_tokens")


def kind(name: str) -> Any:
    """The annotation of a shared option, for a command that has only some of them."""
    return OPTIONS[name][0]


def training(**defaults: Any) -> Declare:
    """Give a command the shared options; `defaults` are its own for some of them.

    The command's parameter `training` receives them by name.
    """

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def whole(job: Job, training: dict[str, Any], **values: Any) -> None:
            numbers = {name: int(training[name]) for name in WHOLE}
            function(job, training=training | numbers, **values)

        return sharing("training", OPTIONS, **defaults)(whole)

    return declare
