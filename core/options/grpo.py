"""Options of `sabia grpo`."""

import re

from sabia.core.errors import UsageError
from sabia.core.options.chat_template import ChatTemplate, Reasoning
from sabia.core.options.model_calls import JUDGED, JudgeOptions
from sabia.core.options.option import (
    MORE_THAN_ONE,
    changed,
    choice,
    integer,
    needs,
    number,
    pattern,
    quantity,
    switch,
    text,
)
from sabia.core.options.shared import Drafting, Trainer
from sabia.core.options.table import Options
from sabia.core.options.training import (
    Adapters,
    AdapterStart,
    Guards,
    Logging,
    Optimizer,
    PrecisionOptions,
    RunOptions,
    Schedule,
)

LIMITED = needs(on_spike=("skip", "stop"))
OFF_POLICY = needs(updates=MORE_THAN_ONE)  # the ratio is 1 in the first update of a step


class Reward(Options, group="Reward"):
    """How a sample is graded."""

    reward: str = text(
        "Reward: a verifier or rubric, or a weighted mix: number=0.8,regex=0.2",
        "KIND[=WEIGHT],…", default="exact", common=True,
    )  # fmt: skip
    """A verifier compares a sample with the record's `answer` and gives 0 or 1. `exact`: the texts
    are equal, except for white space. `number`: the last number of the sample has the answer's
    value. `math`: the final answer of the sample, in \\boxed{}, after ####, in the last formula or
    in the last line, equals the record's answer in any notation; SymPy compares expressions, sets,
    intervals, matrices and equations. `contains`: the sample contains the answer, ignoring case.
    `regex`: the answer, a regular expression, matches in the sample. `choice`: the last single
    capital letter of the sample is the answer's. `json`: the sample is JSON and contains the
    answer's keys and values. `code`: the last Python code block of the sample passes the tests in
    the answer: Python with asserts, a JSON list of these, or a JSON object with the keys of
    HumanEval or MBPP. Programs run without network and files, with 3 s of CPU time and 512 MiB of
    memory, beyond which they fail; where the system permits no isolation, `code` is refused.
    `regex` and `math` give no reward past their limits of time (1 and 5 s of CPU time). `rubric`
    grades by the record's `rubric` instead: the reward is the fraction of its weight that is met.
    `model` is the score of `--reward-model`, any number. A mix is the weighted mean. `none` grades
    nothing, where a `--teacher` is all that trains."""
    reward_model: str = text(
        "Directory of a reward model, for --reward model", "DIR", later=True,
    )  # fmt: skip
    """`sabia sft --loss reward` trains one. Prompt and sample are rendered with its own chat
    template. Samples longer than its context have no reward."""
    step_delimiter: str = pattern(
        "Reward each step of a sample; a step ends behind a match of this regular expression",
        later=True, unset="rewards of whole samples",
    )  # fmt: skip
    """Process supervision (arXiv 2402.03300, section 4.1.3): `\\n\\n` cuts a sample at blank lines,
    `\\n` at line ends. The reward of a step is that of the sample up to its end, so that a judge or
    a reward model is asked once for each step. The advantage of a token is the sum of the rewards
    of its own and of the later steps, less the mean of those of the group's steps; with
    `--advantage gae` each reward is that of the token in which its step ends. The metrics show
    the rewards of whole samples. A sample with a step that could not be graded has no reward."""
    max_null: float = quantity(
        "share", "Maximum fraction of samples without a reward", "20%", recorded=False
    )
    """A sample has no reward if the judge failed or a verifier passed its limit. The run stops with
    exit status 1 when more of the last 200 samples have none."""


