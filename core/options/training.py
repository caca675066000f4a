"""Options of the trainers, in groups: how long, optimizer, precision, adapters, checkpoints,
guards, logging. `pretrain` and `sft` take all of them, `grpo` and `classify train` some."""

from sabia.core.errors import UsageError
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
        "Steps to train", 0, least=0, excludes=("tokens", "epochs"), unset="one epoch"
    )
    tokens: int = quantity(
        "whole", "Tokens to train on", 0, excludes=("epochs",), unset="one epoch"
    )
    """Padding is counted."""
    epochs: float = number("Passes over the rows", 0.0, least=0, unset="1")
    batch: int = integer(
        "Rows in a step, over all devices", 0, least=0, excludes=("batch_tokens",), unset="32"
    )
    """It must be a multiple of the product of the mesh axes `data`, `fsdp` and `expert`."""
    batch_tokens: int = quantity("whole", "Tokens in a step", 0, unset="32 rows")
    micro_batch: int = integer(
        "Rows at a time on a device", 0, least=0, unset="all", recorded=False, group="Parallelism"
    )
    """Fewer rows at a time save memory. With the mesh axis `pipe` the default makes four
    micro-batches for each stage. The update is the same: sums are divided once, by the weight of
    the whole batch."""


class Schedule(Options, group="Optimizer"):
    """The learning rate over the steps."""

    lr: float = number("Peak learning rate", 6e-4, above=0, common=True)
    schedule: str = choice("Learning-rate schedule", "wsd", "cosine", "constant")
    """`wsd` is warm-up, a constant rate, and a decay; `cosine` is warm-up and then half a cosine;
    `constant` is warm-up only."""
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
    """`muon` updates the matrices inside the layers and AdamW the rest; its updates are scaled to
    the size of AdamW's, so that one learning rate serves both. `lion` keeps half of AdamW's state
    and needs a learning rate several times lower. `adafactor` keeps the least state: row and column
    means of squared gradients. `soap` is Adam in the eigenbases of each matrix's gradients, with
    AdamW for the rest; it keeps the most state."""
    weight_decay: float = number("Weight decay of matrices", 0.1, least=0)
    """The decay is decoupled from the gradient. Norms and biases do not decay."""
    betas: str = text(
        "The optimizer's betas", "B1,B2", unset="by optimizer",
        only=needs(optimizer=("adamw", "muon", "lion", "soap")),
    )  # fmt: skip
    """The default is `0.9,0.95`; `0.95,0.98` for `lion` and `0.95,0.95` for `soap`."""
    clip_norm: float = number("Maximum gradient norm; 0: no clipping", 1.0, least=0)
    """Gradients with a larger global norm are scaled down to it."""
    mup_base: int = integer(
        "μP: the width at which --lr was tuned", 0, least=0, unset="off",
        only=needs(optimizer=("adamw", "muon", "lion", "adafactor")),
    )  # fmt: skip
    """Maximal update parametrization (arXiv 2203.03466): initial values and learning rates by which
    an `--lr` that was tuned on a model of this width suits the width at hand. Heads keep their size
    and grow in number; the head must not be tied to the embedding. It is not available for families
    that scale embeddings, for gated delta nets and for latent attention."""
    freeze: str = pattern("Freeze tensors whose names match")
    """The regular expression is searched in tensor names such as `embed`, `layers.0.attn.q`,
    `layers.0.mlp.gate`, `layers.0.mlp.experts.up`, `layers.0.mlp.router`, `final_norm` and
    `head`."""
    z_loss: float = number(
        "Coefficient of the z-loss, logsumexp² of the logits", 0.0, least=0, group="Loss"
    )
    """It keeps the logits from drifting; 1e-4 is usual. Reported losses do not contain it."""
    balance: float = number(
        "Coefficient of the experts' load-balancing loss", 0.0, least=0, group="Loss"
    )
    """The loss is computed in each row and is 1 when the load is even. Reported losses do not
    contain it. A model without experts refuses the option."""
    router_z: float = number("Coefficient of the router z-loss", 0.0, least=0, group="Loss")
    """The router z-loss is the squared logsumexp of the routers' scores. Reported losses do not
    contain it. A model without experts refuses the option."""
    bias_rate: float = number("Update rate of expert biases", 0.001, least=0, group="Loss")
    """This is not a loss: it is how far the balancing bias of an expert moves after each step, in
    families that have such biases (`deepseek_v3`); 0 leaves them as they are. Other models refuse
    the option."""


class Adapters(Options, group="Adapters"):
    """Low-rank adapters (LoRA)."""

    lora_rank: int = integer(
        "Train adapters of this rank only", 0, least=0, unset="the model itself"
    )
    """LoRA (arXiv 2106.09685): small matrices beside the matrices of the layers are trained, and
    nothing else; routers and stacked experts get none. `final/` is the model with the adapters
    merged, `adapter/` holds the adapters in the form of the peft package. A model that would grow
    by new tokens is refused, because their rows would not be learnt: train it without adapters
    first."""
    lora_alpha: float = number(
        "Scale of adapters, times 1/rank", 0.0, least=0, unset="2 × rank", only=needs("lora_rank")
    )
    lora_targets: str = pattern(
        "Adapt matrices whose names match", unset="all matrices", only=needs("lora_rank")
    )
    """The regular expression is searched in names of matrices, such as `attn.[qv]$`."""


