"""Options of the trainers, in groups: how long, optimizer, precision, adapters, checkpoints,
guards, logging. `pretrain` and `sft` take all of them, `grpo` and `classify train` some."""

from sabia.core.errors import UsageError
from sabia.core.numerics.optimizers import OPTIMIZERS, defaults_text, with_mup, with_setting
from sabia.core.options.option import (
    choice,
    integer,
    needs,
    number,
    pattern,
    quantity,
    switch,
    text,
)
from sabia.core.options.shared import MeshOptions
from sabia.core.options.table import Options


class Duration(Options, group="Data"):
    """How long a run is, and how large its steps are."""

    steps: int = integer(
        "Number of optimizer steps", 0, least=0, excludes=("tokens", "epochs"), unset="one epoch"
    )
    tokens: int = quantity(
        "whole", "Number of training tokens, padding included", 0, excludes=("epochs",),
        unset="one epoch",
    )  # fmt: skip
    """The number of steps is rounded up."""
    epochs: float = number("Number of passes over the training rows", 0.0, least=0, unset="1")
    """It may be a fraction, such as 0.5."""
    batch: int = integer(
        "Rows per optimizer step, summed over all devices", 0, least=0, excludes=("batch_tokens",),
        unset="32",
    )  # fmt: skip
    """It must be a multiple of the product of the mesh axes `data`, `fsdp` and `expert`."""
    batch_tokens: int = quantity(
        "whole", "Tokens per optimizer step, summed over all devices", 0, unset="32 rows"
    )
    """It is rounded to whole rows. Padding is counted."""
    micro_batch: int = integer(
        "Rows per forward and backward pass on a device", 0, least=0, recorded=False,
        group="Parallelism", unset="all rows of the device",
    )  # fmt: skip
    """A smaller number needs less memory (gradient accumulation). With the mesh axis `pipe` the
    default is `--stage-micro-batches` for each pipeline stage. The update does not depend on it:
    sums are divided once, by the weight of the whole batch."""
    stage_micro_batches: int = integer(
        "Micro-batches of a step for each pipeline stage", 4, least=1, recorded=False,
        group="Parallelism", excludes=("micro_batch",),
    )  # fmt: skip
    """With p stages and m micro-batches the devices wait for (p - 1) / (m + p - 1) of the time.
    The option needs the mesh axis `pipe`."""


class Schedule(Options, group="Optimizer"):
    """The learning rate over the steps."""

    lr: float = number("Peak learning rate", 6e-4, above=0, common=True)
    schedule: str = choice("Learning-rate schedule", "wsd", "cosine", "constant")
    """`wsd` (warmup-stable-decay) is a linear warm-up, a constant rate and a decay; `cosine` is a
    warm-up and half a cosine; `constant` is a warm-up and a constant rate."""
    warmup: str = text(
        "Length of the warm-up: steps (100) or a fraction of all steps (2%)", "STEPS", default="2%"
    )
    decay: str = text(
        "Length of the final decay: steps (200) or a fraction of all steps (20%)", "STEPS",
        default="20%", only=needs(schedule="wsd"),
    )  # fmt: skip
    decay_shape: str = choice(
        "Shape of the final decay", "linear", "exponential", "cosine", "1-sqrt",
        only=needs(schedule="wsd"),
    )  # fmt: skip
    final_lr: float = number(
        "Learning rate at the end of the decay, as a fraction of --lr", 0.0, least=0, most=1,
        only=needs(schedule=("wsd", "cosine")),
    )  # fmt: skip


