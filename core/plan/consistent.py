"""Options that say nothing where another one is not given: refused, never silently ignored."""

from sabia.core.errors import UsageError
from sabia.core.plan.settings import Settings, flag

LAYOUTS = ("search", "fixed_layout")
# options → those of which one must be there for them to mean something
NEEDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("stack", "precision", "recompute", "micro_batch", "explain"), LAYOUTS),
    (("objective",), ("search",)),
    (("pretrain_args",), ("emit",)),
    (("seed",), ("simulate",)),
    (("queue",), ("job_limit",)),
    (("off_policy",), ("generation_chips",)),
    (
        ("judge_prompt_tokens", "judge_output_tokens", "judge_params", "judge_price"),
        ("judge_calls",),
    ),
    (("judge_active",), ("judge_params",)),
)
_ENGINE = ("weights", "cache", "replica_chips")
_OWN_CHIPS = ("cache", "replica_chips", "chips", "nodes", "utilisation")
_JUDGE = ("judge_calls", "judge_prompt_tokens", "judge_output_tokens", "judge_params",
          "judge_active", "judge_price")  # fmt: skip
# options → the stages that they belong to
STAGES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_ENGINE, ("serve", "grpo", "eval")),
    (("batch",), ("serve", "grpo")),
    (("output_limit",), ("grpo",)),
    (("prompt_tokens", "output_tokens"), ("serve", "grpo", "eval", "sft")),
    (("items", "repeats"), ("eval", "sft")),
    (("prompts", "group", "steps", "generation_chips", "off_policy", "no_reference",
      "reward_time"), ("grpo",)),
    (_JUDGE, ("grpo", "eval")),
    (("api_price",), ("eval",)),
)  # fmt: skip
# what a stage that is no training run may be given beside its own options
_COMMON = ("params", "active", "model", "layers", "hidden", "stage", "chip", "chips", "nodes",
           "price", "provider", "region", "commitment", "spot", "utilisation")  # fmt: skip
_TRAINS = ("mfu", "state_recipe", "lora", "lora_rank",
           *LAYOUTS, "stack", "precision", "recompute", "micro_batch")  # fmt: skip
OTHERS: dict[str, tuple[str, ...]] = {
    "serve": _COMMON, "eval": _COMMON, "grpo": (*_COMMON, *_TRAINS)
}  # fmt: skip


def check(settings: Settings) -> None:
    """Raise UsageError on options that would be ignored, naming what they need."""
    for options, needed in NEEDS:
        if (said := settings.given(*options)) and not settings.given(*needed):
            raise UsageError(f"{flag(said[0])}: only with {' or '.join(map(flag, needed))}")
    stage = settings.stage or "pretrain"
    for options, stages in STAGES:
        if (said := settings.given(*options)) and stage not in stages:
            raise UsageError(f"{flag(said[0])}: only with --stage {' or '.join(stages)}")
    if stage in OTHERS:
        own = [name for options, stages in STAGES if stage in stages for name in options]
        for name in settings.given():
            if name not in (*OTHERS[stage], *own):
                raise UsageError(
                    f"{flag(name)}: is of a training run; leave it out of --stage {stage}"
                )
    if settings.api_price is not None and (said := settings.given(*_OWN_CHIPS)):
        raise UsageError(f"{flag(said[0])}: is of own chips; leave out --api-price")
    if settings.spot and settings.spot_share is not None:
        raise UsageError("--spot-share: stands in for prices on file; leave out --spot")
