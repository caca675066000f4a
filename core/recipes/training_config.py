"""Configuration of a training run from the trainers' options (`core.options.training`).

A run's identity is everything that decides its weights; backend, mesh, micro-batch and how often to
save or report are not part of it, so that a run can be resumed on other hardware.
"""

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sabia.core import units
from sabia.core.errors import UsageError
from sabia.core.model.lora import LoraConfig, targeted
from sabia.core.numerics.optimizers import LIMITS, OPTIMIZERS
from sabia.core.ops.precision import precision_named
from sabia.core.options.table import Options
from sabia.core.options.training import (
    DISTILL,
    Adapters,
    AdapterStart,
    DistillationOptions,
    Optimizer,
    RunOptions,
    Schedule,
    Training,
)
from sabia.core.parallel.mesh import parse_mesh
from sabia.core.shards.order import DataOrder, Stage, parse_weights
from sabia.core.spec import ModelSpec, load_spec
from sabia.core.train.checkpoint.saver import parse_interval
from sabia.core.train.guards import GuardConfig
from sabia.core.train.losses.next_token import Distillation
from sabia.core.train.optimizer.config import OptimizerConfig, ScheduleConfig, decay_start
from sabia.core.train.stepper import bias_names
from sabia.core.train.token_rows import TokenRows

if TYPE_CHECKING:
    from sabia.core.train.teacher import Teacher


def identity(options: Training) -> dict[str, object]:
    """The options that decide the weights, including those without effect in this run.

    An option that runs of earlier versions did not record is left out if it has its default.
    """
    values: dict[str, Any] = {}
    defaults = OPTIMIZERS[options.optimizer].settings
    for name, option in Training.table.items():
        value = getattr(options, name)
        is_default = value in (option.default_value(), defaults.get(name))
        if option.recorded and not (option.later and is_default):
            values[name] = value
    return values | simulation(options.precision)


def simulation(precision: str) -> dict[str, object]:
    """What identities of quantization-aware training have besides: the version of its rounding."""
    return {"qat": 2} if precision_named(precision).qat else {}


def _distils(options: object) -> bool:
    """Whether the loss compares with predictions that the records have."""
    return getattr(options, "loss", "") == DISTILL


def teacher_identity(options: DistillationOptions) -> dict[str, object]:
    """The entries of a run's identity; {} without a teacher."""
    if _distils(options):
        return {"loss": DISTILL, "teacher_share": options.teacher_share}
    if not options.teacher:
        return {}
    from sabia.core.generate.model_directory import weights_fingerprint

    return {
        "teacher": weights_fingerprint(options.teacher),
        "teacher_top": options.teacher_top,
        "teacher_share": options.teacher_share,
    }


def distillation(options: Any) -> Distillation | None:
    """The settings of the loss; None without a teacher."""
    if _distils(options):
        return Distillation(options.teacher_share)
    if not getattr(options, "teacher", ""):
        return None
    return Distillation(options.teacher_share, options.teacher_top)


def check_teacher(options: DistillationOptions, spec: ModelSpec, length: int, mesh: str) -> None:
    """Raise UsageError for a teacher that does not fit the model, its rows or the mesh."""
    distils = _distils(options)
    axes = [axis for axis, n in parse_mesh(mesh).items() if n > 1 and axis not in ("data", "fsdp")]
    if axes and (distils or options.teacher):
        flag = "--loss: distill" if distils else "--teacher:"
        raise UsageError(f"{flag} with the mesh axis {axes[0]} (expected data and fsdp only)")
    if not options.teacher:
        return
    other = load_spec(options.teacher)
    if other.vocab_size != spec.vocab_size:
        raise UsageError(
            f"--teacher: {options.teacher} has a vocabulary of {other.vocab_size:,} (expected the "
            f"model's, {spec.vocab_size:,})"
        )
    if other.max_positions < length:
        raise UsageError(
            f"--teacher: {options.teacher} has a context of {other.max_positions:,} (expected at "
            f"least the rows' length of {length:,})"
        )