class Optimizer(Options, group="Optimizer"):
    """The optimizer and what it trains."""

    optimizer: str = choice(
        "Optimizer", *OPTIMIZERS,
        details=" ".join(f"`{name}` {record.help}." for name, record in OPTIMIZERS.items()),
    )  # fmt: skip
    weight_decay: float = number("Decoupled weight decay of matrices", 0.1, least=0)
    """It is multiplied by the learning rate, not added to the gradient. Norms and biases do not
    decay."""
    betas: str = text(
        "Decay rates of the optimizer's moving averages, such as 0.9,0.95", "B1,B2",
        unset=defaults_text("beta1", "beta2"), only=needs(optimizer=with_setting("beta1")),
    )  # fmt: skip
    eps: float | None = number(
        "Number that the optimizer adds to the divisor of an update", above=0, later=True,
        unset=defaults_text("eps"), only=needs(optimizer=with_setting("eps")),
    )  # fmt: skip
    """`adafactor` adds it to the squared gradients instead."""
    momentum: float | None = number(
        "Decay rate of the optimizer's momentum, from 0 to below 1", least=0, most=1, later=True,
        unset=defaults_text("momentum"), only=needs(optimizer=with_setting("momentum")),
    )  # fmt: skip
    nesterov: bool | None = switch(
        "Use Nesterov momentum", default=None, negative=True, later=True,
        unset=defaults_text("nesterov"), only=needs(optimizer=with_setting("nesterov")),
    )  # fmt: skip
    """The momentum of the next step, instead of that of this one."""
    soap_every: int | None = integer(
        "Steps between two refreshes of SOAP's eigenbases", least=1, later=True,
        unset=defaults_text("soap_every"), only=needs(optimizer=with_setting("soap_every")),
    )  # fmt: skip
    soap_max_dim: int | None = integer(
        "Largest dimension of a matrix that gets an eigenbasis with SOAP", least=1, later=True,
        unset=defaults_text("soap_max_dim"), only=needs(optimizer=with_setting("soap_max_dim")),
    )  # fmt: skip
    """A longer side of a matrix has no eigenbasis; if both sides are longer, the update is that of
    AdamW. State grows with the squares of the sides that have one."""
    clip_norm: float = number("Maximum gradient norm; 0 disables clipping", 1.0, least=0)
    """If the global norm of the gradient is larger, the gradient is scaled down to it."""
    mup_base: int = integer(
        "μP: width of the model for which --lr was tuned", 0, least=0, unset="off",
        only=needs(optimizer=with_mup()),
    )  # fmt: skip
    """Maximal update parametrization (arXiv 2203.03466): it scales initial values and learning
    rates so that an `--lr` that was tuned on a model of this width is right for this model. The
    size of attention heads must be the same and their number grow with the width; the head must
    not be tied to the embedding. It is not available for families that scale embeddings, for gated
    delta nets and for latent attention."""
    freeze: str = pattern("Do not train tensors whose names match this regular expression")
    """It is searched in tensor names such as `embed`, `layers.0.attn.q`, `layers.0.mlp.gate`,
    `layers.0.mlp.experts.up`, `layers.0.mlp.router`, `final_norm` and `head`."""
    z_loss: float = number(
        "Coefficient of the z-loss on the output logits; 0 disables it", 0.0, least=0, group="Loss"
    )
    """The z-loss is the mean of logsumexp(logits)²; it keeps the logits from drifting. A usual
    value is 1e-4. Reported losses do not contain it."""
    balance: float = number(
        "Coefficient of the MoE load-balancing loss; 0 disables it", 0.0, least=0, group="Loss"
    )
    """The loss is computed in each row; its value is 1 if all experts have the same load. Reported
    losses do not contain it. The option is an error for a model without experts."""
    router_z: float = number(
        "Coefficient of the MoE router z-loss; 0 disables it", 0.0, least=0, group="Loss"
    )
    """The router z-loss is the mean of logsumexp(router logits)². Reported losses do not contain
    it. The option is an error for a model without experts."""
    bias_rate: float = number(
        "Update rate of MoE expert biases (e_score_correction_bias)", 0.001, least=0, group="Loss"
    )
    """After each step the bias of each expert moves by this amount towards an even load, in
    families that have such biases (`deepseek_v3`); 0 keeps the biases fixed. The option is an error
    for other models."""