class Rollouts(Drafting, Reasoning, group="Rollouts"):
    """What is sampled in a step."""

    steps: int = integer("Number of training steps", 100, least=1, common=True)
    """A step samples one rollout batch and trains on it with `--updates` updates."""
    prompts: int = integer("Prompts per step, summed over all processes", 32, least=1)
    group: int = integer("Samples per prompt (group size)", 16, least=1)
    """The advantage of a sample is relative to its group, but with `--advantage gae`; the others
    need 2."""
    max_new_tokens: int = integer("Maximum tokens of a sample", 256, least=1, common=True)
    thinking_budget: int | None = changed(Reasoning.thinking_budget, group="Rollouts")
    thinking_overflow: str = changed(Reasoning.thinking_overflow, group="Rollouts")
    draft: str = changed(Drafting.draft, group="Rollouts")
    draft_tokens: int = changed(Drafting.draft_tokens, group="Rollouts")
    overlong: str = choice("Truncated samples: keep them in the loss, or mask them", "keep", "mask")
    """These are samples that reach `--max-new-tokens`. Their rewards count in the group's mean in
    both cases."""
    overlong_buffer: int = integer(
        "Last tokens of --max-new-tokens in which a sample loses reward", 0, least=0, later=True,
        unset="none",
    )  # fmt: skip
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13): the reward falls
    linearly, by 1 for a sample that reaches `--max-new-tokens`. Metrics show rewards without it."""
    refill: int = integer(
        "Times that prompts are drawn again for groups without an advantage", 0, least=0,
        later=True, unset="none",
    )  # fmt: skip
    """Groups whose rewards are all equal do not train. Each gives way to a group of another prompt,
    at most so many times a step (dynamic sampling, arXiv 2503.14476). All groups count in the
    metrics."""


class ExactSampling(Options, group="Rollouts"):
    """Whether sampler and trainer agree to the last bit."""

    exact: bool = switch(
        "Train on exactly the distribution that is sampled, to the last bit", later=True,
        only=(needs(backend="torch"), needs(precision=("fp32", "bf16"))),
        excludes=("sampler_url", "compile"),
    )  # fmt: skip
    """Sampler and trainer compute each token by the same operations, whose results do not depend on
    the other rows of a batch, so that their log-probabilities are equal, every importance ratio is
    1 in the first update of a step, and `logprob_gap_max` is 0; otherwise the run stops with exit
    status 1. On a CPU, with meshes of `data` and `fsdp`, for models of plain attention and experts:
    not for gated delta nets, latent attention, sinks and capped scores of attention. Adapters are
    not merged for sampling."""


class RoutingReplay(Options, group="Rollouts"):
    """Whether the trainer of a model with experts sends tokens where the sampler sent them."""

    routing_replay: bool = switch(
        "Train with the experts that the sampler chose for each token", later=True
    )
    """Rollout routing replay (R3, arXiv 2510.11370), for models with experts. The experts of all
    tokens of prompt and sample, in each layer, are kept with the samples; the trainer computes with
    them and takes their gates from its own router, which gets gradients. The reference of `--beta`
    and a `--teacher` choose their own. The metrics have `routing_mismatch`, the share of choices
    that the trainer's router would not have made in the first update of a step, and
    `routing_mismatch_by_layer`; the run stops with exit status 1 where the share is above 5% with
    `--precision fp32`, 25% with `bf16`, else 50%: the sampler has other experts then. `sabia serve`
    gives the experts too; with a server that does not, a note says so, and each token goes where
    the trainer's router sends it."""


class Curriculum(Options, group="Rollouts"):
    """Which prompts are drawn."""

    curriculum: float = quantity(
        "share", "How often prompts are drawn that were solved always or never", 1.0, later=True,
        unset="as often as others",
    )  # fmt: skip
    """A prompt whose last group had equal rewards is drawn with this share of the frequency of the
    others, such as 25%; its place goes to another prompt. The decision is a function of `--seed`,
    the step and the rewards so far, which checkpoints contain, so that a resumed run draws the same
    prompts."""