def load_teacher(options: DistillationOptions, backend: str) -> "Teacher":
    """The teacher of a run. Raises what `hub.load_model` raises."""
    from sabia.core.model.storage import hub
    from sabia.core.train.teacher import Teacher

    spec, params = hub.load_model(options.teacher)
    return Teacher(spec, params, backend, options.teacher_top)


def check_texts(options: Training) -> None:
    """Parse options that are needed late, so that an error is reported before the data is read.

    Raises UsageError, and MissingBackend for a service whose package is missing.
    """
    optimizer_config(options)
    check_run_texts(options)
    if "stage_micro_batches" in options.given and parse_mesh(options.mesh).get("pipe", 1) == 1:
        raise UsageError("--stage-micro-batches: only with the mesh axis pipe, such as pipe=2")


def check_run_texts(options: RunOptions) -> None:
    """The part of `check_texts` that every training run needs."""
    parse_interval(options.save_every)
    if options.profile:
        from sabia.core.train.profiling import parse_steps

        parse_steps(options.profile)
    if options.track:
        from sabia.core.train.tracking import parse_services

        parse_services(options.track)


def optimizer_settings(options: Options) -> dict[str, object]:
    """Setting → value of the given options of the optimizer. Raises UsageError."""
    values = options.values()
    settings = {name: values.get(name) for name in LIMITS}
    if betas := values["betas"]:
        try:
            settings["beta1"], settings["beta2"] = (float(part) for part in betas.split(","))
        except ValueError:
            raise UsageError(f"--betas: {betas!r} (expected such as 0.9,0.95)") from None
    return {name: value for name, value in settings.items() if value is not None}


def guard_config(options: RunOptions) -> GuardConfig:
    """The definition of a loss spike, and what to do about it."""
    return GuardConfig(
        options.on_spike,
        options.spike_sigmas,
        window=options.spike_window,
        min_steps=options.spike_min_steps,
        row_sigmas=options.row_sigmas,
        rewinds=options.max_rewinds,
        max_skipped_share=options.max_skipped,
    )


def optimizer_config(options: Optimizer, spec: ModelSpec | None = None) -> OptimizerConfig:
    """The optimizer's settings; for a model with the learning-rate scales of μP."""
    config = OptimizerConfig(
        options.optimizer,
        options.weight_decay,
        options.clip_norm,
        optimizer_settings(options),
        freeze=options.freeze,
    )
    if spec is None or not options.mup_base:
        return config
    from sabia.core.train.optimizer.mup import mup

    return replace(config, lr_scales=mup(spec, options.mup_base, config).lr_scales)


def initial_stds(options: Training, spec: ModelSpec) -> Mapping[str, float]:
    """Standard deviations of a new model's initial values if μP sets them; else {}."""
    if not options.mup_base:
        return {}
    from sabia.core.train.optimizer.mup import mup

    return mup(spec, options.mup_base, optimizer_config(options)).stds


def lora_config(options: Adapters) -> LoraConfig | None:
    """The adapters, None where the model itself is trained."""
    if not options.lora_rank:
        return None
    alpha = options.lora_alpha or 2.0 * options.lora_rank
    base = getattr(options, "lora_base", "none").replace("none", "")
    return LoraConfig(options.lora_rank, alpha, options.lora_targets, base)


def with_adapter(options: Any) -> Any:
    """The options with the rank, alpha and targets of --adapter, if there is one.

    Raises UsageError where other ones are given, and where the adapter is of another model.
    """
    if not options.adapter:
        return options
    from sabia.core.generate.model_directory import weights_fingerprint
    from sabia.core.model.storage.peft_adapters import base_fingerprint, start_adapter

    spec = load_spec(options.model)
    config, _ = start_adapter(options.adapter, spec)
    base = base_fingerprint(options.adapter)
    if base and base != weights_fingerprint(options.model):
        raise UsageError(
            f"--adapter: {options.adapter} was trained on other weights than those of "
            f"{options.model} (expected its own model as --model)"
        )
    for name, own in (("lora_rank", config.rank), ("lora_alpha", config.alpha)):
        if getattr(options, name) not in (0, own):
            raise _other(name, options, own)
    given = replace(config, targets=options.lora_targets)
    if options.lora_targets and targeted(spec, given) != targeted(spec, config):
        raise _other("lora_targets", options, config.targets)
    return options.replace(
        lora_rank=config.rank, lora_alpha=config.alpha, lora_targets=config.targets
    )


