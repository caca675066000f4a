"""Options of `sabia grpo`."""

from sabia.core.errors import UsageError
from sabia.core.options.calls import JUDGED, JudgeOptions
from sabia.core.options.option import (
    MORE_THAN_ONE,
    changed,
    choice,
    integer,
    needs,
    number,
    quantity,
    text,
)
from sabia.core.options.shared import Trainer
from sabia.core.options.table import Options
from sabia.core.options.training import Checkpoints, Optimizer, PrecisionOptions, Schedule

OFF_POLICY = needs(updates=MORE_THAN_ONE)  # in the only update of a step the ratio is 1


class Reward(Options, group="Reward"):
    """What a sample is graded by."""

    reward: str = text(
        "Verifiers and rubrics: number, or number=0.8,regex=0.2", "KIND[=WEIGHT],…",
        default="exact", common=True,
    )  # fmt: skip
    """Verifiers compare a sample with the record's `answer`. `exact`: the same text, but for white
    space. `number`: the last number of the sample has the answer's value. `contains`: the answer
    occurs in the sample, without regard to case. `regex`: the answer, a regular expression, is
    found in the sample. `choice`: the sample's last letter that stands alone is the answer's.
    `json`: the sample is JSON and holds the answer's keys and values. `rubric` takes the record's
    `rubric` instead: the share of its weight that is met. Several with weights are a mix."""
    max_null: float = quantity(
        "share", "Maximum share of samples without a reward", "20%", only=JUDGED, recorded=False
    )
    """The run stops when more of the last samples have none, because the judge failed."""


class Rollouts(Options, group="Rollouts"):
    """What is sampled in a step."""

    steps: int = integer("Steps to train", 100, least=1, common=True)
    prompts: int = integer("Prompts in a step, over all processes", 32, least=1)
    group: int = integer("Samples of each prompt", 16, least=2)
    """A sample is compared with the mean of its group."""
    max_new_tokens: int = integer("Maximum tokens of a sample", 256, least=1, common=True)
    overlong: str = choice("Truncated samples: keep in the loss, or mask", "keep", "mask")
    """Samples that are cut off at `--max-new-tokens` count in their group's mean in both cases."""


class PolicyLoss(Options, group="Loss"):
    """How the policy loss is formed; the defaults are DAPO's clip and token sum, without KL."""

    updates: int = integer("Mini-batch updates per step", 1, least=1)
    """Each update takes its part of the samples. In a single update the ratio is 1 and no clip
    binds."""
    aggregation: str = choice("Aggregation of the token losses", "token", "seq-mean", "dr")
    """`token` is the mean over all tokens of the step; `seq-mean` the mean of the samples' means;
    `dr` the sum divided by samples times `--max-new-tokens` (Dr. GRPO)."""
    ratio: str = choice(
        "Importance ratio, of tokens or sequences (GSPO)", "token", "sequence", only=OFF_POLICY
    )
    """`sequence` (GSPO, arXiv 2507.18071) wants clips near 0.0003."""
    clip_low: float = number("Clip of the ratio below 1", 0.2, above=0, most=1, only=OFF_POLICY)
    """The ratio counts from 1 − `--clip-low` to 1 + `--clip-high`."""
    clip_high: float = number("Clip of the ratio above 1", 0.28, above=0, only=OFF_POLICY)
    dual_clip: float = number(
        "Dual-clip bound for negative advantages", 0.0, least=0, only=OFF_POLICY, unset="none"
    )
    """The loss of a sample below the group's mean is at most this many times its advantage, such as
    3. It must be above 1."""
    beta: float = number("Coefficient of the KL to the starting model", 0.0, least=0)
    """0 keeps no second model in memory."""
    correction: str = choice(
        "Importance correction of the rollout/trainer mismatch", "none", "token-cap",
        "sequence-cap", "sequence-mask",
    )  # fmt: skip
    """It weighs the loss where the sampler's log-probabilities differ from the trainer's."""
    temperature: float = number("Sampling temperature", 1.0, above=0, group="Rollouts")
    """It is also that of the trained distribution. It is above 0 because greedy samples are all
    alike."""

    def check(self) -> None:
        """A dual clip lies above the usual one."""
        super().check()
        if 0 < self.dual_clip <= 1:
            raise UsageError(f"--dual-clip: {self.dual_clip} (expected above 1, or 0 for none)")


class GrpoOptions(
    Trainer, Reward, Rollouts, PolicyLoss, Schedule, Checkpoints, JudgeOptions, group="Model",
    defaults={"lr": 1e-4, "schedule": "constant", "warmup": "10", "decay": "0"},
    without=("decay_shape",),
):  # fmt: skip
    """Options of `sabia grpo`."""

    model: str = text("Model directory to start from", "DIR", required=True, common=True)
    """Its tokenizer needs a chat template."""
    backend: str = changed(Trainer.backend, choices=("torch",))
    """The sampling engine runs on torch."""
    mesh: str = changed(Trainer.mesh, help="Copies of the model, such as data=4", metavar="data=N")
    """Torch takes one process a device; no other axis is split here."""

    max_unknown: float = changed(JudgeOptions.max_unknown, group="Reward", only=JUDGED)

    advantage: str = choice("Baseline of rewards", "mean", "std", group="Loss")
    """`mean` subtracts the group's mean; `std` also divides by the group's standard deviation."""

    weight_decay: float = changed(Optimizer.weight_decay, default=0.0)
    """The optimizer is AdamW."""
    betas: str = changed(Optimizer.betas, default="0.9,0.95", unset="", only=())
    clip_norm: float = Optimizer.clip_norm
    precision: str = PrecisionOptions.precision
    """See `sabia pretrain`. Samples are drawn in bf16 with all but `fp32`."""
    micro_tokens: int = quantity(
        "whole", "Tokens of one forward and backward pass", "16K", group="Parallelism",
        recorded=False,
    )  # fmt: skip
    max_judge_tokens: int | None = quantity(
        "whole", "Stop before using more tokens", only=JUDGED, group="Judge", recorded=False
    )
    """Tokens of prompts and replies of the judge, in the whole run."""

    def check(self) -> None:
        """A judge judges rubrics."""
        super().check()
        if self.judge_url and "rubric" not in self.reward:
            raise UsageError("--judge-url: only with --reward rubric")