class ServedSampler(Options, group="Rollouts", recorded=False):
    """A server that draws the samples."""

    sampler_url: str = text(
        "URL of a server that draws the samples, up to /v1", "URL", excludes=("draft",)
    )
    """Before each step the server gets the weights of the policy, adapters merged. It must return
    token ids, their log-probabilities and the version of the weights; the trainer scores some
    samples of each step before it uses any, and stops where the server samples at another
    temperature or from other weights. A server that does not answer is waited for 10 minutes; then
    the run exits with status 75. The environment variable `SABIA_API_KEY` has the server's token.

    The server may be `sabia serve` with the model and `--updates`, which may serve several
    processes; vLLM, started with `VLLM_SERVER_DEV_MODE=1` and `--logprobs-mode
    processed_logprobs`; or SGLang, whose samples no seed decides. The thinking budget and
    `--routing-replay` need `sabia serve`."""
    sampler_folder: str = text(
        "Folder through which the server gets weights", "DIR",
        only=needs("sampler_url"),
    )  # fmt: skip
    """It is shared by all machines: that of `sabia serve --updates`, or for vLLM and SGLang any
    that has the same path there. Weights are removed from it when they are loaded."""


class OnPolicyTeacher(Options, group="Loss"):
    """A teacher that scores the samples of the policy."""

    teacher: str = text(
        "Model directory, or URL of a server up to /v1, that scores the samples' tokens",
        "DIR|URL", later=True,
    )  # fmt: skip
    """On-policy distillation: the advantage of each token is `--teacher-weight` times log p of the
    teacher minus log p of the policy, the reverse KL divergence of the sampled tokens, and is added
    to that of the reward. With `--reward none` it is alone. The teacher has the tokenizer of the
    policy; every process holds it as a whole, in fp32. The metrics have the divergence as
    `teacher_kl`. A server gets token ids and must return the log-probabilities of prompts (`echo`),
    as `sabia serve` does; one request asks for tokens from all over the vocabulary, and a server
    with another tokenizer, or without log-probabilities, is refused. They are those at a
    temperature of 1. One that does not answer is waited for as with `--sampler-url`. A run that is
    resumed may have another address, but needs the same teacher."""
    teacher_weight: float = number(
        "Weight of the teacher in the advantage", 1.0, above=0, later=True, only=needs("teacher")
    )

    @property
    def teacher_is_served(self) -> bool:
        """Whether the teacher is a server."""
        return self.teacher.startswith(("http://", "https://"))