class Adapters(Options, group="Adapters"):
    """Low-rank adapters (LoRA)."""

    lora_rank: int = integer(
        "Rank of LoRA adapters; only they are trained", 0, least=0, unset="no adapters"
    )
    """LoRA (arXiv 2106.09685): a product of two small matrices is added to each matrix of the
    layers, and nothing else is trained; routers and routed experts get no adapters. `final/` is the
    model with the adapters merged, `adapter/` holds the adapters in the format of the peft package.
    A model that would need rows for new tokens is refused, because these rows would not be trained:
    extend it first in a run without adapters."""
    lora_alpha: float = number(
        "LoRA alpha; adapters are scaled by alpha / rank", 0.0, least=0, unset="2 × rank",
        only=needs("lora_rank"),
    )  # fmt: skip
    lora_targets: str = pattern(
        "Adapt only matrices whose names match this regular expression", unset="all matrices",
        only=needs("lora_rank"),
    )  # fmt: skip
    """It is searched in names such as `layers.0.attn.q`; `attn.[qv]$` adapts queries and values."""


class AdapterStart(Options, group="Adapters", recorded=False):
    """What adapters are trained on top of: an adapter, and the format of the frozen matrices."""

    lora_base: str = choice(
        "Number format of the frozen matrices beside the adapters (QLoRA)", "none", "nf4", "int4",
        only=needs("lora_rank", "adapter"),
    )  # fmt: skip
    """The matrices of the layers, experts too, are held as codes of 4 bits and decoded for each
    product in the precision of the step. `nf4` is NF4 in blocks of 64 with double quantization
    (arXiv 2305.14314), 0.516 bytes per parameter; `int4` has a BF16 scale for each 64 columns.
    Embedding, head, norms and routers stay as they are; with `nf4`, matrices that `--model` has in
    NF4 keep their codes. The trained model is the decoded one with
    the adapters: `final/` is merged from it, not from the weights of `--model`, for which
    `adapter/` was not trained. Needs torch, `--precision` fp32 or bf16, and a mesh of `data`
    alone. Checkpoints have the adapters and the unquantized tensors only."""
    adapter: str = text(
        "LoRA adapter in the format of peft to start from, on top of --model", "DIR"
    )
    """Training goes on with the matrices of the adapter, which decides rank, alpha and targets; its
    modules have one rank and one scale. The starting model, which losses compare with, contains the
    adapter. An adapter that sabia trained on other weights than those of `--model` is an error."""


DISTILL = "distill"  # the loss of predictions that the records have


class DistillationOptions(Options, group="Loss", recorded=False):
    """A teacher whose predictions are learned."""

    teacher: str = text(
        "Model directory whose predictions are learned, in place of the labels", "DIR"
    )
    """The loss of a token is the divergence KL(teacher ‖ model) of their predictions of the next
    token. With `--precision qat-*` and the model before quantization as the teacher, this is
    quantization-aware distillation (arXiv 2601.20088). The teacher has the vocabulary of the model;
    every process holds it as a whole, in fp32. The metrics have the cross-entropy of the labels as
    `loss`, and the divergence as `kl`. The mesh may have the axes `data` and `fsdp`."""
    teacher_top: int = integer(
        "Number of the teacher's likeliest tokens that are compared", 0, least=0, unset="all",
        only=needs("teacher"),
    )  # fmt: skip
    """Their probabilities are divided by their sum. All tokens need memory for a float for each
    token and entry of the vocabulary."""
    teacher_share: float = quantity(
        "share", "Share of the divergence in the loss; the rest is the labels' cross-entropy", 1.0,
        only=needs("teacher"),
    )  # fmt: skip


