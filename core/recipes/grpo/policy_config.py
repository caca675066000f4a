"""Configuration of a GRPO run from its options, and the part of them that is its identity.

Server addresses, caps, micro-batches and how often to save may change when a run is resumed; all
other options decide the weights.
"""

from dataclasses import replace

from sabia.core.generate.model_directory import weights_fingerprint
from sabia.core.judge.opened_judges import judges_identity
from sabia.core.judge.rewards import MODEL, parse_reward
from sabia.core.options.grpo import GrpoOptions, PolicyLoss, ValueOptions
from sabia.core.options.shared import NGRAM
from sabia.core.options.training import Adapters, Guards, Optimizer
from sabia.core.recipes import training_config
from sabia.core.train.losses.value import BIAS, WEIGHT
from sabia.core.train.optimizer.config import OptimizerConfig, ScheduleConfig

# option → its name in the record of a run's judge
JUDGE = {
    "judge_model": "model", "judge_votes": "votes", "judge_items_per_call": "items_per_call",
    "judge_format": "reply_format", "judge_tokens": "reply_tokens",
}  # fmt: skip

# options that earlier versions did not have
LATER = ("exact", "reward_model", "teacher", "teacher_weight", "overlong_buffer", "refill",
         "surrogate",
         "sequence_mask", "draft", "draft_tokens", "curriculum",
         "thinking_budget", "thinking_overflow", "step_delimiter", "routing_replay")  # fmt: skip

# mean |log-probability of the trainer - that of the sampler| of a step, by --precision
MAX_GAP = {"fp32": 1e-3, "bf16": 0.05}
MAX_GAP_EMULATED = 0.25  # the sampler computes in bf16, the trainer in fewer bits
# share of the experts of the sampler that the trainer's routers would not choose, likewise
MAX_MISMATCH = {"fp32": 0.05, "bf16": 0.25}
MAX_MISMATCH_EMULATED = 0.5


def max_gap(options: GrpoOptions) -> float:
    """The bound of `logprob_gap`: --max-logprob-gap, by default that of the precision."""
    if options.max_logprob_gap is not None:
        return options.max_logprob_gap
    return MAX_GAP.get(options.precision, MAX_GAP_EMULATED)


def max_mismatch(options: GrpoOptions) -> float:
    """The bound of `routing_mismatch`."""
    return MAX_MISMATCH.get(options.precision, MAX_MISMATCH_EMULATED)


def reward_weights(options: GrpoOptions) -> dict[str, float]:
    """The kinds of the reward with their weights; {} for `none`. Raises UsageError."""
    return {} if options.reward == "none" else parse_reward(options.reward, (MODEL,))


def optimizer_config(options: GrpoOptions, width: int = 1) -> OptimizerConfig:
    """The optimizer and its settings, for a model of `width`. Raises UsageError."""
    config = training_config.optimizer_config(options)
    if options.advantage != "gae":
        return config
    # a step of each weight changes a value by Σ |h| together, about the width of the state h: a
    # bias that is slower leaves the mean return to the weights, which then learn little else
    scales = {WEIGHT: options.value_lr, BIAS: options.value_lr * width}
    return replace(config, lr_scales=scales)


def schedule_config(options: GrpoOptions) -> ScheduleConfig:
    """The schedule of the learning rate; a warm-up longer than the run ends with it."""
    warmup = min(_warmup(options), options.steps)
    return training_config.schedule_config(options.replace(warmup=str(warmup)), options.steps)


def _warmup(options: GrpoOptions) -> int:
    return training_config.parse_part("--warmup", options.warmup, options.steps)


def check_texts(options: GrpoOptions) -> None:
    """Parse options that are needed late, before the data is read. Raises UsageError."""
    schedule_config(options)
    optimizer_config(options)
    training_config.check_run_texts(options)


def identity(options: GrpoOptions) -> dict[str, object]:
    """The options that decide the weights; the model is identified by its content."""
    recorded = (name for name, option in options.table.items() if option.recorded)
    values = {name: getattr(options, name) for name in recorded}
    for name in (*Adapters.table, *Guards.table, *ValueOptions.table, *LATER):
        # absent at their defaults, so that runs of versions without these options can be resumed
        if name in values and values[name] == options.table[name].default_value():
            del values[name]
    for name in ("reward_model", "teacher", "draft"):
        if (path := getattr(options, name)) and path != NGRAM:
            from_server = name == "teacher" and options.teacher_is_served
            flag = options.table[name].flag
            values[name] = "served" if from_server else weights_fingerprint(path, flag)
    in_loss = (name for name in PolicyLoss.table if name != "updates" and name in values)
    loss = {name: values.pop(name) for name in in_loss}
    judge = {key: values.pop(name) for name, key in JUDGE.items()}
    combine = values.pop("judge_combine")
    if options.judge:
        judge["model"] = judges_identity(options)
        judge["combine"] = combine
    for name in ("model", "chat", *(name for name in Optimizer.table if name in values)):
        del values[name]
    values["warmup"], values["decay"] = _warmup(options), schedule_config(options).decay
    advantage = values.pop("advantage")
    values["std"] = advantage == "std"
    values |= {"advantage": "gae"} if advantage == "gae" else {}
    added = {"kl_times_ratio": options.kl_times_ratio, "correction_cap": options.correction_cap}
    values["loss"] = loss | added
    values["optimizer"] = optimizer_config(options).record()
    values |= training_config.simulation(options.precision)
    return values | ({"judge": judge} if options.judge_url or options.judge else {})