class PolicyLoss(Options, group="Loss"):
    """How the policy loss is formed; the defaults are DAPO's clip and token sum, without KL."""

    updates: int = integer("Mini-batch updates per rollout batch", 1, least=1)
    """Each update trains on an equal part of the samples, in the order of their prompts, whatever
    the mesh, the backend and `--micro-tokens`. With a single update the importance ratio is 1, so
    clipping has no effect."""
    aggregation: str = choice(
        "Token losses: mean over tokens, mean of samples' means, or Dr. GRPO", "token", "seq-mean",
        "dr",
    )  # fmt: skip
    """`token` is the mean over all tokens of the step; `seq-mean` the mean of the samples' means;
    `dr` (Dr. GRPO, arXiv 2503.20783) the sum divided by samples times `--max-new-tokens`."""
    surrogate: str = choice(
        "How the policy loss bounds the importance ratio", "clip", "cispo", "sapo", later=True,
    )  # fmt: skip
    """`clip` is the clipped loss of PPO. `cispo` (arXiv 2506.13585) weights the log-probabilities
    with the ratio, capped at 1 + `--clip-high` and constant, so that no token loses its gradient.
    `sapo` (arXiv 2511.20347) replaces the clip by a logistic function of the ratio with
    temperatures of 1, and 1.05 for negative advantages."""
    sequence_mask: float = number(
        "Leave out bad samples whose mean log-probability fell by more than this", 0.0, least=0,
        later=True, unset="off", only=OFF_POLICY,
    )  # fmt: skip
    """Samples with a negative advantage that the policy has moved away from, since they were drawn,
    by more than so many nats per token (arXiv 2512.02556, section 3.1)."""
    ratio: str = choice(
        "Importance ratio of each token, or of the sequence (GSPO)", "token", "sequence",
        only=OFF_POLICY,
    )  # fmt: skip
    """`sequence` (GSPO, arXiv 2507.18071) needs clip ranges of about 0.0003."""
    clip_low: float = number(
        "Lower clip range of the importance ratio", 0.2, above=0, most=1,
        only=(OFF_POLICY, needs(surrogate="clip")),
    )  # fmt: skip
    """The ratio is clipped to 1 − `--clip-low` … 1 + `--clip-high`."""
    clip_high: float = number(
        "Upper clip range of the importance ratio", 0.28, above=0,
        only=(OFF_POLICY, needs(surrogate=("clip", "cispo"))),
    )  # fmt: skip
    dual_clip: float = number(
        "Dual-clip bound for negative advantages", 0.0, least=0, unset="none",
        only=(OFF_POLICY, needs(surrogate="clip")),
    )  # fmt: skip
    """If the advantage is negative, the loss is at most this many times its absolute value (arXiv
    1912.09729). It must be above 1; 3 is usual."""
    beta: float = number(
        "Coefficient of the KL penalty to the initial model; 0 disables it", 0.0, least=0
    )
    """With 0 no reference model is kept in memory."""
    kl_times_ratio: bool = switch(
        "Multiply the KL penalty by the importance ratio", later=True,
        only=(OFF_POLICY, needs("beta")),
    )  # fmt: skip
    """Its gradient is then that of the KL divergence of the current policy (arXiv 2512.02556,
    section 3.1)."""
    correction: str = choice(
        "Importance correction of the rollout/trainer mismatch (TIS, MIS)", "none", "token-cap",
        "sequence-cap", "sequence-mask",
    )  # fmt: skip
    """The loss is multiplied by the probability ratio of trainer and sampler at the time of
    sampling: of each token, capped (`token-cap`, TIS); of the whole sample, capped
    (`sequence-cap`); or of the whole sample, and 0 above the cap (`sequence-mask`, MIS)."""
    correction_cap: float = number(
        "Cap of the importance correction", 2.0, above=0, later=True,
        only=needs(correction=("token-cap", "sequence-cap", "sequence-mask")),
    )  # fmt: skip
    temperature: float = number("Sampling temperature", 1.0, above=0, group="Rollouts")
    """The trained distribution has the same temperature."""
    entropy_floor: float = number(
        "Warn once when the entropy of a step is below this, in nats per token", 0.0, least=0,
        recorded=False, group="Guards", unset="off",
    )  # fmt: skip
    """The entropy is estimated by the mean of -log p of the sampled tokens. A policy that has lost
    it samples equal answers, from which it learns nothing more."""

    def check(self) -> None:
        """The dual-clip bound must be above 1."""
        super().check()
        if 0 < self.dual_clip <= 1:
            raise UsageError(f"--dual-clip: {self.dual_clip} (expected above 1, or 0 for none)")


GAE = needs(advantage="gae")


class ValueOptions(Options, group="Loss"):
    """The value head of `--advantage gae`."""

    gae_lambda: float = number(
        "λ of generalized advantage estimation", 0.95, least=0, most=1, later=True, only=GAE
    )
    """0 compares a token with the next value alone, which depends most on the value head; 1 with
    the reward alone, which varies most."""
    discount: float = number(
        "Discount γ of the reward for each token that comes before it", 1.0, above=0, most=1,
        later=True, only=GAE,
    )  # fmt: skip
    value_coefficient: float = number(
        "Coefficient of the value head's loss", 0.1, least=0, later=True, only=GAE
    )
    """The loss is half the squared difference of value and return, averaged as `--aggregation`
    says. Its gradient trains the policy's matrices too."""
    value_clip: float = number(
        "Clip range of a value around that at the time of sampling; 0 disables it", 0.2, least=0,
        later=True, only=GAE,
    )  # fmt: skip
    value_lr: float = number(
        "Learning rate of the value head, as a multiple of --lr", 10.0, above=0, later=True,
        only=GAE,
    )  # fmt: skip
    """That of its bias is as many times higher as the model is wide. The head makes one step of the
    optimizer per update: with few updates it learns little more than the mean return, and
    `explained_variance` stays near 0."""