class PrecisionOptions(Options, group="Precision"):
    """Number formats of the step, and what is recomputed in it."""

    precision: str = choice(
        "Number format of matrix products; qat-*: quantization-aware training", "fp32", "bf16",
        "fp8", "fp8-block", "nvfp4", "qat-int8", "qat-int4", "qat-nvfp4",
    )  # fmt: skip
    """Parameters and optimizer state are always in fp32; embedding, head, norms, routers and
    attention scores are never below bf16. `bf16` is the usual choice on accelerators. `fp8` is E4M3
    with gradients in E5M2 and one scale per tensor; `fp8-block` is E4M3 with one scale per tile of
    128, as DeepSeek-V3 was trained. `nvfp4` has 4 bits: E2M1 with one scale per block of 16,
    gradients rounded stochastically, and the first 2 layers and the last 15% of the layers in bf16.
    `qat-int8`, `qat-int4` and `qat-nvfp4` are quantization-aware training: bf16 with weights that
    are rounded to the format of inference. On a device without hardware for a format its values are
    emulated: the losses are those of the format, but not the speed. A note at the start tells
    which."""
    bf16_tail: bool = switch(
        "Switch to BF16 for the learning-rate decay phase",
        only=needs(schedule=("wsd", "cosine")),
    )
    """This recovers most of the loss that 4-bit training costs."""
    compile: bool = switch(
        "Compile the training step with torch.compile", recorded=False, only=needs(backend="torch")
    )
    """The mesh may then have no axis but `data`. JAX always compiles."""
    remat: str = choice(
        "Activation recomputation: none, all but matrix products, or all", "none", "matmuls",
        "full", recorded=False,
    )  # fmt: skip
    """Rematerialization (activation checkpointing) saves memory and costs time. `matmuls` keeps the
    matrix products and recomputes the rest; `full` keeps only the inputs of the layers."""


class Checkpoints(Options, group="Checkpoints", recorded=False):
    """When checkpoints are saved, how many are kept, and what is exported."""

    save_every: str = text(
        "Checkpoint interval: steps (500), a duration (10m) or auto", "INTERVAL", default="10m"
    )
    """`auto` chooses the interval that loses the least time, from the measured duration of a save
    and the mean time between failures, but never saves before the last upload has finished. A
    checkpoint is always saved after the last step."""
    keep_checkpoints: int = integer("Number of newest checkpoints to keep", 2, least=1)
    export_dtype: str = choice("Number format of the weights in final/", "float32", "bfloat16")


class Storage(Options, group="Checkpoints", recorded=False):
    """Checkpoints of long runs."""

    mtbf: float | None = quantity(
        "duration", "Mean time between failures of the run", only=needs(save_every="auto"),
        unset="50,700 h divided by the devices, at most 7 d",
    )  # fmt: skip
    keep_every: int = integer(
        "Also keep checkpoints whose step is a multiple of N", 0, least=0, unset="none"
    )
    checkpoint_url: str = text(
        "Upload checkpoints to this URL and resume from it: s3://…", "URL",
        unset="checkpoints/ in a run directory at a URL",
    )  # fmt: skip
    """Any URL that fsspec can open (`s3://`, `gs://`, `file://`). Checkpoints are uploaded in the
    background, and a run resumes from the newest valid checkpoint, local or remote. One checkpoint
    is uploaded at a time: those saved in the meantime are not uploaded, except for the last one.
    Checkpoints of another run at the URL are an error; with `--force` they are deleted."""
    grace: float | None = quantity(
        "duration", "Time from SIGTERM until the process is killed", unset="not checked"
    )
    """It changes only one thing: a warning tells when saving a checkpoint takes longer."""


LIMITED = needs(on_spike=("rewind", "stop"))