def _other(name: str, options: Any, expected: object) -> UsageError:
    flag, value = options.table[name].flag, getattr(options, name)
    return UsageError(f"{flag}: {value} (expected that of {options.adapter}: {expected})")


def adapter_identity(options: AdapterStart) -> dict[str, object]:
    """The entries of a run's identity; {} without an adapter to start from, or a base."""
    made: dict[str, object] = {}
    if options.adapter:
        from sabia.core.generate.model_directory import adapter_fingerprint

        made["adapters"] = adapter_fingerprint(options.adapter)
    return made | ({"lora_base": options.lora_base} if options.lora_base != "none" else {})


def start_params(
    options: Any, spec: ModelSpec, params: Mapping[str, np.ndarray]
) -> Mapping[str, np.ndarray]:
    """The parameters of a model, with those of the adapter that training starts from."""
    if not getattr(options, "adapter", ""):
        return params
    from sabia.core.model.storage.peft_adapters import start_adapter

    layers: list[Any] = [start_adapter(options.adapter, spec)[1], params]
    return ChainMap(*layers)


def check_experts(options: Training, spec: ModelSpec) -> None:
    """Raise UsageError for options of experts that the model does not have."""
    corrections = bias_names(spec)
    lacks = "the model has no {} (expected a model with them)"
    if not corrections:
        options.refuse(("balance", "router_z"), lacks.format("experts"))
    if not any(corrections):
        options.refuse(("bias_rate",), lacks.format("expert biases"))


def batch_rows(options: Training, row_length: int) -> int:
    """Rows per step."""
    if options.batch_tokens:
        return max(1, round(options.batch_tokens / row_length))
    return options.batch or 32


def step_count(options: Training, rows: int, row_length: int, batch: int) -> int:
    """Steps of the whole run; one epoch by default."""
    if options.steps:
        return options.steps
    if options.tokens:
        return max(1, math.ceil(options.tokens / (batch * row_length)))
    return max(1, math.ceil((options.epochs or 1.0) * rows / batch))


def schedule_config(options: Schedule, steps: int) -> ScheduleConfig:
    """The schedule of a run of `steps`."""
    return ScheduleConfig(
        peak=options.lr,
        steps=steps,
        warmup=parse_part("--warmup", options.warmup, steps),
        kind=options.schedule,
        decay=parse_part("--decay", options.decay, steps) if options.schedule == "wsd" else 0,
        tail=options.decay_shape,
        final=options.final_lr,
    )


def parse_part(flag: str, text: str, steps: int) -> int:
    """Steps of '20%' or '100'. Raises UsageError."""
    if text.isdigit():
        return int(text)
    if text.endswith("%"):
        return round(units.parse_fraction(text, flag) * steps)
    raise UsageError(f"{flag}: {text!r} (expected steps such as 100, or a share such as 2%)")


def data_order(
    rows: TokenRows, mix: str, stages: str, seed: int, batch: int, schedule: ScheduleConfig
) -> DataOrder:
    """The data order of a run: `mix` from the start, `stages` from later steps on.

    stages: 'WHEN:SOURCE=WEIGHT,…' joined by ';', WHEN being steps, a share of them, or `decay`.
    """
    weights = parse_weights(mix, rows.source_names)
    parsed = []
    for text in filter(None, (piece.strip() for piece in stages.split(";"))):
        when, colon, then = text.partition(":")
        if not colon or not then:
            raise UsageError(f"--then: {text!r} (expected WHEN:SOURCE=WEIGHT,…)")
        share = partial(parse_part, "--then", when, schedule.steps)
        step = decay_start(schedule) if when == "decay" else share()
        parsed.append(Stage(step * batch, parse_weights(then, rows.source_names, "--then") or ()))
    return DataOrder(rows.source_sizes, seed, weights, tuple(parsed))