class GrpoOptions(
    Trainer, Reward, Rollouts, ExactSampling, RoutingReplay, Curriculum, ServedSampler,
    OnPolicyTeacher, PolicyLoss, ValueOptions, Schedule, Optimizer,
    Adapters, AdapterStart, RunOptions, JudgeOptions, ChatTemplate,
    group="Model",
    defaults={"lr": 1e-4, "schedule": "constant", "warmup": "10", "decay": "0",
              "weight_decay": 0.0},
    without=("decay_shape", "row_sigmas", "max_skipped", "mup_base", "z_loss", "balance",
             "router_z", "bias_rate"),
):  # fmt: skip
    """Options of `sabia grpo`."""

    model: str = text("Model directory to train", "DIR", required=True, common=True)
    """Its tokenizer needs a chat template."""
    backend: str = Trainer.backend
    """With `jax` one process uses all of its devices, the first of them for sampling; rows,
    lengths and numbers of samples are filled up to powers of two, for which it compiles."""
    mesh: str = Trainer.mesh
    """The axes are those of `sabia pretrain`. Each process samples its share of the prompts with
    the whole policy, which it gathers before each step: a mesh splits the memory of training, not
    that of sampling. Along `data` alone each process trains on its own samples; on other meshes all
    processes share them. The default is `data` with the number of processes that were started."""

    max_unknown: float = changed(JudgeOptions.max_unknown, group="Reward", only=JUDGED)

    advantage: str = choice(
        "Group-mean baseline (mean), also divided by the group's std (std), or PPO's (gae)", "mean",
        "std", "gae", group="Loss",
    )  # fmt: skip
    """`mean` subtracts the mean reward of the group (group-mean baseline); `std` also divides by
    the group's standard deviation. `gae` is PPO: a value head on the policy predicts the reward at
    each token, the advantage of a token is its generalized advantage estimate (arXiv 1506.02438),
    normalised over the tokens of the step, and `--group` may be 1. The reward is that of the last
    token. Checkpoints contain the head, `final/` does not. The metrics have `value_loss`,
    `value_clip_fraction` and `explained_variance`."""

    precision: str = PrecisionOptions.precision
    """The formats are described in `sabia pretrain`. Samples are generated in bf16, and in fp32
    with `fp32`."""
    remat: str = PrecisionOptions.remat
    """Each sample then has a row with its prompt."""
    compile: bool = PrecisionOptions.compile
    micro_tokens: int = quantity(
        "whole", "Tokens per forward and backward pass on a device", "16K", group="Parallelism",
        recorded=False,
    )  # fmt: skip
    """A smaller number needs less memory; the update does not depend on it."""
    validation: str = text("Prompt records to validate on", "PATH", group="Data", recorded=False)
    """`validation_reward` is the mean reward of one greedy sample of each prompt,
    `validation_sampled_reward` that of one sample at `--temperature`. The checkpoint with the
    highest validation reward is kept besides the newest ones; where it is not the last one, `best/`
    is its model in the format of `final/`."""
    eval_every: int = changed(Logging.eval_every, only=needs("validation"))
    on_spike: str = changed(
        Guards.on_spike, default="off", choices=("off", "skip", "stop"),
        help="At a loss spike: do nothing (off), leave the update out (skip), or stop",
    )  # fmt: skip
    """A spike is an update whose loss or gradient norm is an outlier compared with the last
    `--spike-window` updates, or is not finite. `skip` does not apply it and goes on; the run fails
    after `--max-rewinds` of them. `stop` fails. `off` applies every finite update, and fails at
    others."""
    max_logprob_gap: float | None = number(
        "Maximum mean difference of the log-probabilities of trainer and sampler", above=0,
        unset="by --precision", recorded=False, group="Guards",
    )  # fmt: skip
    """The mean of |trainer − sampler| over the sampled tokens of a step, in nats (`logprob_gap`). A
    larger one means that another distribution is trained than was sampled; the run stops with exit
    status 1. The default is 0.001 with `--precision fp32`, 0.05 with `bf16`, else 0.25."""
    spike_sigmas: float = changed(Guards.spike_sigmas, only=LIMITED)
    """σ, the robust standard deviation, is at least 2% of the median loss and 10 times the median
    gradient norm."""
    spike_window: int = changed(
        Guards.spike_window, only=LIMITED,
        help="Number of last applied updates that an update is compared with",
    )  # fmt: skip
    spike_min_steps: int = changed(
        Guards.spike_min_steps, only=LIMITED, help="Updates before spikes are detected"
    )
    """At most `--spike-window`."""
    max_rewinds: int = changed(
        Guards.max_rewinds, only=needs(on_spike="skip"),
        help="Updates that may be left out before the run fails",
    )  # fmt: skip
    """They are counted from the last start of the run."""
    max_judge_tokens: int | None = quantity(
        "whole", "Maximum tokens of the judge; stop before using more", only=JUDGED, group="Judge",
        recorded=False,
    )  # fmt: skip
    """Tokens of the judge's prompts and replies in the whole run. Exit status 3."""

    def check(self) -> None:
        """A judge needs a rubric as the reward."""
        super().check()
        nothing = "--reward none", self.reward == "none"
        masked = "--sequence-mask", self.sequence_mask
        if self.advantage == "gae":
            _refuse_beside("--advantage gae", nothing, ("--refill", self.refill), masked)
        if self.step_delimiter:
            if re.search(self.step_delimiter, ""):
                raise UsageError(
                    f"--step-delimiter: {self.step_delimiter!r} matches nothing at all (expected "
                    "such as \\n\\n)"
                )
            buffered = "--overlong-buffer", self.overlong_buffer
            _refuse_beside("--step-delimiter", nothing, buffered, masked)
        if self.group < 2 and self.advantage != "gae":
            raise UsageError(f"--group: {self.group} (expected 2 or more, or --advantage gae)")
        if self.reward == "none" and not self.teacher:
            raise UsageError("--reward: none without --teacher (expected a reward, or a teacher)")
        if self.teacher_is_served and self.temperature != 1:
            raise UsageError(
                f"--temperature: {self.temperature:g} with a server as the --teacher (expected 1: "
                "its log-probabilities are at 1)"
            )
        if (self.thinking_budget or 0) >= self.max_new_tokens:
            raise UsageError(
                f"--thinking-budget: {self.thinking_budget} (expected less than the "
                f"{self.max_new_tokens} of --max-new-tokens)"
            )
        if self.sampler_url and self.lora_base != "none":
            raise UsageError("--sampler-url: not together with --lora-base")
        if self.sampler_url and not self.sampler_folder:
            raise UsageError("--sampler-folder: is missing (expected DIR, with --sampler-url)")
        asks_model = "model" in [part.split("=")[0].strip() for part in self.reward.split(",")]
        if asks_model and not self.reward_model:
            raise UsageError("--reward-model: is missing (expected DIR, with --reward model)")
        if self.reward_model and not asks_model:
            raise UsageError("--reward-model: only with --reward model")
        for name in ("judge_url", "judge"):
            if getattr(self, name) and "rubric" not in self.reward:
                raise UsageError(f"{self.table[name].flag}: only with --reward rubric")


def _refuse_beside(flag: str, *others: tuple[str, object]) -> None:
    """Raise UsageError for the first of the other flags whose value is given."""
    for other, given in others:
        if given:
            raise UsageError(f"{other}: not together with {flag}")