class Guards(Options, group="Guards"):
    """What is done about loss spikes and hanging processes."""

    on_spike: str = choice(
        "At a loss spike: skip its rows or rewind, stop, or do nothing (off)", "rewind", "stop",
        "off",
    )  # fmt: skip
    """A spike is a step whose loss or gradient norm is an outlier compared with the last
    `--spike-window` steps, or is not finite. The update of such a step is not applied. With
    `rewind`, if at most half of its rows are outliers, the step is repeated without them; otherwise
    training goes back to the last checkpoint and skips the outlier rows from there. Skipped rows
    are named in a warning and in `skipped.jsonl`. The run fails after `--max-rewinds` rewinds, or
    if more than `--max-skipped` of all rows are skipped. `stop` fails and names the rows of the
    step. `off` applies every finite step, and fails at others."""
    spike_sigmas: float = number(
        "Spike threshold, in robust σ (1.4826·MAD) above the median", 8.0, above=0,
        only=LIMITED,
    )  # fmt: skip
    """MAD is the median absolute deviation of the last `--spike-window` steps; σ, the robust
    standard deviation, is at least 2% of the median loss and 10 times the median gradient norm. The
    first `--spike-min-steps` steps, and as many of each stage of `--then`, are only checked for
    values that are not finite."""
    spike_window: int = integer(
        "Number of last accepted steps that a step is compared with", 64, least=2, later=True,
        only=LIMITED,
    )  # fmt: skip
    spike_min_steps: int = integer(
        "Accepted steps before spikes are detected", 32, least=2, later=True, only=LIMITED
    )
    """At most `--spike-window`."""
    row_sigmas: float = number(
        "Outlier threshold for the rows of a spike, in robust σ from the median", 8.0, above=0,
        later=True, only=needs(on_spike="rewind"),
    )  # fmt: skip
    """The mean loss of a row is compared with those of the other rows of its source."""
    max_rewinds: int = integer(
        "Rewinds to a checkpoint before the run fails", 8, least=0, later=True,
        only=needs(on_spike="rewind"),
    )  # fmt: skip
    """They are counted from the last start of the run."""
    max_skipped: float = quantity(
        "share", "Maximum fraction of all rows that may be skipped", "10%", later=True,
        only=needs(on_spike="rewind"),
    )  # fmt: skip
    hang_timeout: float = quantity(
        "duration", "Stop the run if a rank makes no progress for this long", "30m", recorded=False
    )
    """The watchdog runs if there are several processes; it ends all of them with exit status 75.
    Phases that are slow by nature, such as compilation, are given more time."""

    def check(self) -> None:
        """Limits need as many steps as the window has."""
        super().check()
        if self.spike_window < self.spike_min_steps:
            raise UsageError(
                f"--spike-window: {self.spike_window} (expected at least --spike-min-steps, "
                f"{self.spike_min_steps})"
            )


class Logging(Options, group="Logging", recorded=False):
    """Validation, metrics and profiles."""

    eval_every: int = integer("Steps between validations", 0, least=0, unset="at start and end")
    """The run always validates before the first and after the last step."""
    log_every: int = integer("Steps between rows of metrics", 1, least=1)
    profile: str = text("Write profiler traces of the steps A to B to profile/", "A:B")
    """Steps are counted from 1."""
    track: str = text("Also send metrics to these services: wandb, tensorboard", "NAME,…")
    """The packages must be installed. A slow or unavailable service does not slow the run."""
    peak_flops: float = quantity(
        "count", "Peak FLOP/s of one device (such as 989T), for the MFU", 0.0,
        unset="of the data sheet",
    )  # fmt: skip
    """The default is the dense BF16 peak of the device's data sheet; a device without one on file,
    such as a CPU, has no MFU. Without this option a matrix product is timed at the start, in
    float32 with `--precision fp32`, else in bfloat16, and gives `gemm_share`. Set the peak if
    training uses hardware for 8 or 4 bits."""


class RunOptions(Checkpoints, Storage, Guards, Logging):
    """What every training run takes, whatever it trains on."""


class Training(
    MeshOptions, Duration, Schedule, Optimizer, Adapters, PrecisionOptions, RunOptions
):  # fmt: skip
    """The options of pretrain and sft; what is recorded decides the weights."""

    def check(self) -> None:
        """A decay phase in BF16 is no change where all is in BF16."""
        super().check()
        if "bf16_tail" in self.given and self.precision == "bf16":
            raise UsageError("--bf16-tail: not together with --precision bf16")