class PrecisionOptions(Options, group="Precision"):
    """Number formats of the step, and what is recomputed in it."""

    precision: str = choice(
        "Precision of products", "fp32", "bf16", "fp8", "fp8-block", "nvfp4", "qat-int8",
        "qat-int4", "qat-nvfp4",
    )  # fmt: skip
    """Parameters and optimizer state are in fp32 in all of them; embedding, head, norms, routers
    and attention scores are never below bf16. `bf16` is the usual choice on accelerators. `fp8` is
    E4M3 with gradients in E5M2 and a scale for each tensor; `fp8-block` is E4M3 with scales for
    tiles of 128, as DeepSeek-V3 was trained. `nvfp4` is 4 bits: E2M1 with scales for blocks of 16,
    gradients rounded stochastically, the first 2 layers and the last 15% of the layers in bf16.
    `qat-int8`, `qat-int4` and `qat-nvfp4` are bf16 whose weights pass through the format in which
    they will be served. Where a device has no units for a format its values are emulated: the
    losses are those of the format, the speed is not. A note at the start says so."""
    bf16_tail: bool = switch(
        "Switch to BF16 for the learning-rate decay phase",
        only=needs(schedule=("wsd", "cosine")),
    )
    """This gives back most of the loss that 4 bits cost."""
    compile: bool = switch(
        "Use torch.compile for the step", recorded=False, only=needs(backend="torch")
    )
    """It is available on meshes of `data` only. JAX always compiles."""
    remat: str = choice(
        "Activations to recompute (rematerialize)", "none", "matmuls", "full", recorded=False
    )
    """`matmuls` keeps the products of matrices and recomputes the rest for the gradient; `full`
    keeps only the inputs of the layers."""


class Checkpoints(Options, group="Checkpoints"):
    """When checkpoints are saved, how many are kept, and what is exported."""

    save_every: str = text(
        "Steps, a duration, or auto: 500, 10m", "INTERVAL", default="10m", recorded=False
    )
    """`auto` chooses the interval that loses the least time, from the measured time of a save and
    the mean time between failures, but never saves before the last upload has finished. The last
    step always saves."""
    keep_checkpoints: int = integer("Checkpoints to keep", 2, least=1, recorded=False)
    export_dtype: str = choice("Number format of final/", "float32", "bfloat16", recorded=False)


class Storage(Options, group="Checkpoints"):
    """Checkpoints of long runs."""

    mtbf: float | None = quantity(
        "duration", "Mean time between failures of the run", only=needs(save_every="auto"),
        recorded=False, unset="50,700 h divided by the devices, at most 7 d",
    )  # fmt: skip
    keep_every: int = integer(
        "Keep the checkpoints of every N-th step for good", 0, least=0, recorded=False,
        unset="none",
    )  # fmt: skip
    checkpoint_url: str = text(
        "Upload checkpoints to, and resume from: s3://…", "URL", recorded=False
    )
    """Any URL that fsspec knows (`s3://`, `gs://`, `file://`). Checkpoints are uploaded while
    training goes on, and a run resumes from the newest good one, here or there. While an upload is
    under way others are skipped; the last one is always uploaded. Checkpoints of another run there
    are refused; with `--force` they are removed."""
    grace: float | None = quantity(
        "duration", "Time from SIGTERM to the end; warns when saves take longer", recorded=False
    )


class Guards(Options, group="Guards"):
    """What is done about loss spikes and hanging processes."""

    on_spike: str = choice("Action at a loss spike", "rewind", "stop", "off")
    """A spike is a step whose loss or gradient norm is an outlier among the last 64 steps, or is
    not a number. Such a step is never taken. With `rewind`, where at most half of its rows are
    outliers, these rows are left out and the run goes on; otherwise it goes back to the last
    checkpoint and on without the rows that are outliers there. Rows that are left out are named in
    a warning and in `skipped.jsonl`. The run fails after 8 rewinds, or when a tenth of all rows is
    left out. `stop` fails and names the rows of the step. `off` takes any step that is finite, and
    fails at others."""
    spike_sigmas: float = number(
        "Spike threshold, in robust standard deviations above the median", 8.0, above=0,
        only=needs(on_spike=("rewind", "stop")),
    )  # fmt: skip
    """Nothing is judged before 32 steps, nor before 32 steps of a new stage of `--then`, except for
    what is not finite."""
    hang_timeout: float = quantity(
        "duration", "Treat a rank as hung after this long without progress", "30m", recorded=False
    )
    """It applies to runs of several processes; the whole run ends then. Pauses such as compiling
    are given more time."""


class Logging(Options, group="Logging"):
    """Validation, metrics and profiles."""

    eval_every: int = integer(
        "Steps between validations", 0, least=0, unset="at start and end", recorded=False
    )
    """The first and the last step always validate."""
    log_every: int = integer("Steps between rows of metrics", 1, least=1, recorded=False)
    profile: str = text("Trace steps A to B into the run directory", "A:B", recorded=False)
    """The traces are written into `profile/`."""
    track: str = text("Also log to wandb or tensorboard", "NAME,…", recorded=False)
    """The packages must be installed. A service that is slow or down costs the run nothing."""
    peak_flops: float = quantity(
        "count", "Peak FLOP/s of a device for MFU", 0.0, unset="measured", recorded=False
    )
    """By default a short matrix product is timed: in float32 with `--precision fp32`, else in
    bfloat16; so give the peak where units of 8 and 4 bits are used."""


class Training(
    MeshOptions,
    Duration,
    Schedule,
    Optimizer,
    Adapters,
    PrecisionOptions,
    Checkpoints,
    Storage,
    Guards,
    Logging,
):
    """The options of pretrain and sft; what is recorded decides the weights."""

    def check(self) -> None:
        """A decay phase in BF16 is no change where all is in BF16."""
        super().check()
        if "bf16_tail" in self.given and self.precision == "bf16":
            raise UsageError("--bf16-tail: not together with --precision bf16")
